"""Compiles JSON Schema to a grammar whose every text is valid under the schema.

The grammar does not accept every valid JSON. Properties must come in the order of the schema, and undeclared ones are
allowed only if none is declared. Whitespace is bounded, and numbers have at most 20 digits. Keywords that the grammar
cannot enforce raise SettingsError.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from slimectl.engines.embedded.grammar import (
    CHARACTER,
    DIGIT,
    EMPTY,
    INTEGER,
    NUMBER,
    SPACE,
    STRING,
    Choice,
    Node,
    Repeat,
    Rule,
    has_text,
    literal,
    optional,
    ranges,
    series,
)  # fmt: skip
from slimectl.engines.embedded.json_regex import pattern_grammar, regex_grammar
from slimectl.errors import SettingsError
from slimectl.types import AnyGrammar, ChoiceGrammar, JsonGrammar, RegexGrammar

ANNOTATIONS = {
    "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "format", "$comment",
    "$schema", "$id", "$defs", "definitions", "$anchor", "discriminator",
}  # fmt: skip
"""Keywords that do not restrict anything."""
BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
KEYWORDS = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "minItems", "maxItems"},
    "string": {"pattern", "minLength", "maxLength"},
    "number": BOUNDS,
    "integer": BOUNDS,
}
TYPES = ("string", "integer", "number", "boolean", "null", "object", "array")
MOST_NODES = 20_000
MOST_ITEMS = 1000
"""Largest count of items or characters. Every count is a separate state."""
DEEPEST = 64


VALUE = Rule()
"""Any JSON."""


def _listed(opening: str, item: Node, closing: str, low: int = 0, high: int | None = None) -> Node:
    """Return the grammar of `low` to `high` comma-separated items between brackets."""
    empty = series(opening, SPACE, closing)
    if high == 0:
        return empty
    more = Repeat(series(SPACE, ",", SPACE, item), max(0, low - 1), None if high is None else high - 1)
    full = series(opening, SPACE, item, more, SPACE, closing)
    return full if low else Choice((empty, full))


def _pair(key: Node, value: Node) -> Node:
    return series(key, SPACE, ":", SPACE, value)


OBJECT = _listed("{", _pair(STRING, VALUE), "}")
VALUE.node = Choice(
    (STRING, NUMBER, literal("true"), literal("false"), literal("null"), OBJECT, _listed("[", VALUE, "]"))
)


def compiled(grammar: JsonGrammar | RegexGrammar | ChoiceGrammar | AnyGrammar) -> Node:
    """Compile the grammar of a request. Raises SettingsError for anything it cannot enforce."""
    if isinstance(grammar, RegexGrammar):
        return regex_grammar(grammar.pattern)
    if isinstance(grammar, ChoiceGrammar):
        return Choice(tuple(map(literal, grammar.choices)))
    if isinstance(grammar, AnyGrammar):
        return Choice(tuple(map(compiled, grammar.grammars)))
    try:
        schema = json.loads(grammar.schema)
    except (ValueError, RecursionError):
        raise SettingsError("json_schema: not valid JSON") from None
    return series(grammar.prefix, json_grammar(schema), grammar.suffix)


def json_grammar(schema: Any) -> Node:
    """Compile a JSON Schema, or any JSON object for None. Raises SettingsError for anything it cannot enforce."""
    if schema is None:
        return OBJECT
    compiler = _Compiler(schema)
    node = compiler.node(schema, "$", 0)
    if compiler.rules and not has_text(node):
        raise SettingsError("json_schema: the schema requires itself endlessly. Make the inner part optional.")
    return node


class _Compiler:
    """Compiles one schema, in which `$ref` is resolved."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self.rules: dict[str, Rule] = {}
        self._count = 0

    def node(self, schema: Any, at: str, depth: int) -> Node:
        self._count += 1
        if self._count > MOST_NODES or depth > DEEPEST:
            raise SettingsError(f"json_schema: {at}: the schema is too large or nested too deeply")
        if schema is True or schema == {}:
            return VALUE
        if not isinstance(schema, Mapping):
            raise SettingsError(f"json_schema: {at}: {str(schema)[:40]} is not a schema that any value fits")
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
            place = f" next to {beside}" if beside else ""
            raise SettingsError(f"json_schema: {at}: {min(keywords)[:60]!a}{place} is not supported. Leave it out.")

    def _ref(self, schema: Mapping[str, Any], at: str, depth: int) -> Node:
        name = schema["$ref"]
        if not isinstance(name, str) or not name.startswith("#"):
            raise SettingsError(f"json_schema: {at}: $ref {str(name)[:60]!a} points outside the schema")
        if name not in self.rules:
            target = self._root
            for key in name[1:].split("/")[1:]:
                key = key.replace("~1", "/").replace("~0", "~")
                target = target.get(key) if isinstance(target, Mapping) else None
            if target is None:
                raise SettingsError(f"json_schema: {at}: $ref {name[:60]!a} points to nothing")
            rule = self.rules[name] = Rule()
            rule.node = self.node(target, name, depth + 1)
        return self.rules[name]

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
            raise SettingsError(f"json_schema: {at}: allOf with several schemas is not supported. Merge them into one.")
        return self.node(options[0], f"{at}.allOf[0]", depth + 1)

    def _typed(self, schema: Mapping[str, Any], keywords: set[str], at: str, depth: int) -> Node:
        implied = [kind for kind, names in KEYWORDS.items() if names & keywords and kind != "integer"]
        types = _types(schema, at) or implied
        self._refuse(keywords - {"type"}.union(*(KEYWORDS.get(kind, set()) for kind in types)), at)
        if not types:
            return VALUE
        plain: dict[str, Node] = {
            "null": literal("null"), "boolean": Choice((literal("true"), literal("false"))),
        }  # fmt: skip
        compilers = {
            "object": self._object,
            "array": self._array,
            "string": self._string,
            "number": self._number,
            "integer": self._number,
        }
        kinds = [kind for kind in types if kind != "integer" or "number" not in types]  # "number" includes integers
        return Choice(tuple(plain[kind] if kind in plain else compilers[kind](schema, at, depth) for kind in kinds))

    def _string(self, schema: Mapping[str, Any], at: str, depth: int) -> Node:
        low, high = schema.get("minLength", 0), schema.get("maxLength")
        if "pattern" in schema:
            self._refuse({"minLength", "maxLength"} & set(schema), at, beside="pattern")
            return series('"', pattern_grammar(schema["pattern"], at), '"')
        if low == 0 and high is None:
            return STRING
        _check_counts(low, high, at, "minLength and maxLength", "characters")
        return series('"', Repeat(CHARACTER, low, high), '"')

    def _number(self, schema: Mapping[str, Any], at: str, depth: int) -> Node:
        types = _types(schema, at) or []
        whole = "integer" in types and "number" not in types
        bounds = {name: schema[name] for name in BOUNDS if name in schema}
        return bounded_number(bounds, at, whole=whole) if bounds else INTEGER if whole else NUMBER

    def _array(self, schema: Mapping[str, Any], at: str, depth: int) -> Node:
        low, high = schema.get("minItems", 0), schema.get("maxItems")
        _check_counts(low, high, at, "minItems and maxItems", "items")
        return _listed("[", self.node(schema.get("items", True), f"{at}.items", depth + 1), "]", low, high)

    def _object(self, schema: Mapping[str, Any], at: str, depth: int) -> Node:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            raise SettingsError(f"json_schema: {at}: properties is not an object, or required not a list")
        others = schema.get("additionalProperties", True)
        declared = {**properties, **{name: others for name in required if name not in properties}}
        if not declared:
            if others is False:
                return series("{", SPACE, "}")
            return _listed("{", _pair(STRING, self.node(others, f"{at}.additionalProperties", depth + 1)), "}")
        pairs = [
            (_pair(literal(json.dumps(name, ensure_ascii=False)), self.node(value, f"{at}.{name}", depth + 1)), name)
            for name, value in declared.items()
        ]
        after: Node = EMPTY  # the remaining properties: after other ones, and as the first
        first: Node = EMPTY
        for pair, name in reversed(pairs):
            with_comma, alone = series(SPACE, ",", SPACE, pair, after), series(pair, after)
            first = alone if name in required else Choice((alone, first))
            after = with_comma if name in required else Choice((with_comma, after))
        return series("{", SPACE, first, SPACE, "}")


