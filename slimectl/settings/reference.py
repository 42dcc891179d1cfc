"""Reference of all settings, generated from the classes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from slimectl.settings.algorithm import ALGORITHMS
from slimectl.settings.base import Section
from slimectl.settings.root import Settings


@dataclass(frozen=True)
class Entry:
    """One entry of the settings reference."""

    key: str
    default: Any
    kind: str
    text: str


def entries() -> Iterator[Entry]:
    """Yield every setting; those of an algorithm as `algorithm.KEY` and `algorithm.NAME.KEY`."""
    for section in Settings.model_fields:
        if section != "algorithm":
            yield from _section_entries(section, type(getattr(Settings(), section)))
    for name, cls in ALGORITHMS.items():
        text = (cls.__doc__ or "").strip().splitlines()[0]
        yield Entry(f"algorithm.{name}", name, "algorithm", text)
        yield from _section_entries(f"algorithm.{name}", cls)
    yield from _section_entries("algorithm", type(Settings().algorithm))


def _section_entries(prefix: str, cls: type[Section]) -> Iterator[Entry]:
    properties = cls.model_json_schema(by_alias=True)["properties"]
    for name, field in cls.model_fields.items():
        shown = field.alias or name
        yield Entry(
            f"{prefix}.{shown}",
            field.get_default(call_default_factory=True),
            _kind(properties[shown]),
            " ".join((field.description or "").split()),
        )


def _kind(schema: dict[str, Any]) -> str:
    """Describe a JSON schema in a short phrase."""
    if "anyOf" in schema:
        return " or ".join("none" if part.get("type") == "null" else _kind(part) for part in schema["anyOf"])
    if "enum" in schema:
        return " | ".join(map(str, schema["enum"]))
    if "const" in schema:
        return str(schema["const"])
    bounds = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    limits = [f"{sign} {schema[word]:g}" for word, sign in bounds.items() if word in schema]
    kind = schema.get("type", "any")
    if kind == "array":
        kind = f"list of {_kind(schema['items'])}"
    return " ".join([kind, *limits])
