"""Reads each source of settings into a layer: files, the environment, and assignments on the command line."""

from __future__ import annotations

import datetime
import os
import re
import shlex
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial, reduce
from pathlib import Path
from typing import Any

from slimectl.errors import SettingsError
from slimectl.settings import aliases
from slimectl.settings.base import section_names
from slimectl.settings.keys import setting_names, suggestion
from slimectl.settings.root import Settings
from slimectl.system.redaction import MASK, is_secret_name
from slimectl.system.stdio import LOG_LEVEL

PREFIX = "SLIMECTL_"
SERVICE_LINK = re.compile(
    r"(?!SLIMECTL_CUSTOM_)\w+_(SERVICE_(HOST|PORT(_\w+)?)=.*|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?=.*|=\w+://.*))",
    re.S,
)
"""Matches variables that Kubernetes and Docker set in every container for a service named slimectl…."""
Values = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Layer:
    """One source of settings: its display name, and section -> key -> value.

    A recipe that ships with slimectl sets [algorithm] for one algorithm. A later layer with another algorithm drops it.
    """

    origin: str
    values: Values
    is_recipe: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variable of each dotted key."""

    def place(self, name: str) -> str:
        """Describe where the layer sets a dotted key, for messages."""
        return f"environment variable {self.variables[name]}" if name in self.variables else self.origin


def read_layers(readers: Iterable[Callable[[], Layer]]) -> tuple[list[Layer], list[str]]:
    """Call every reader. Return the layers that could be read, and one line for every error."""
    layers: list[Layer] = []
    errors: list[str] = []
    for read in readers:
        try:
            layers.append(read())
        except SettingsError as error:
            errors.append(str(error))
    return layers, errors


def from_file(path: Path) -> Layer:
    """Read a TOML or YAML file, depending on the suffix. Raises SettingsError if it is missing or cannot be parsed."""
    return from_document(path, settings_document(path))


def from_document(path: Path, document: dict[str, Any]) -> Layer:
    """Return the settings of a parsed file. Raises SettingsError for a value outside of a section."""
    values = aliases.with_tracker_names(document)
    values.pop("recipe", None)  # The description of a recipe is not a setting.
    for section, keys in values.items():
        if not isinstance(keys, dict):
            raise SettingsError(
                f"{path}: {section}: settings belong in sections. Write [section] above `{section} = …`. Convert a"
                f" file of another program with `slimectl settings from {shlex.quote(str(path))}`."
            )
    return Layer(
        str(path), {section: {str(key): value for key, value in keys.items()} for section, keys in values.items()}
    )


YAML_SUFFIXES = (".yaml", ".yml")
FORMS = {
    "settings file": "a settings file needs sections with keys",
    "evaluation file": "an evaluation file needs `defaults` and `datasets`",
    "file of your settings": "write your own settings as names with values, such as `max_turns: 4`",
}
"""Kinds of settings files, each with its expected form."""


def settings_document(path: Path) -> dict[str, Any]:
    """Parse a settings file without changes, including its [recipe]. Raises SettingsError."""
    return _read_document(path, "settings file", toml=path.suffix not in YAML_SUFFIXES)


def _read_document(path: Path, kind: str, *, toml: bool) -> dict[str, Any]:
    """Parse a TOML or YAML file. Raises SettingsError, which calls the file a `kind`."""
    try:
        text = path.read_text(encoding="utf-8")
        document = _with_dates_as_text(tomllib.loads(text) if toml else _yaml(text))
    except FileNotFoundError:
        raise SettingsError(f"{path}: no such {kind}") from None
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        language = "TOML" if toml else "YAML"
        raise SettingsError(f"{path}: not valid {language}: {' '.join(str(error).split())}") from None
    if not isinstance(document, dict):
        raise SettingsError(f"{path}: {FORMS[kind]}")
    return document


DATES = (datetime.date, datetime.time)


def _with_dates_as_text(value: Any) -> Any:
    """Return a document with its dates and times as text. Settings that look like one are names or time limits."""
    if isinstance(value, dict):
        return {key: _with_dates_as_text(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_dates_as_text(item) for item in value]
    return value.isoformat() if isinstance(value, DATES) else value


def _yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ValueError(error) from None


def from_environment(environ: Mapping[str, str] = os.environ) -> Layer:
    """Read every environment variable SLIMECTL_SECTION_KEY=value. The longest matching section wins.

    Variables that Kubernetes sets for a service named slimectl are ignored.

    >>> from_environment({"SLIMECTL_SFT_WARMUP_MAX_STEPS": "5"}).values
    {'sft_warmup': {'max_steps': 5}}
    """
    known_sections = [*Settings.model_fields, *aliases.SECTIONS]
    values: Values = {}
    variables: dict[str, str] = {}
    for name, text in sorted(environ.items()):
        if name.startswith(PREFIX) and name != LOG_LEVEL and not SERVICE_LINK.fullmatch(f"{name}={text}"):
            words = name[len(PREFIX) :].lower()
            section = _longest(known_sections, words) or _longest(section_names(), words) or words.partition("_")[0]
            if key := words[len(section) + 1 :]:
                values.setdefault(section, {})[key] = parse_value(text)
                variables[f"{section}.{key}"] = name
    return Layer("environment", values, variables=variables)


def _longest(sections: Iterable[str], words: str) -> str | None:
    """Return the longest section that the name of a variable begins with."""
    return max((section for section in sections if words.startswith(f"{section}_")), key=len, default=None)


def from_assignments(assignments: Iterable[str]) -> Layer:
    """Parse assignments `section.key=value`. A third part is a key of a table: eval.data.aime=aime.jsonl."""
    values: Values = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        parts = name.strip().split(".")
        if not equals or len(parts) < 2 or not all(parts):
            shown = f"{name}={MASK}" if is_secret_name(name) else assignment
            near = suggestion(name.strip(), setting_names()) if equals and len(parts) == 1 else None
            example = f"{near}={text}" if near and not is_secret_name(near) else "train.lr=1e-5"
            raise SettingsError(f"-s {shown}: write it as section.key=value, e.g. -s {example}")
        table: dict[str, Any] = values.setdefault(parts[0], {})
        for part in parts[1:-1]:
            table = table.setdefault(part, {})
        table[parts[-1]] = parse_value(text)
    return Layer("command line", values)


def read_assignments(assignments: Iterable[str]) -> tuple[Layer, list[str]]:
    """Parse assignments into one layer. Also return an error line for each one that cannot be parsed."""
    layers, errors = read_layers(partial(from_assignments, [each]) for each in assignments)
    values: Values = reduce(merge, (layer.values for layer in layers), {})
    return Layer("command line", values), errors


def nested(values: Mapping[str, Any]) -> Values:
    """Return sections from dotted keys. A third part is a key of a table.

    >>> nested({"run.num_rollout": 2, "eval.data.aime": "aime.jsonl"})
    {'run': {'num_rollout': 2}, 'eval': {'data': {'aime': 'aime.jsonl'}}}

    Raises SettingsError for a key without a section.
    """
    sections: Values = {}
    for name, value in values.items():
        parts = name.split(".")
        if len(parts) < 2 or not all(parts):
            raise SettingsError(f"{name}: write a setting as section.key, e.g. train.lr")
        table: dict[str, Any] = sections.setdefault(parts[0], {})
        for part in parts[1:-1]:
            table = table.setdefault(part, {})
        table[parts[-1]] = value
    return sections


def parse_value(text: str) -> Any:
    """Parse a TOML value, `none` as None. Any other text, and a date or time, is returned unchanged."""
    if text.strip().lower() in ("none", "null"):
        return None
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return text if isinstance(value, DATES) else _with_dates_as_text(value)


def merge(old: Any, new: Any) -> Any:
    """Merge tables key by key. Any other value of `old` is replaced."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return new
    return {**old, **{key: merge(old.get(key), value) for key, value in new.items()}}