def _types(schema: Mapping[str, Any], at: str) -> list[str] | None:
    types = schema.get("type")
    listed = [types] if isinstance(types, str) else types
    if listed is None:
        return None
    if not isinstance(listed, list) or not listed or not all(kind in TYPES for kind in listed):
        raise SettingsError(f"json_schema: {at}: type {str(types)[:60]!a} is not one of {', '.join(TYPES)}")
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


def _check_counts(low: Any, high: Any, at: str, names: str, what: str) -> None:
    """Raise SettingsError for bounds that are not counts or that exceed MOST_ITEMS."""
    if not (_is_count(low) and (high is None or (_is_count(high) and low <= high))):
        raise SettingsError(f"json_schema: {at}: {names} are not valid bounds")
    if max(low, high or 0) > MOST_ITEMS:
        raise SettingsError(
            f"json_schema: {at}: bounds above {MOST_ITEMS} {what} are not supported. Leave the bound out."
        )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


MOST_DIGITS = 20
LARGEST = 10**MOST_DIGITS - 1
NINE = ranges((0x31, 0x39))
SOME_FRACTION = series(".", Repeat(literal("0"), 0, 9), NINE, Repeat(DIGIT, 0, 10))
"""Decimals that are not all 0."""
ANY_FRACTION = optional(series(".", Repeat(DIGIT, 1, MOST_DIGITS)))


