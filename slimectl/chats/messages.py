"""Converts chat messages and tools of all dialects to one form, for rows, agents, servers and judges."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from slimectl.types import Chat

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles of OpenAI's API. `function`, the older name of `tool`, is read too."""
REASONING = "reasoning_content"
REASONING_KEYS = (REASONING, "reasoning", "thinking")
"""Names of a message's reasoning, by priority. Normalized messages use the first one."""
TRAINING_MARKS = (
    "step_loss_mask", "loss_mask", "loss", "loss_weight", "weight", "train", "trainable", "training", "train_on_turn",
)  # fmt: skip
"""Keys with which datasets mark assistant turns that are trained on (true, 1) or not (false, 0)."""
KNOWN_KEYS = frozenset(
    ["role", "content", "name", "id", "tool_calls", "tool_call_id", "function_call", "refusal", "audio", "annotations",
     *REASONING_KEYS, *TRAINING_MARKS]
)  # fmt: skip
"""Keys of a message that are handled here, or that no chat template needs."""
TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "reasoning_text")
REASONING_PARTS = ("thinking", "reasoning")
IMAGE_PARTS = ("image", "image_url", "input_image")
IMAGE_MARK = "<image>"
"""Place of an image in a text, if the images are in a column."""
NULL_KEYWORDS = ("default", "const")
"""Keywords of a JSON Schema whose value may be null."""


class MessageError(ValueError):
    """Raised for a field of a request that cannot be served, such as a message that no chat template can show.

    `field` is its place in the request.
    """

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


def normalized_chat(messages: Iterable[Mapping[str, Any]], at: str = "messages", *, images: bool = False) -> Chat:
    """Return messages in the form of `template_message`. Raises MessageError."""
    return [template_message(message, f"{at}[{i}]", images=images) for i, message in enumerate(messages)]


