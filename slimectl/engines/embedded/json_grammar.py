"""JSON Schema as a grammar: every text of the grammar is JSON that the schema accepts.

Not every such JSON is a text of the grammar: properties come in the order of the schema, others than the declared ones
only where none is declared, whitespace is bounded, numbers have at most 20 digits. A keyword whose meaning the grammar
cannot keep is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from slimectl.engines.embedded.grammar import EMPTY, Bytes, Choice, Node, Repeat, Rule, Sequential, literal
from slimectl.errors import SettingsError

ANNOTATIONS = {
    "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "format", "$comment",
    "$schema", "$id", "$defs", "definitions", "$anchor", "discriminator",
}  # fmt: skip
"""Keywords that restrict nothing."""
KEYWORDS = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "minItems", "maxItems"},
}
TYPES = ("string", "integer", "number", "boolean", "null", "object", "array")
MOST_NODES = 20_000
MOST_ITEMS = 1000
"""Largest minItems or maxItems: every count is a state of its own."""
DEEPEST = 64


def _ranges(*pairs: tuple[int, int]) -> Bytes:
    return Bytes(frozenset(byte for low, high in pairs for byte in range(low, high + 1)))


def _series(*parts: Node | str) -> Node:
    return Sequential(tuple(literal(part) if isinstance(part, str) else part for part in parts))


def _optional(node: Node) -> Node:
    return Choice((EMPTY, node))


SPACE = _optional(Choice((literal(" "), _series("\n", Repeat(Bytes(frozenset(b" \t")), 0, 24)))))
"""Whitespace between two parts: none, a blank, or a new line and its indentation; a model cannot write it for ever."""
DIGIT, TAIL = _ranges((0x30, 0x39)), _ranges((0x80, 0xBF))
HEX = _ranges((0x30, 0x39), (0x41, 0x46), (0x61, 0x66))
CHARACTER = Choice(
    (
        _ranges((0x20, 0x21), (0x23, 0x5B), (0x5D, 0x7F)),
        _series("\\", Bytes(frozenset(b'"\\/bfnrt'))),
        _series("\\u", _ranges((0x30, 0x39), (0x41, 0x43), (0x45, 0x46), (0x61, 0x63), (0x65, 0x66)), HEX, HEX, HEX),
        _series("\\u", Bytes(frozenset(b"dD")), _ranges((0x30, 0x37)), HEX, HEX),  # no half of a surrogate pair
        _series(_ranges((0xC2, 0xDF)), TAIL),
        _series(_ranges((0xE0, 0xE0)), _ranges((0xA0, 0xBF)), TAIL),
        _series(_ranges((0xE1, 0xEC), (0xEE, 0xEF)), TAIL, TAIL),
        _series(_ranges((0xED, 0xED)), _ranges((0x80, 0x9F)), TAIL),
        _series(_ranges((0xF0, 0xF0)), _ranges((0x90, 0xBF)), TAIL, TAIL),
        _series(_ranges((0xF1, 0xF3)), TAIL, TAIL, TAIL),
        _series(_ranges((0xF4, 0xF4)), _ranges((0x80, 0x8F)), TAIL, TAIL),
    )
)
STRING = _series('"', Repeat(CHARACTER), '"')
INTEGER = _series(_optional(literal("-")), Choice((literal("0"), _series(_ranges((0x31, 0x39)), Repeat(DIGIT, 0, 19)))))
EXPONENT = _series(Bytes(frozenset(b"eE")), _optional(Bytes(frozenset(b"+-"))), Repeat(DIGIT, 1, 2))
NUMBER = _series(INTEGER, _optional(_series(".", Repeat(DIGIT, 1, 20))), _optional(EXPONENT))
VALUE = Rule()
"""Any JSON."""


def _listed(opening: str, item: Node, closing: str, low: int = 0, high: int | None = None) -> Node:
    """Return `low` to `high` items between brackets, divided by commas."""
    empty = _series(opening, SPACE, closing)
    if high == 0:
        return empty
    more = Repeat(_series(SPACE, ",", SPACE, item), max(0, low - 1), None if high is None else high - 1)
    full = _series(opening, SPACE, item, more, SPACE, closing)
    return full if low else Choice((empty, full))


def _pair(key: Node, value: Node) -> Node:
    return _series(key, SPACE, ":", SPACE, value)


OBJECT = _listed("{", _pair(STRING, VALUE), "}")
VALUE.node = Choice(
    (STRING, NUMBER, literal("true"), literal("false"), literal("null"), OBJECT, _listed("[", VALUE, "]"))
)


def json_grammar(schema: Any) -> Node:
    """Return the grammar of a JSON Schema; of JSON objects for None. Raises SettingsError for what it cannot keep."""
    return OBJECT if schema is None else _Compiler(schema).node(schema, "$", 0)


class _Compiler:
    """Compiles one schema; `$ref` points into it."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._rules: dict[str, Rule] = {}
        self._count = 0

    def node(self, schema: Any, at: str, depth: int) -> Node:
        self._count += 1
        if self._count > MOST_NODES or depth > DEEPEST:
            raise SettingsError(f"json_schema: {at}: the schema is too large or nested too deeply")
        if schema is True or schema == {}:
            return VALUE
        if not isinstance(schema, Mapping):
            raise SettingsError(f"json_schema: {at}: {str(schema)[:40]} is no schema that anything fits")
        keywords = set(schema) - ANNOTATIONS
        for keyword, compile_keyword in self._compilers().items():
            if keyword in keywords:
                allowed = {keyword, "type"} if keyword in ("enum", "const") else {keyword}
                self._refuse(keywords - allowed, at, beside=keyword)
                return compile_keyword(schema, at, depth)
        return self._typed(schema, keywords, at, depth)

    def _compilers(self) -> dict[str, Callable[[Mapping[str, Any], str, int], Node]]:
        return {
            "$ref": self._ref,
            "enum": self._enum,
            "const": self._enum,
            "anyOf": self._any_of,
            "allOf": self._all_of,
        }

    def _refuse(self, keywords: set[str], at: str, *, beside: str = "") -> None:
        if keywords:
            place = f" beside {beside}" if beside else ""
            raise SettingsError(f"json_schema: {at}: {min(keywords)[:60]!a}{place} is not supported; leave it out")

    def _ref(self, schema: Mapping[str, Any], at: str, depth: int) -> Node:
        name = schema["$ref"]
        if not isinstance(name, str) or not name.startswith("#"):
            raise SettingsError(f"json_schema: {at}: $ref {str(name)[:60]!a} leads out of the schema")
        if name not in self._rules:
            target = self._root
            for key in name[1:].split("/")[1:]:
                key = key.replace("~1", "/").replace("~0", "~")
                target = target.get(key) if isinstance(target, Mapping) else None
            if target is None:
                raise SettingsError(f"json_schema: {at}: $ref {name[:60]!a} leads to nothing")
            rule = self._rules[name] = Rule()
            rule.node = self.node(target, name, depth + 1)
        return self._rules[name]

    def _enum(self, schema: Mapping[str, Any], at: str, depth: int) -> Node:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        types = _types(schema, at)
        if not isinstance(values, list):
            raise SettingsError(f"json_schema: {at}: enum is not a list")
        texts = [json.dumps(value, ensure_ascii=False) for value in values if types is None or _is_a(value, types)]
        if not texts:
            raise SettingsError(f"json_schema: {at}: no value fits")
        return Choice(tuple(map(literal, texts)))

    def _any_of(self, schema: Mapping[str, Any], at: str, depth: int) -> Node:
        options = schema["anyOf"]
        if not isinstance(options, list) or not options:
            raise SettingsError(f"json_schema: {at}: anyOf is not a list of schemas")
        return Choice(tuple(self.node(option, f"{at}.anyOf[{i}]", depth + 1) for i, option in enumerate(options)))

    def _all_of(self, schema: Mapping[str, Any], at: str, depth: int) -> Node:
        options = schema["allOf"]
        if not isinstance(options, list) or len(options) != 1:
            raise SettingsError(f"json_schema: {at}: allOf of several schemas is not supported; write them as one")
        return self.node(options[0], f"{at}.allOf[0]", depth + 1)

    def _typed(self, schema: Mapping[str, Any], keywords: set[str], at: str, depth: int) -> Node:
        implied = [kind for kind, names in KEYWORDS.items() if names & keywords]
        types = _types(schema, at) or implied
        self._refuse(keywords - {"type"}.union(*(KEYWORDS.get(kind, set()) for kind in types)), at)
        if not types:
            return VALUE
        plain: dict[str, Node] = {
            "string": STRING, "integer": INTEGER, "number": NUMBER, "null": literal("null"),
            "boolean": Choice((literal("true"), literal("false"))),
        }  # fmt: skip
        containers = {"object": self._object, "array": self._array}
        return Choice(tuple(plain[kind] if kind in plain else containers[kind](schema, at, depth) for kind in types))

    def _array(self, schema: Mapping[str, Any], at: str, depth: int) -> Node:
        low, high = schema.get("minItems", 0), schema.get("maxItems")
        if not (_is_count(low) and (high is None or (_is_count(high) and low <= high))):
            raise SettingsError(f"json_schema: {at}: minItems and maxItems are no bounds")
        if max(low, high or 0) > MOST_ITEMS:
            raise SettingsError(f"json_schema: {at}: more than {MOST_ITEMS} items are not counted; leave the bound out")
        return _listed("[", self.node(schema.get("items", True), f"{at}.items", depth + 1), "]", low, high)

    def _object(self, schema: Mapping[str, Any], at: str, depth: int) -> Node:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            raise SettingsError(f"json_schema: {at}: properties is not an object, or required not a list")
        others = schema.get("additionalProperties", True)
        declared = {**properties, **{name: others for name in required if name not in properties}}
        if not declared:
            if others is False:
                return _series("{", SPACE, "}")
            return _listed("{", _pair(STRING, self.node(others, f"{at}.additionalProperties", depth + 1)), "}")
        pairs = [
            (_pair(literal(json.dumps(name, ensure_ascii=False)), self.node(value, f"{at}.{name}", depth + 1)), name)
            for name, value in declared.items()
        ]
        after: Node = EMPTY  # the properties from here on: after others, and as the first
        first: Node = EMPTY
        for pair, name in reversed(pairs):
            with_comma, alone = _series(SPACE, ",", SPACE, pair, after), _series(pair, after)
            first = alone if name in required else Choice((alone, first))
            after = with_comma if name in required else Choice((with_comma, after))
        return _series("{", SPACE, first, SPACE, "}")


def _types(schema: Mapping[str, Any], at: str) -> list[str] | None:
    types = schema.get("type")
    listed = [types] if isinstance(types, str) else types
    if listed is None:
        return None
    if not isinstance(listed, list) or not listed or not all(kind in TYPES for kind in listed):
        raise SettingsError(f"json_schema: {at}: type {str(types)[:60]!a} is none of {', '.join(TYPES)}")
    return listed


def _is_a(value: Any, types: list[str]) -> bool:
    kinds = {
        "string": isinstance(value, str),
        "null": value is None,
        "boolean": isinstance(value, bool),
        "object": isinstance(value, dict),
        "array": isinstance(value, list),
        "number": isinstance(value, int | float) and not isinstance(value, bool),
        "integer": isinstance(value, int | float) and not isinstance(value, bool) and value == int(value),
    }
    return any(kinds[kind] for kind in types)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
