"""Merges layers of settings, later over earlier, validates the result, and records the origin of each value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from slimectl.errors import SettingsError
from slimectl.settings import aliases
from slimectl.settings.algorithm import ALGORITHMS
from slimectl.settings.base import UNKNOWN_PART, section_class, selected_parts
from slimectl.settings.checks import conflicts
from slimectl.settings.effects import superseded
from slimectl.settings.keys import DEFAULT_ALGORITHM, flat, keys_of, sections, setting_names, suggestion
from slimectl.settings.layers import Layer, Values, merge
from slimectl.settings.root import Settings
from slimectl.system.redaction import is_secret_name, redact


@dataclass(frozen=True)
class Resolved:
    """The settings, and for each dotted key the layer that set it ("default" if none)."""

    settings: Settings
    origins: dict[str, str]


def resolve(layers: Sequence[Layer], problems: Sequence[str] = ()) -> Resolved:
    """Merge the layers, later over earlier, and validate.

    Raises SettingsError with a line for every error, including the `problems` from reading the layers.
    """
    resolution, errors = examine(layers)
    if errors := [*problems, *errors]:
        raise SettingsError("\n".join(errors))
    return resolution


def examine(layers: Sequence[Layer]) -> tuple[Resolved, list[str]]:
    """Merge the layers and keep the valid settings. Also return a line for every error.

    Unknown keys and keys with an invalid value get their defaults. Settings of an earlier layer are dropped if a later
    layer turned off the feature that they belong to.
    """
    merged: Values = {}
    origins: dict[str, str] = {}
    ranks: dict[str, int] = {}
    errors: list[str] = []
    for rank, layer in enumerate(layers):
        _drop_other_algorithm(layer, merged, origins, {entry.origin for entry in layers if entry.is_recipe})
        values = _current_values(layer, merged, errors)
        errors += _replace_alternatives(values, layer, merged, origins)
        for (section, name), value in values.items():
            merged.setdefault(section, {})[name] = merge(merged.get(section, {}).get(name), value)
            origins[f"{section}.{name}"] = layer.origin
            ranks[f"{section}.{name}"] = len(layers) if layer.origin in COMMAND_LINE else rank
    _empty_collections(merged)
    # The discriminator is optional, like every other key.
    if "algorithm" in merged:
        merged["algorithm"].setdefault("name", DEFAULT_ALGORITHM)
    settings, invalid = _validated(merged, origins)
    if drops := superseded(settings, origins, ranks):
        for name, reason in drops.items():
            _drop(merged, name.split("."))
            origins[name] = f"default, as {reason}"
        settings, _ = _validated(merged, origins)
    errors += invalid.values()
    # A key that is at its default because its value was invalid must not cause further errors.
    sections = {name.partition(".")[0] for name in invalid}
    errors += [line for line in conflicts(settings) if not any(f"{section}." in line for section in sections)]
    return Resolved(settings, {name: origins.get(name, "default") for name, _ in flat(settings)}), errors


def _empty_collections(merged: Values) -> None:
    """Replace `none` by an empty list or table if the setting is one."""
    for section, values in merged.items():
        info = Settings.model_fields.get(section)
        fields = getattr(info.annotation if info else None, "model_fields", {})
        for name, field in fields.items():
            key, default = field.alias or name, field.get_default(call_default_factory=True)
            if isinstance(default, list | dict) and key in values and values[key] is None:
                values[key] = type(default)()


def _validated(merged: Values, origins: dict[str, str]) -> tuple[Settings, dict[str, str]]:
    """Validate the values and remove invalid ones. Return the settings, and an error line for each invalid key."""
    invalid: dict[str, str] = {}
    while True:
        parts = _part_sections(merged, origins, invalid)
        try:
            return Settings.model_validate(merged | parts), invalid
        except ValidationError as error:
            lines = error_lines(error, origins)
        for name, line in lines.items():
            invalid.setdefault(name, line)
            section, _, key = name.partition(".")
            if key not in merged.get(section, {}):  # the whole section or one of its defaults is invalid
                raise SettingsError("\n".join(invalid.values())) from None
            del merged[section][key]
            if name == "algorithm.name":  # the other keys cannot be checked without the algorithm
                del merged[section]
                break


def _drop_other_algorithm(layer: Layer, merged: Values, origins: dict[str, str], recipes: set[str]) -> None:
    """Drop the keys of [algorithm] that a recipe has set, if the layer names another algorithm."""
    name = layer.values.get("algorithm", {}).get("name")
    keys = merged.get("algorithm", {})
    if name in (None, keys.get("name", DEFAULT_ALGORITHM)):
        return
    for key in [key for key in keys if origins[f"algorithm.{key}"] in recipes]:
        del keys[key], origins[f"algorithm.{key}"]


def _drop(table: dict[str, Any], path: Sequence[str]) -> None:
    """Remove a value from nested tables, by its keys."""
    for key in path[:-1]:
        table = table[key]
    table.pop(path[-1], None)


ALTERNATIVES = {
    "score": ("custom_rm_path", "rm", "rm_type"),
    "run": ("num_rollout", "num_epoch"),
    "train": ("lr_warmup_iters", "lr_warmup_fraction"),
}
"""Keys of a section of which only one has an effect. Setting one in a later layer replaces the others."""

COMMAND_LINE = ("command line", "flag")
"""Origins that are both on the command line, so neither overrides the other."""


def _replace_alternatives(
    values: Mapping[tuple[str, str], Any], layer: Layer, merged: Values, origins: dict[str, str]
) -> Iterator[str]:
    """Remove from `merged` the alternatives to the keys that this layer sets. Yield a line for each contradiction."""
    for section, keys in ALTERNATIVES.items():
        given = [key for key in keys if values.get((section, key))]
        for key in keys:
            name = f"{section}.{key}"
            if not given or key in given or not merged.get(section, {}).get(key):
                continue
            if layer.origin in COMMAND_LINE and origins[name] in COMMAND_LINE:
                yield (
                    f"{section}.{given[0]} and {name} are both on the command line, but only one can have an effect. "
                    f"Set only one."
                )
            del merged[section][key]
            origins[name] = f"default, as {layer.origin} sets {section}.{given[0]}"


def _part_sections(merged: Values, origins: dict[str, str], invalid: dict[str, str]) -> dict[str, BaseModel]:
    """Return the validated sections of third-party parts that are selected or have values.

    Invalid keys are dropped, and a line for each is added to `invalid`.
    """
    sections: dict[str, BaseModel] = {}
    for name in {*(merged.keys() - Settings.model_fields.keys()), *selected_parts(merged)}:
        if cls := section_class(name):
            try:
                sections[name] = cls.model_validate(merged.get(name, {}))
            except ValidationError as error:
                invalid |= error_lines(error, origins, (name,))
                merged.pop(name, None)
    return sections


def _current_values(layer: Layer, merged: Values, errors: list[str]) -> dict[tuple[str, str], Any]:
    """Return the layer's values by present section and key. Unknown keys and duplicate names are added to `errors`."""
    values: dict[tuple[str, str], Any] = {}
    spellings: dict[tuple[str, str], str] = {}
    for old_section, keys in layer.values.items():
        for old_key, value in keys.items():
            try:
                section, key = _known_key(old_section, old_key, layer, merged)
            except SettingsError as error:
                errors.append(str(error))
                continue
            address = (section, aliases.KEYS.get(section, {}).get(key, key))
            if address in spellings:
                name = ".".join(address)
                errors.append(
                    f"{spellings[address]} and {old_section}.{old_key} are the same setting ({layer.origin}). Set "
                    f"only {name}."
                )
                continue
            spellings[address] = f"{old_section}.{old_key}"
            values[address] = aliases.current_value(section, key, None if value == "none" else value)
    return values


