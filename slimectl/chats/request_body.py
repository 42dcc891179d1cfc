"""Typed access to the keys of request bodies, and the parts that all APIs share: tools, schemas, stop strings."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from slimectl.chats.messages import MessageError, normalized_tools
from slimectl.chats.request_keys import ObjectKeys, names

LARGEST = 2**31
"""Upper bound of counts."""
ANY_OBJECT = '{"type": "object"}'
LONGEST_SCHEMA = 1 << 18
MOST_STOPS = 256
LONGEST_STOP = 1024
MOST_TOP = 20
"""Maximum number of the likeliest tokens that a request may ask for, as in OpenAI's API."""
SCHEMA_LABELS = names("name description strict")
"""`strict` has no effect, because the grammar always follows the schema."""


class RequestBody:
    """JSON object with typed access to its fields. Absent and null mean the default."""

    def __init__(self, values: dict[str, Any], *, at: str = "") -> None:
        self._values = values
        self._at = at

    @classmethod
    def of(cls, values: Any) -> RequestBody:
        """Return the fields of a parsed body. Raises MessageError if it is not an object."""
        if not isinstance(values, dict):
            raise MessageError("body", "is not a JSON object")
        return cls(values)

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def raw(self, name: str) -> Any:
        return self._values.get(name)

    def refuse(self, name: str, reason: str) -> MessageError:
        """Return the error to raise for a field."""
        return MessageError(self._at + name, reason)

    def check(self, keys: ObjectKeys) -> None:
        """Raise MessageError for a key that would be ignored."""
        keys.check(self._values, self._at)

    def number(self, name: str, default: float, *, low: float, high: float) -> float:
        value = self._values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refuse(name, f"{_short(value)} is not a number")
        if not low <= value <= high or (isinstance(value, float) and not math.isfinite(value)):
            raise self.refuse(name, f"{_short(value)} is not between {low:g} and {high:g}")
        return float(value)

    def whole(self, name: str, default: int, *, low: int = 0, high: int = LARGEST) -> int:
        value = self._values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.refuse(name, f"{_short(value)} is not a whole number")
        if not low <= value <= high:
            raise self.refuse(name, f"{_short(value)} is not between {low} and {high}")
        return value

    def count(self, name: str) -> int | None:
        """Return a field that is at least 1, or None if it is absent."""
        return self.whole(name, 1, low=1) if name in self else None

    def max_tokens(self, default: int, *, low: int = 1) -> int:
        """Return the limit of a chat, which has two names. Raises MessageError if they differ."""
        longest = "max_completion_tokens" if "max_completion_tokens" in self else "max_tokens"
        if "max_tokens" in self and self.raw(longest) != self.raw("max_tokens"):
            raise self.refuse("max_tokens", "is not equal to max_completion_tokens. Send one of the two.")
        return self.whole(longest, default, low=low)

    def seed(self, name: str) -> int | None:
        return self.whole(name, 0, low=-(2**63), high=2**64) if name in self else None

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(name, f"{_short(value)} is not true or false")
        return value

    def text(self, name: str, default: str | None = None, *, longest: int | None = None) -> str | None:
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.refuse(name, f"{_short(value)} is not a string")
        return self.checked(name, value, longest=longest)

    def needed(self, name: str) -> str:
        value = self.text(name, longest=4096)
        if not value:
            raise self.refuse(name, "is missing")
        return value

    def checked(self, name: str, value: str, *, longest: int | None = None) -> str:
        """Return the string, if it can be encoded as UTF-8."""
        if longest is not None and len(value) > longest:
            raise self.refuse(name, f"is longer than {longest} characters")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise self.refuse(name, "has half of a surrogate pair, which no tokenizer accepts") from None
        return value

    def texts(self, name: str, *, max_count: int) -> list[str]:
        """Return one string or a list of them as a list."""
        value = self._values.get(name)
        values = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(values, list) or not all(isinstance(text, str) for text in values):
            raise self.refuse(name, "is neither a string nor a list of strings")
        if len(values) > max_count:
            raise self.refuse(name, f"are {len(values)} strings, and {max_count} are the most")
        return [self.checked(name, text) for text in values]

    def tokens(self, name: str, value: Any) -> list[int]:
        if not isinstance(value, list) or not all(type(token) is int for token in value):
            raise self.refuse(name, "is not a list of token ids")
        return value

    def objects(self, name: str) -> list[dict[str, Any]] | None:
        value = self._values.get(name)
        if value is not None and (not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value)):
            raise self.refuse(name, "is not a list of objects")
        return value

    def inner(self, name: str) -> RequestBody:
        """Return the fields of an object within this one."""
        return RequestBody(self.object(name), at=f"{self._at}{name}.")

    def object(self, name: str) -> dict[str, Any]:
        value = self._values.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.refuse(name, "is not an object")
        return value or {}

    def choice(self, name: str, default: str, choices: tuple[str, ...]) -> str:
        value = self._values.get(name)
        if value is None:
            return default
        if value not in choices:
            raise self.refuse(name, f"{_short(value)} is not one of {', '.join(choices)}")
        return str(value)


