"""Layered settings from files, environment and command line; later layers win, and origins are recorded."""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from slimectl.errors import SettingsError
from slimectl.redaction import MASK, is_secret_name, redact
from slimectl.settings import aliases
from slimectl.settings.algorithm import ALGORITHMS
from slimectl.settings.checks import conflicts
from slimectl.settings.parts import UNKNOWN_PART, section_class, section_names, selected_parts
from slimectl.settings.rollout_algorithms import Grpo
from slimectl.settings.root import Settings

PREFIX = "SLIMECTL_"
Values = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Layer:
    """One source of settings: its display name, and section -> key -> value."""

    origin: str
    values: Values


@dataclass(frozen=True)
class Resolved:
    """The settings, and for each dotted key the layer that set it ("default" if none)."""

    settings: Settings
    origins: dict[str, str]


def from_file(path: Path) -> Layer:
    """Read a TOML file. Raises SettingsError if it is missing or not TOML."""
    try:
        with path.open("rb") as file:
            values = tomllib.load(file)
    except FileNotFoundError:
        raise SettingsError(f"{path}: no such settings file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: not valid TOML: {error}") from None
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}") from None
    values.pop("recipe", None)  # The description of a recipe is not a setting.
    for section, keys in values.items():
        if not isinstance(keys, dict):
            raise SettingsError(f"{path}: {section}: settings stand in sections; write [section] above `{section} = …`")
    return Layer(str(path), values)


def from_environment(environ: Mapping[str, str] = os.environ) -> Layer:
    """Read every environment variable SLIMECTL_SECTION_KEY=value; the section is the longest known one.

    >>> from_environment({"SLIMECTL_SFT_WARMUP_MAX_STEPS": "5"}).values
    {'sft_warmup': {'max_steps': 5}}
    """
    known_sections = [*Settings.model_fields, *aliases.SECTIONS]
    values: Values = {}
    for name, text in sorted(environ.items()):
        if name.startswith(PREFIX):
            words = name[len(PREFIX) :].lower()
            section = _longest(known_sections, words) or _longest(section_names(), words) or words.partition("_")[0]
            if key := words[len(section) + 1 :]:
                values.setdefault(section, {})[key] = parse_value(text)
    return Layer("environment", values)


def _longest(sections: Iterable[str], words: str) -> str | None:
    """The longest section that the words of a variable begin with."""
    return max((section for section in sections if words.startswith(f"{section}_")), key=len, default=None)


def from_assignments(assignments: Iterable[str], origin: str = "command line") -> Layer:
    """Parse assignments `section.key=value`; a third part addresses a table: eval.data.aime=aime.jsonl."""
    values: Values = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        parts = name.strip().split(".")
        if not equals or len(parts) < 2 or not all(parts):
            shown = f"{name}={MASK}" if is_secret_name(name) else assignment
            raise SettingsError(f"-s {shown}: write it as section.key=value, e.g. -s train.lr=1e-5")
        table: dict[str, Any] = values.setdefault(parts[0], {})
        for part in parts[1:-1]:
            table = table.setdefault(part, {})
        table[parts[-1]] = parse_value(text)
    return Layer(origin, values)