def _known_key(section: str, key: str, layer: Layer, merged: Values) -> tuple[str, str]:
    """Return the present section and key. A section prefix is removed: `rollout.rollout_temperature` is `temperature`.

    The key may be an old name. Raises SettingsError for an unknown name.
    """
    current = aliases.current_section(section)
    if current == "custom":
        return current, key
    if current not in Settings.model_fields and section_class(current) is None:
        raise SettingsError(_unknown_key(f"{section}.{key}", sections(), layer))
    algorithm = merged.get("algorithm", {}).get("name") or layer.values.get("algorithm", {}).get("name")
    known_keys = keys_of(current, algorithm if isinstance(algorithm, str) else None)
    for name in (key, key.removeprefix(f"{section}_"), key.removeprefix(f"{current}_")):
        if name in known_keys or name in aliases.KEYS.get(current, {}):
            return current, name
    raise SettingsError(_unknown_key(f"{section}.{key}", {current: known_keys}, layer))


def _unknown_key(name: str, keys_by_section: dict[str, list[str]], layer: Layer) -> str:
    names = [f"{section}.{key}" for section, keys in keys_by_section.items() for key in keys]
    near = suggestion(name, names + aliases.old_names(keys_by_section), elsewhere=setting_names())
    hint = f"Did you mean {near}?" if near else "`slimectl settings show` lists all settings."
    return f"{name}: unknown setting ({layer.place(name)}). {hint}"


def error_lines(error: ValidationError, origins: dict[str, str], prefix: tuple[str, ...] = ()) -> dict[str, str]:
    """Return pydantic's errors as lines by dotted key."""
    lines: dict[str, str] = {}
    for item in error.errors():
        parts = [str(part) for part in (*prefix, *item["loc"])]
        if parts[:1] == ["algorithm"] and len(parts) > 1 and parts[1] in ALGORITHMS:
            del parts[1]  # pydantic adds the member of the union, which is not part of the key
        name = ".".join(parts[:2])
        if item["type"] == "union_tag_invalid":
            name, line = (
                "algorithm.name",
                f"algorithm.name: unknown algorithm {item['ctx']['tag']!r}. Choose one of {', '.join(ALGORITHMS)}.",
            )
        else:
            message = item["msg"][:1].lower() + item["msg"][1:]
            hidden = isinstance(item["input"], dict) or any(map(is_secret_name, parts)) or item["type"] == UNKNOWN_PART
            actual = "" if hidden else f", not {redact(item['input'])!r}"
            line = f"{name}: {message}{actual} ({origins.get(name, 'default')})"
        lines[name] = f"{lines[name]}\n{line}" if name in lines else line
    return lines