def _short(value: Any) -> str:
    """Return a short form of a value for a message. Lists and very long numbers are not printed."""
    if isinstance(value, str):
        return ascii(value[:60])
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**18:
        return "the number"
    return str(value)[:60] if isinstance(value, int | float) else f"the {type(value).__name__}"


def refuse_empty(messages: list[dict[str, Any]], name: str = "messages") -> list[dict[str, Any]]:
    """Return messages of a request. Raises MessageError if there are none."""
    if not messages:
        raise MessageError(name, "is missing or empty")
    return messages


def stop_strings(body: RequestBody, name: str = "stop") -> tuple[str, ...]:
    stops = body.texts(name, max_count=MOST_STOPS)
    if not all(0 < len(stop) <= LONGEST_STOP for stop in stops):
        raise body.refuse(name, f"a stop string has 1 to {LONGEST_STOP} characters")
    return tuple(stops)


def read_tools(body: RequestBody) -> list[dict[str, Any]]:
    """Return the tools of a chat. Raises MessageError for tools that are not functions."""
    tools = normalized_tools(body.objects("tools")) or []
    for i, tool in enumerate(tools):
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise body.refuse(f"tools[{i}]", "is not a function with a name. Other kinds of tools are not supported.")
    return tools


def forced_tool(choice: Any, tools: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the name of the tool that tool_choice forces: "" is any, None is none.

    Raises MessageError for other values, and for a tool that is not among `tools`.
    """
    if choice in (None, "auto", "none"):
        return None
    if not tools:
        raise MessageError("tool_choice", "forces a call, but the request has no tools")
    if choice == "required":
        return ""
    is_function = isinstance(choice, dict) and choice.get("type", "function") == "function"
    function = choice.get("function", choice) if is_function else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise MessageError("tool_choice", 'is not "auto", "none", "required" or a function with a name')
    if name not in {tool["function"]["name"] for tool in tools}:
        raise MessageError("tool_choice", f"{name[:60]!a} is not one of the tools")
    return name


def read_schema(form: RequestBody, *, is_nested: bool) -> str | None:
    """Return the JSON Schema of a response format, as JSON, or None for text.

    In OpenAI's chats it is nested one object deeper than in its responses and in Anthropic's messages.
    """
    kind = form.choice("type", "text", ("text", "json_object", "json_schema"))
    is_flat = kind == "json_schema" and not is_nested
    form.check(ObjectKeys(names("type schema"), SCHEMA_LABELS) if is_flat else ObjectKeys(names("type json_schema")))
    if kind != "json_schema":
        return ANY_OBJECT if kind == "json_object" else None
    fields = form
    if is_nested:
        fields = form.inner("json_schema")
        fields.check(ObjectKeys(names("schema"), SCHEMA_LABELS))
    text = schema_text(fields, "schema")
    if text is None:
        raise fields.refuse("schema", "is missing")
    return text


def schema_text(fields: RequestBody, name: str) -> str | None:
    """Return a schema as JSON, the form that SGLang's clients send, or None."""
    schema = fields.raw(name)
    if schema is None or schema == "":
        return None
    text = schema if isinstance(schema, str) else json.dumps(schema)
    if len(text) > LONGEST_SCHEMA:
        raise fields.refuse(name, f"is longer than {LONGEST_SCHEMA >> 10} KiB")
    return fields.checked(name, text)