def nested(values: Mapping[str, Any]) -> Values:
    """Sections from dotted keys; a third part addresses a table.

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
    """Parse a TOML value, `none` as None; any other text is returned unchanged."""
    if text.strip().lower() in ("none", "null"):
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def resolve(layers: Sequence[Layer]) -> Resolved:
    """Merge the layers, later over earlier, and validate. Raises SettingsError, with one line per error."""
    merged: Values = {}
    origins: dict[str, str] = {}
    for layer in layers:
        for (section, name), value in _current_values(layer, merged).items():
            merged.setdefault(section, {})[name] = _merge(merged.get(section, {}).get(name), value)
            origins[f"{section}.{name}"] = layer.origin
    # The discriminator is optional, like every other key.
    if "algorithm" in merged:
        merged["algorithm"].setdefault("name", Grpo.model_fields["name"].default)
    try:
        settings = Settings.model_validate(merged | _part_sections(merged, origins))
    except ValidationError as error:
        raise SettingsError("\n".join(_error_lines(error, origins))) from None
    wrong = list(conflicts(settings))
    if wrong:
        raise SettingsError("\n".join(wrong))
    return Resolved(settings, {name: origins.get(name, "default") for name, _ in flat(settings)})


def _part_sections(merged: Values, origins: dict[str, str]) -> dict[str, BaseModel]:
    """The validated sections that parts of other packages bring, if they are selected or have values."""
    sections: dict[str, BaseModel] = {}
    for name in {*(merged.keys() - Settings.model_fields.keys()), *selected_parts(merged)}:
        if cls := section_class(name):
            try:
                sections[name] = cls.model_validate(merged.get(name, {}))
            except ValidationError as error:
                raise SettingsError("\n".join(_error_lines(error, origins, (name,)))) from None
    return sections


def flat(settings: Settings) -> Iterator[tuple[str, Any]]:
    """Yield every dotted key with its value, in the order of the reference."""
    for section, keys in settings.model_dump(by_alias=True).items():
        for key, value in keys.items():
            yield f"{section}.{key}", value


def keys_of(section: str, algorithm: str | None = None) -> list[str]:
    """The keys of a section; for [algorithm], of one algorithm or of all."""
    if section == "algorithm":
        classes: list[type[BaseModel]] = [ALGORITHMS[algorithm]] if algorithm in ALGORITHMS else [*ALGORITHMS.values()]
    elif section in Settings.model_fields:
        annotation = Settings.model_fields[section].annotation
        classes = [annotation] if isinstance(annotation, type) else list(get_args(annotation))
    else:
        cls = section_class(section)
        classes = [] if cls is None else [cls]
    names = [field.alias or name for cls in classes for name, field in cls.model_fields.items()]
    return list(dict.fromkeys(names))


def sections() -> dict[str, list[str]]:
    """Every section with its keys, of all algorithms."""
    return {section: keys_of(section) for section in Settings.model_fields}


def _merge(old: Any, new: Any) -> Any:
    """Merge tables key by key; any other value is replaced."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return new
    return {**old, **{key: _merge(old.get(key), value) for key, value in new.items()}}


def _current_values(layer: Layer, merged: Values) -> dict[tuple[str, str], Any]:
    """The layer's values by present section and key. Raises SettingsError for two names of one setting."""
    values: dict[tuple[str, str], Any] = {}
    spellings: dict[tuple[str, str], str] = {}
    for old_section, keys in layer.values.items():
        for old_key, value in keys.items():
            section, key = _known_key(old_section, old_key, layer, merged)
            address = (section, aliases.KEYS.get(section, {}).get(key, key))
            if address in spellings:
                name = ".".join(address)
                raise SettingsError(
                    f"{spellings[address]} and {old_section}.{old_key} are the same setting ({layer.origin}); give "
                    f"{name} alone"
                )
            spellings[address] = f"{old_section}.{old_key}"
            values[address] = aliases.current_value(section, key, None if value == "none" else value)
    return values


def _known_key(section: str, key: str, layer: Layer, merged: Values) -> tuple[str, str]:
    """The present section, and the key without its section's name: `rollout.rollout_temperature` is `temperature`.

    The key may be an old one. Raises SettingsError for an unknown name.
    """
    current = aliases.current_section(section)
    if current not in Settings.model_fields and section_class(current) is None:
        raise SettingsError(_unknown_key(f"{section}.{key}", sections(), layer))
    algorithm = merged.get("algorithm", {}).get("name") or layer.values.get("algorithm", {}).get("name")
    known_keys = keys_of(current, algorithm if isinstance(algorithm, str) else None)
    for name in (key, key.removeprefix(f"{section}_"), key.removeprefix(f"{current}_")):
        if name in known_keys or name in aliases.KEYS.get(current, {}):
            return current, name
    raise SettingsError(_unknown_key(f"{section}.{key}", {current: known_keys}, layer))


def _unknown_key(name: str, keys_by_section: dict[str, list[str]], layer: Layer) -> str:
    available = [f"{section}.{key}" for section, keys in keys_by_section.items() for key in keys]
    near = nearest_name(name, available + aliases.old_names(keys_by_section))
    if near is None:
        tail = name.partition(".")[2]
        near = next((candidate for candidate in available if candidate.partition(".")[2] == tail), None)
    hint = f"did you mean {near}?" if near else "`slimectl settings show` lists all"
    return f"{name}: unknown setting ({layer.origin}); {hint}"


def nearest_name(name: str, available: Sequence[str]) -> str | None:
    """The most similar of the available names, by its present name; None if none is similar."""
    near = difflib.get_close_matches(name, available, n=1, cutoff=0.6)
    return aliases.current_name(near[0]) if near else None


