"""Where settings come from: files, environment, command line; later layers win and every value knows its origin."""

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
from slimectl.settings.algorithm import ALGORITHMS, Grpo
from slimectl.settings.root import Settings, contradictions

PREFIX = "SLIMECTL_"
Values = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Layer:
    """One source of settings: its name for a person, and section -> key -> value."""

    origin: str
    values: Values


@dataclass(frozen=True)
class Resolved:
    """The settings, and for each dotted key the layer that set it ("default" where none did)."""

    settings: Settings
    origins: dict[str, str]


def from_file(path: Path) -> Layer:
    """A TOML file. Raises SettingsError if it is missing or not TOML."""
    try:
        with path.open("rb") as file:
            values = tomllib.load(file)
    except FileNotFoundError:
        raise SettingsError(f"{path}: no such settings file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: not valid TOML: {error}") from None
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}") from None
    values.pop("recipe", None)  # A recipe's words about itself are not settings.
    for section, keys in values.items():
        if not isinstance(keys, dict):
            raise SettingsError(f"{path}: {section}: settings stand in sections; write [section] above `{section} = …`")
    return Layer(str(path), values)


def from_environment(environ: Mapping[str, str] = os.environ) -> Layer:
    """SLIMECTL_SECTION_KEY=value for every variable of that prefix."""
    values: Values = {}
    for name, text in sorted(environ.items()):
        if name.startswith(PREFIX):
            section, _, key = name[len(PREFIX) :].lower().partition("_")
            if key:
                values.setdefault(section, {})[key] = parse_value(text)
    return Layer("environment", values)


def from_assignments(assignments: Iterable[str], origin: str = "command line") -> Layer:
    """`section.key=value` each; a third part addresses a table: eval.data.aime=aime.jsonl."""
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


def parse_value(text: str) -> Any:
    """A TOML value where it is one, `none` as None, else the text itself."""
    if text.strip().lower() in ("none", "null"):
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def resolve(layers: Sequence[Layer]) -> Resolved:
    """Merge the layers, later over earlier, and validate. Raises SettingsError, one line for each mistake."""
    merged: Values = {}
    origins: dict[str, str] = {}
    for layer in layers:
        for section, keys in layer.values.items():
            for key, value in keys.items():
                name = _known(section, key, layer, merged)
                new = None if value == "none" else value
                merged.setdefault(section, {})[name] = _combined(merged.get(section, {}).get(name), new)
                origins[f"{section}.{name}"] = layer.origin
    # The discriminator may be left out, as every other key may.
    if "algorithm" in merged:
        merged["algorithm"].setdefault("name", Grpo.model_fields["name"].default)
    try:
        settings = Settings.model_validate(merged)
    except ValidationError as error:
        raise SettingsError("\n".join(_explained(error, origins))) from None
    wrong = list(contradictions(settings))
    if wrong:
        raise SettingsError("\n".join(wrong))
    return Resolved(settings, {name: origins.get(name, "default") for name, _ in flat(settings)})


def flat(settings: Settings) -> Iterator[tuple[str, Any]]:
    """Every dotted key with its value, in the order of the manual."""
    for section, keys in settings.model_dump(by_alias=True).items():
        for key, value in keys.items():
            yield f"{section}.{key}", value


def keys_of(section: str, algorithm: str | None = None) -> list[str]:
    """The keys of a section; of all algorithms where none is named."""
    if section == "algorithm":
        classes: list[type[BaseModel]] = [ALGORITHMS[algorithm]] if algorithm in ALGORITHMS else [*ALGORITHMS.values()]
    else:
        annotation = Settings.model_fields[section].annotation
        classes = [annotation] if isinstance(annotation, type) else list(get_args(annotation))
    names = [field.alias or name for cls in classes for name, field in cls.model_fields.items()]
    return list(dict.fromkeys(names))


def _combined(old: Any, new: Any) -> Any:
    """Tables merge key by key, everything else is replaced."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return new
    return {**old, **{key: _combined(old.get(key), value) for key, value in new.items()}}


def _known(section: str, key: str, layer: Layer, merged: Values) -> str:
    """The key under its own name; `rollout.rollout_temperature` is read as `rollout.temperature`."""
    sections = list(Settings.model_fields)
    if section not in sections:
        everything = {f"{known}.{name}" for known in sections for name in keys_of(known)}
        raise SettingsError(_unknown(f"{section}.{key}", sorted(everything), layer))
    algorithm = merged.get("algorithm", {}).get("name") or layer.values.get("algorithm", {}).get("name")
    known = keys_of(section, algorithm if isinstance(algorithm, str) else None)
    short = key.removeprefix(f"{section}_")
    for name in (key, short):
        if name in known:
            return name
    raise SettingsError(_unknown(f"{section}.{key}", [f"{section}.{name}" for name in known], layer))


def _unknown(name: str, known: list[str], layer: Layer) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if not near:
        tail = name.partition(".")[2]
        near = [candidate for candidate in known if candidate.partition(".")[2] == tail][:1]
    hint = f"did you mean {near[0]}?" if near else "`slimectl settings show` lists all"
    return f"{name}: unknown setting ({layer.origin}); {hint}"


def _explained(error: ValidationError, origins: dict[str, str]) -> Iterator[str]:
    for item in error.errors():
        parts = [str(part) for part in item["loc"]]
        if parts[:1] == ["algorithm"] and len(parts) > 1 and parts[1] in ALGORITHMS:
            del parts[1]  # pydantic names the member of the union, which is no part of the key
        name = ".".join(parts[:2])
        if item["type"] == "union_tag_invalid":
            yield f"algorithm.name: unknown algorithm {item['ctx']['tag']!r}; known are {', '.join(ALGORITHMS)}"
            continue
        what = item["msg"][:1].lower() + item["msg"][1:]
        origin = origins.get(name, "default")
        secret = isinstance(item["input"], dict) or any(map(is_secret_name, parts))
        given = "" if secret else f", not {redact(item['input'])!r}"
        yield f"{name}: {what}{given} ({origin})"