def template_message(message: Mapping[str, Any], at: str, *, images: bool = False) -> dict[str, Any]:
    """Return a message with its content as one text, its reasoning under one key, and its calls in OpenAI's form.

    Content that is null is an empty text, and keys that are null are left out. A tool's result that is an object
    becomes its JSON. Arguments of calls are objects where their JSON is one. With `images` the parts of a message with
    images stay parts. Raises MessageError.
    """
    role = message.get("role")
    if not isinstance(role, str):
        raise MessageError(f"{at}.role", "is not a string")
    result = {name: value for name, value in message.items() if value is not None}
    result["role"] = _role(role, at)
    reasoning = _reasoning(result, at)
    text = message.get("content") or message.get("refusal")  # OpenAI puts the text of a refusal under a separate key
    if result["role"] == "tool" and _is_data(text):
        text = json.dumps(text, ensure_ascii=False)
    content, thoughts = _content(text, f"{at}.content", images=images)
    result["content"] = content
    if reasoning or thoughts:
        result[REASONING] = reasoning or thoughts
    calls, legacy = from_json(result.pop("tool_calls", "")), from_json(result.pop("function_call", ""))
    if legacy and not calls:
        calls = [legacy]
    if not isinstance(calls, list | None):
        raise MessageError(f"{at}.tool_calls", "is not a list")
    if calls:
        result["tool_calls"] = [_template_call(call, f"{at}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return result


def _role(role: str, at: str) -> str:
    if role == "function":
        return "tool"
    plain = role.strip().lower()
    if plain != role and plain in ROLES:
        raise MessageError(f"{at}.role", f"is {role!r}. Did you mean {plain!r}?")
    return role


def _reasoning(message: dict[str, Any], at: str) -> str:
    """Remove the reasoning from a message and return it. Raises MessageError if two keys differ."""
    texts = {message.pop(key) for key in REASONING_KEYS if isinstance(message.get(key), str)} - {""}
    if len(texts) > 1:
        raise MessageError(f"{at}.{REASONING}", "differs from the other reasoning of this message. Keep one of them.")
    return checked_text(texts.pop(), f"{at}.{REASONING}") if texts else ""


def _content(content: Any, at: str, *, images: bool) -> tuple[str | list[dict[str, Any]], str]:
    """Return content and reasoning of a message's `content`. Raises MessageError for parts that cannot be read."""
    if content is None or isinstance(content, str):
        return checked_text(content or "", at), ""
    if not isinstance(content, list):
        raise MessageError(at, "is neither a string nor a list of parts")
    parts: list[dict[str, Any]] = []
    thoughts = ""
    for part in content:
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        if kind in REASONING_PARTS:
            thoughts += _thought(part, at)
        elif images and kind in IMAGE_PARTS:
            parts.append(part)
        else:
            parts.append({"type": "text", "text": _part_text(part, kind, at, images=images)})
    if any(part["type"] != "text" for part in parts):
        return parts, thoughts
    return "".join(part["text"] for part in parts), thoughts


def _is_data(content: Any) -> bool:
    """Return whether the content of a tool result is an object, or a list of anything but parts."""
    items = content if isinstance(content, list) else []
    return isinstance(content, dict) or any(
        not isinstance(item, str | dict) or (isinstance(item, dict) and not item.keys() & {"type", "text"})
        for item in items
    )


def _part_text(part: Any, kind: Any, at: str, *, images: bool) -> str:
    # OpenAI's parts of type `refusal` have their text under `refusal`.
    text = part if isinstance(part, str) else part.get("text", part.get(str(kind))) if isinstance(part, dict) else None
    if kind not in TEXT_PARTS or not isinstance(text, str):
        readable = "text and images" if images else "text"
        raise MessageError(at, f"has a part of type {kind!r}. This model reads {readable} only.")
    return checked_text(text, at)


def _thought(part: Mapping[str, Any], at: str) -> str:
    text = next((part[key] for key in (*REASONING_PARTS, "text") if part.get(key)), "")
    return plain_text(text, at)


def plain_text(content: Any, at: str) -> str:
    """Return the text of a message's content: a string, or parts that are all text.

    Raises MessageError for other parts, and for half of a surrogate pair, which no tokenizer accepts.
    """
    text, _ = _content(content, at, images=False)
    assert isinstance(text, str)
    return text


def content_text(content: Any) -> str:
    """Return the content of a message as one text for display, with a mark for every image."""
    if not isinstance(content, list):
        return "" if content is None else str(content)
    parts = (part if isinstance(part, dict) else {"text": part} for part in content)
    return "".join(IMAGE_MARK if part.get("type") in IMAGE_PARTS else str(part.get("text", "")) for part in parts)


def checked_text(text: str, at: str) -> str:
    """Return a text that can be tokenized. Raises MessageError for half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise MessageError(at, "has half of a surrogate pair, which no tokenizer accepts") from None
    return text


def _template_call(call: Any, at: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise MessageError(at, "is not a function call with a name")
    call_fields = {key: value for key, value in call.items() if value is not None and key not in ("name", "arguments")}
    return {**call_fields, **function_call(function["name"], function.get("arguments"), call.get("id"))}


def function_call(name: Any, arguments: Any, call_id: Any) -> dict[str, Any]:
    """Return a tool call for a message.

    Its arguments are an object if their JSON is one, {} if there are none, and a text otherwise.
    """
    if isinstance(arguments, str):
        arguments = parsed_object(arguments)
    elif not isinstance(arguments, dict):
        arguments = {} if arguments is None else json.dumps(arguments, ensure_ascii=False)
    return {"id": str(call_id or ""), "type": "function", "function": {"name": str(name), "arguments": arguments}}


def from_json(value: Any) -> Any:
    """Parse the JSON text of an object or a list. Return None for a blank text, and any other value unchanged."""
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return value if not isinstance(value, str) or value.strip() else None
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def parsed_object(text: str) -> str | dict[str, Any]:
    """Parse a JSON object. Return {} for a blank text, and any other text unchanged."""
    if not text.strip():
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def normalized_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Return tools in OpenAI's form, without the nulls that tables add to schemas. None if there are none.

    >>> normalized_tools([{"name": "f", "parameters": {"properties": {"a": {"type": "string"}, "b": None}}}])
    [{'type': 'function', 'function': {'name': 'f', 'parameters': {'properties': {'a': {'type': 'string'}}}}}]
    """
    if not tools:
        return None
    shown: list[dict[str, Any]] = [without_nulls(tool, keep=NULL_KEYWORDS) for tool in tools]
    return [
        {"type": "function", "function": tool} if isinstance(tool.get("name"), str) and "function" not in tool else tool
        for tool in shown
    ]


def without_nulls(value: Any, *, keep: Sequence[str] = ()) -> Any:
    """Return a value without the keys of its objects that are null, unless they are named in `keep`."""
    if isinstance(value, dict):
        return {key: without_nulls(v, keep=keep) for key, v in value.items() if v is not None or key in keep}
    return [without_nulls(item, keep=keep) for item in value] if isinstance(value, list) else value


def is_trained(message: Mapping[str, Any], at: str) -> bool:
    """Return whether an assistant turn is trained on. It is, unless one of TRAINING_MARKS is false or 0.

    Raises MessageError for values other than true, false, 1 and 0, and for marks that contradict each other.
    """
    marks = {key: message[key] for key in TRAINING_MARKS if message.get(key) is not None}
    for key, value in marks.items():
        if isinstance(value, str | list | dict) or value not in (0, 1):
            raise MessageError(
                f"{at}.{key}", f"is {value!r}. Use 1 or true to train on the turn, 0 or false to leave it out."
            )
    if len({bool(value) for value in marks.values()}) > 1:
        raise MessageError(at, f"has contradicting marks: {' and '.join(marks)}. Keep one of them.")
    return all(marks.values())