def _error_lines(error: ValidationError, origins: dict[str, str], prefix: tuple[str, ...] = ()) -> Iterator[str]:
    for item in error.errors():
        parts = [str(part) for part in (*prefix, *item["loc"])]
        if parts[:1] == ["algorithm"] and len(parts) > 1 and parts[1] in ALGORITHMS:
            del parts[1]  # pydantic names the member of the union, which is no part of the key
        name = ".".join(parts[:2])
        if item["type"] == "union_tag_invalid":
            yield f"algorithm.name: unknown algorithm {item['ctx']['tag']!r}; known are {', '.join(ALGORITHMS)}"
            continue
        message = item["msg"][:1].lower() + item["msg"][1:]
        origin = origins.get(name, "default")
        hidden = isinstance(item["input"], dict) or any(map(is_secret_name, parts)) or item["type"] == UNKNOWN_PART
        actual = "" if hidden else f", not {redact(item['input'])!r}"
        yield f"{name}: {message}{actual} ({origin})"


SPELLINGS = {
    "n_samples_per_eval_prompt": "n_samples_per_prompt",
    "eval_interval": "interval",
}
"""Slime's key names and their slimectl equivalents; any key may also be prefixed with eval_ or rollout_."""


def from_eval_config(path: Path) -> Layer:
    """Read [eval] from a YAML or TOML file.

    The file has `defaults` (or `default`) for all datasets, and `datasets`: a list of tables with `name` and `path`,
    or a table of those by name; all of it may be nested under `eval`. Raises SettingsError for anything else.
    """
    document = _read_document(path)
    document = document.get("eval", document)
    unknown = sorted(set(document) - {"defaults", "default", "datasets"})
    if unknown or not document.get("datasets"):
        wrong = f"{unknown[0]}: unknown key" if unknown else "no datasets"
        raise SettingsError(f"{path}: {wrong}; an evaluation file has `defaults` and `datasets`")
    shared = document.get("defaults") or document.get("default") or {}
    data = dict(_parse_dataset(path, entry) for entry in _as_list(document["datasets"]))
    return Layer(str(path), {"eval": {**_normalize_keys(shared), "data": data}})


def _read_document(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        parsed = tomllib.loads(text) if path.suffix == ".toml" else _yaml(text)
    except FileNotFoundError:
        raise SettingsError(f"{path}: no such evaluation file") from None
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise SettingsError(f"{path}: {' '.join(str(error).split())}") from None
    if not isinstance(parsed, dict) or not isinstance(parsed.get("eval", {}), dict):
        raise SettingsError(f"{path}: an evaluation file has `defaults` and `datasets`")
    return parsed


def _yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"not valid YAML: {error}") from None


def _as_list(datasets: Any) -> list[Any]:
    """Convert tables by name to a list."""
    if isinstance(datasets, dict):
        return [{"name": name, **entry} if isinstance(entry, dict) else entry for name, entry in datasets.items()]
    return datasets if isinstance(datasets, list) else [datasets]


def _parse_dataset(path: Path, entry: Any) -> tuple[str, dict[str, Any]]:
    if not isinstance(entry, dict) or not entry.get("name") or not entry.get("path"):
        raise SettingsError(f"{path}: datasets: each is a table with `name` and `path`, not {entry!r}")
    return str(entry["name"]), _normalize_keys({key: value for key, value in entry.items() if key != "name"})


def _normalize_keys(options: dict[str, Any]) -> dict[str, Any]:
    """Rename keys to those of [eval], and drop null values."""
    short = {key.removeprefix("eval_").removeprefix("rollout_"): key for key in options if key not in SPELLINGS}
    named = {name: options[key] for name, key in short.items()}
    named |= {ours: options[theirs] for theirs, ours in SPELLINGS.items() if theirs in options}
    return {name: value for name, value in named.items() if value is not None}


def settings_toml(settings: Settings) -> str:
    """Serialise all settings to TOML, defaults included, except values of None where that is the default.

    Secrets are masked and must be supplied again with the file. TOML has no null: None where the default is not None
    is written as the string "none", which the loader reads back.
    """
    import tomli_w

    sections: dict[str, dict[str, Any]] = {}
    for section, keys in redact(settings.model_dump(by_alias=True)).items():
        for key, value in keys.items():
            if value is not None:
                sections.setdefault(section, {})[key] = value
            elif _default(getattr(settings, section), key) is not None:
                sections.setdefault(section, {})[key] = "none"
    return tomli_w.dumps(sections)


def _default(section: BaseModel, key: str) -> Any:
    """The default of a key, by its name in files."""
    fields = type(section).model_fields
    field = fields.get(key) or next((field for field in fields.values() if field.alias == key), None)
    return field.get_default(call_default_factory=True) if field else None
