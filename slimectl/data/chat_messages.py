"""Messages of OpenAI's chat API, read as chat templates take them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any


class MessageError(ValueError):
    """Raised for a message that no chat template can show; `field` is its place in the request."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


def template_message(message: Mapping[str, Any], at: str) -> dict[str, Any]:
    """Return a message with its content as one text and the arguments of its calls as objects.

    Fields that are null are left out, but for the content of a message that only calls tools. Raises MessageError.
    """
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise MessageError(f"{at}.role", "is not a string")
    result = {name: value for name, value in message.items() if value is not None}
    result["content"] = None if content is None else plain_text(content, f"{at}.content", ("text", "refusal"))
    calls = result.pop("tool_calls", [])
    if not isinstance(calls, list):
        raise MessageError(f"{at}.tool_calls", "is not a list")
    if calls:
        result["tool_calls"] = [_template_call(call, f"{at}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return result


def _template_call(call: Any, at: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise MessageError(at, "is no call of a function with a name")
    return {**call, **function_call(function["name"], function.get("arguments"), call.get("id"))}


def plain_text(content: Any, at: str, kinds: Sequence[str] = ("text",)) -> str:
    """Return the text of a message's content: a string, or parts of which each has one of these types.

    Raises MessageError for other parts, and for half of a surrogate pair, which no tokenizer takes.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return checked_text(content, at)
    if not isinstance(content, list):
        raise MessageError(at, "is neither a string nor a list of parts")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        # OpenAI keeps the text of a refusal under that name.
        text = part.get("text", part.get(str(kind))) if isinstance(part, dict) else None
        if kind not in kinds or not isinstance(text, str):
            raise MessageError(at, f"has a part of type {kind!r}; this model reads text only")
        texts.append(text)
    return checked_text("".join(texts), at)


def checked_text(text: str, at: str) -> str:
    """Return a text that can be tokenised. Raises MessageError for half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise MessageError(at, "has half of a surrogate pair, which no tokenizer takes") from None
    return text


def function_call(name: Any, arguments: Any, call_id: Any) -> dict[str, Any]:
    """Return a tool call for a message; its arguments are an object where the text of them is one."""
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):  # else the template shows the text as it stands
            arguments = json.loads(arguments)
    return {"id": str(call_id or ""), "type": "function", "function": {"name": str(name), "arguments": arguments}}