def bounded_number(bounds: Mapping[str, Any], at: str, *, whole: bool) -> Node:
    """Return the grammar of numbers within minimum, maximum, exclusiveMinimum and exclusiveMaximum.

    The numbers have no exponents. Raises SettingsError for bounds that are not whole numbers or that no number fits.
    """
    for name, value in bounds.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
            raise SettingsError(f"json_schema: {at}: {name} {str(value)[:40]} is not a whole number. Leave it out.")
    low, open_low = _bound(bounds, "minimum", "exclusiveMinimum", -LARGEST, max)
    high, open_high = _bound(bounds, "maximum", "exclusiveMaximum", LARGEST, min)
    if whole:
        low, high = low + open_low, high - open_high
        negative, positive = integers(max(1, -high), -low), integers(max(0, low), high)
    else:
        positive = numbers(max(0, low), high, open_low=open_low and low >= 0, open_high=open_high)
        negative = numbers(max(0, -high), -low, open_low=(open_high and high <= 0) or high > 0, open_high=open_low)
    signed = [None if negative is None else series("-", negative), positive]
    if signed == [None, None]:
        raise SettingsError(f"json_schema: {at}: no number is within {', '.join(sorted(bounds))}")
    return Choice(tuple(node for node in signed if node is not None))


def _bound(bounds: Mapping[str, Any], closed: str, opened: str, default: int, tighter: Any) -> tuple[int, bool]:
    """Return the tighter of two bounds, and whether it is exclusive."""
    values = [(int(bounds[name]), name == opened) for name in (closed, opened) if name in bounds]
    if not values:
        return default, False
    value = tighter(value for value, _ in values)
    value_is_open = (value, True) in values
    return max(-LARGEST, min(LARGEST, value)), value_is_open


def integers(low: int, high: int) -> Node | None:
    """Return the grammar of the integers from `low` >= 0 to `high`, or None if there are none."""
    if low > high:
        return None
    options = []
    for length in range(len(str(low)), len(str(high)) + 1):
        first = low if length == len(str(low)) else 10 ** (length - 1)
        last = high if length == len(str(high)) else 10**length - 1
        options.append(_digits(str(first), str(last)))
    return Choice(tuple(options))


def _digits(low: str, high: str) -> Node:
    """Return the grammar of the digit strings between two of the same length."""
    if not low:
        return EMPTY
    if set(low) == {"0"} and set(high) == {"9"}:
        return Repeat(DIGIT, len(low), len(low))
    rest = len(low) - 1
    if low[0] == high[0]:
        return series(low[0], _digits(low[1:], high[1:]))
    options = [series(low[0], _digits(low[1:], "9" * rest)), series(high[0], _digits("0" * rest, high[1:]))]
    if ord(high[0]) - ord(low[0]) > 1:
        options.append(series(ranges((ord(low[0]) + 1, ord(high[0]) - 1)), _digits("0" * rest, "9" * rest)))
    return Choice(tuple(options))


def numbers(low: int, high: int, *, open_low: bool, open_high: bool) -> Node | None:
    """Return the grammar of the numbers from `low` >= 0 to `high`, or None if there are none."""
    if low > high or (low == high and (open_low or open_high)):
        return None
    options: list[Node] = []
    if low < high:
        options.append(series(str(low), SOME_FRACTION if open_low else ANY_FRACTION))
        if (between := integers(low + 1, high - 1)) is not None:
            options.append(series(between, ANY_FRACTION))
    if not open_high:
        options.append(series(str(high), optional(series(".", Repeat(literal("0"), 1, MOST_DIGITS)))))
    return Choice(tuple(options))