SPELLINGS = {
    "n_samples_per_eval_prompt": "n_samples_per_prompt",
    "eval_interval": "interval",
}
"""Slime's key names and their slimectl equivalents. Any key may also be prefixed with eval_ or rollout_."""


def from_eval_config(path: Path) -> Layer:
    """Read [eval] from a YAML or TOML file.

    The file has `defaults` (or `default`) for all datasets, and `datasets`. That is a list of tables with `name` and
    `path`, or a table of them by name. All of it may be nested under `eval`. Raises SettingsError for anything else.
    """
    document = _read_document(path, "evaluation file", toml=path.suffix == ".toml")
    document = document.get("eval", document)
    if not isinstance(document, dict):
        raise SettingsError(f"{path}: {FORMS['evaluation file']}")
    unknown = sorted(set(document) - {"defaults", "default", "datasets"})
    if unknown or not document.get("datasets"):
        wrong = f"{unknown[0]}: unknown key" if unknown else "no datasets"
        raise SettingsError(f"{path}: {wrong}; {FORMS['evaluation file']}")
    shared = document.get("defaults") or document.get("default") or {}
    data = dict(_parse_dataset(path, entry) for entry in _as_list(document["datasets"]))
    return Layer(str(path), {"eval": {**_normalize_keys(shared), "data": data}})


def from_custom_config(path: Path) -> Layer:
    """Read the keys of [custom] from a YAML, JSON or TOML file. Raises SettingsError for anything but an object."""
    document = _read_document(path, "file of your settings", toml=path.suffix == ".toml")
    return Layer(str(path), {"custom": {str(key): value for key, value in document.items()}})


def _as_list(datasets: Any) -> list[Any]:
    """Convert tables by name to a list."""
    if isinstance(datasets, dict):
        return [{"name": name, **entry} if isinstance(entry, dict) else entry for name, entry in datasets.items()]
    return datasets if isinstance(datasets, list) else [datasets]


def _parse_dataset(path: Path, entry: Any) -> tuple[str, dict[str, Any]]:
    if not isinstance(entry, dict) or not entry.get("name") or not entry.get("path"):
        raise SettingsError(f"{path}: datasets: each must be a table with `name` and `path`, not {entry!r}")
    return str(entry["name"]), _normalize_keys({key: value for key, value in entry.items() if key != "name"})


def _normalize_keys(options: dict[str, Any]) -> dict[str, Any]:
    """Rename keys to the names in [eval], and drop null values."""
    short = {key.removeprefix("eval_").removeprefix("rollout_"): key for key in options if key not in SPELLINGS}
    named = {name: options[key] for name, key in short.items()}
    named |= {ours: options[theirs] for theirs, ours in SPELLINGS.items() if theirs in options}
    return {name: value for name, value in named.items() if value is not None}
