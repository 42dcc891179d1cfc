"""Reference of all settings, generated from the classes."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

from pydantic import BaseModel

from slimectl import __version__
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
    """Yield every setting. Algorithm settings are `algorithm.KEY` and `algorithm.NAME.KEY`."""
    for section in Settings.model_fields:
        if section != "algorithm":
            yield from _section_entries(section, type(getattr(Settings(), section)))
    for name, cls in ALGORITHMS.items():
        text = (cls.__doc__ or "").strip().splitlines()[0]
        yield Entry(f"algorithm.{name}", name, "algorithm", text)
        yield from _section_entries(f"algorithm.{name}", cls)
    yield from _section_entries("algorithm", type(Settings().algorithm))


def descriptions(cls: type[BaseModel]) -> dict[str, str]:
    """Return the docstrings under the fields of a section by field name, including inherited fields."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if base is BaseModel or not issubclass(base, BaseModel):
            continue
        definition = _class_definitions(base.__module__).get(base.__qualname__)
        for field, text in pairwise([*(definition.body if definition else ()), None]):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                texts.pop(field.target.id, None)
                if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                    texts[field.target.id] = inspect.cleandoc(str(text.value.value))
    explicit = {name: field.description for name, field in cls.model_fields.items() if field.description}
    return {name: text for name, text in texts.items() if name in cls.model_fields} | explicit


@cache
def _class_definitions(module: str) -> dict[str, ast.ClassDef]:
    """Return the definitions of a module's classes by qualified name. Empty for a module without a file."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (KeyError, OSError, TypeError):
        return {}
    definitions: dict[str, ast.ClassDef] = {}
    nodes: list[tuple[str, ast.stmt]] = [("", node) for node in tree.body]
    for prefix, node in nodes:  # grows by the contents of classes and functions
        if isinstance(node, ast.ClassDef):
            definitions[prefix + node.name] = node
            nodes += [(f"{prefix}{node.name}.", inner) for inner in node.body]
        elif isinstance(node, ast.FunctionDef):
            nodes += [(f"{prefix}{node.name}.<locals>.", inner) for inner in node.body]
    return definitions


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of a settings file. "none" is allowed wherever a setting may be None."""
    schema: dict[str, Any] = _with_none(Settings.model_json_schema(by_alias=True))
    for cls in _classes(Section):
        _describe(schema["$defs"].get(cls.__name__, {}), cls)
    references = schema["properties"]["algorithm"]["discriminator"]["mapping"]
    default = Settings().algorithm.name
    choices = [
        {"if": {"properties": {"name": {"const": name}}, "required": ["name"]}, "then": {"$ref": reference}}
        for name, reference in references.items()
    ]
    schema["properties"]["algorithm"] = {
        "type": "object",
        "properties": {"name": {"enum": list(ALGORITHMS), "default": default}},
        "allOf": [*choices, {"if": {"not": {"required": ["name"]}}, "then": {"$ref": references[default]}}],
    }
    schema["properties"]["recipe"] = {"type": "object", "description": "Title of a recipe and commands to try next."}
    dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": f"urn:slimectl:settings:{__version__}"}
    return dialect | schema


def _classes(cls: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """Yield the settings classes that derive from a class, without the classes of other packages."""
    for subclass in cls.__subclasses__():
        if subclass.__module__.startswith("slimectl.settings."):
            yield subclass
        yield from _classes(subclass)


def _describe(schema: dict[str, Any], cls: type[BaseModel]) -> None:
    """Put the docstrings of a class's fields into its schema."""
    texts = descriptions(cls)
    for name, field in cls.model_fields.items():
        properties = schema.get("properties", {})
        if (text := texts.get(name)) and (shown := field.alias or name) in properties:
            properties[shown] = dict(sorted({**properties[shown], "description": text}.items()))


def _with_none(schema: Any) -> Any:
    """Return a schema in which "none" is allowed where null is, since TOML has no null."""
    if isinstance(schema, list):
        return [_with_none(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    parts = {key: _with_none(part) for key, part in schema.items()}
    if {"type": "null"} in parts.get("anyOf", ()):
        parts["anyOf"].append({"const": "none"})
    return parts


def _section_entries(prefix: str, cls: type[Section]) -> Iterator[Entry]:
    properties, texts = cls.model_json_schema(by_alias=True)["properties"], descriptions(cls)
    for name, field in cls.model_fields.items():
        shown = field.alias or name
        yield Entry(
            f"{prefix}.{shown}",
            field.get_default(call_default_factory=True),
            _kind(properties[shown]),
            " ".join(texts.get(name, "").split()),
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
