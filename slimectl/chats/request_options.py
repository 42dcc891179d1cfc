"""Reads the tools, the forced tool and the response format of a request, in the dialects of all APIs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from slimectl.chats.messages import MessageError, normalized_tools
from slimectl.chats.request_body import RequestBody
from slimectl.chats.request_keys import ObjectKeys, names

ANY_OBJECT = '{"type": "object"}'
LONGEST_SCHEMA = 1 << 18
MOST_STOPS = 256
LONGEST_STOP = 1024
MOST_TOP = 20
"""Maximum number of the likeliest tokens that a request may ask for, as in OpenAI's API."""
SCHEMA_LABELS = names("name description strict")
"""`strict` has no effect, because the grammar always follows the schema."""


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
