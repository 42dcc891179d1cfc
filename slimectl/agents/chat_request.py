"""One request to the policy, whichever API it came by: messages and tools in the form that chat templates take."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slimectl.chats.messages import function_call
from slimectl.data.answers import ParsedAnswer
from slimectl.errors import RecordError


class RequestRefused(Exception):
    """Raised for a request that gets an error of HTTP, with its status and OpenAI's code for it."""

    def __init__(self, message: str, *, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """Messages and tools of one turn, with the limits that the client set; `prompt` replaces them in a completion."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    model: str = ""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    n: int = 1
    stream: bool = False
    log_probs: bool = False
    forced_tool: str | None = None
    """Name of the tool that has to be called, "" for any of them; None where the policy decides."""
    json_schema: str | None = None
    """JSON Schema that the answer has to follow, as JSON."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    prompt: str | list[int] | None = None


class Body:
    """Fields of a JSON request with checks of their types; unknown fields are ignored, as clients send many."""

    def __init__(self, values: Any) -> None:
        if not isinstance(values, dict):
            raise RequestRefused("the body is no JSON object")
        self.values: dict[str, Any] = values

    def get(self, name: str, *types: type, default: Any = None) -> Any:
        """Return a field of one of these types; the default where it is absent or null."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            kinds = " or ".join(kind.__name__ for kind in types)
            raise RequestRefused(f"{name}: must be {kinds}, not {type(value).__name__}")
        return value

    def objects(self, name: str) -> list[dict[str, Any]]:
        items = self.get(name, list, default=[])
        for i, item in enumerate(items):
            if not isinstance(item, dict):
                raise RequestRefused(f"{name}[{i}]: is no object")
        return list(items)

    def positive(self, *names: str) -> int | None:
        """Return the first of these fields that is there. Raises RequestRefused if it is below 1."""
        for name in names:
            value: int | None = self.get(name, int)
            if value is not None and value < 1:
                raise RequestRefused(f"{name}: must be at least 1")
            if value is not None:
                return value
        return None

    def texts(self, name: str) -> tuple[str, ...]:
        value = self.get(name, str, list, default=[])
        texts = (value,) if isinstance(value, str) else tuple(value)
        if not all(isinstance(text, str) and text for text in texts):
            raise RequestRefused(f"{name}: must be texts")
        return texts

    def sampling(self) -> dict[str, Any]:
        """Return the sampling parameters that all APIs name alike."""
        temperature, top_p = self.get("temperature", int, float), self.get("top_p", int, float)
        if temperature is not None and temperature < 0:
            raise RequestRefused("temperature: must not be negative")
        return {"temperature": temperature, "top_p": top_p, "model": self.get("model", str, default="")}


def schema_text(form: Mapping[str, Any], at: str) -> str | None:
    """Return the JSON Schema of a response format, as JSON; None for text. Raises RequestRefused."""
    kind = form.get("type")
    if kind in (None, "text"):
        return None
    if kind == "json_object":
        return '{"type": "object"}'
    # OpenAI's chats have an object more around the schema than its responses and Anthropic's messages.
    inner = form.get("json_schema")
    schema = (inner if isinstance(inner, dict) else form).get("schema")
    if kind != "json_schema" or not isinstance(schema, dict):
        raise RequestRefused(f"{at}: is no text, json_object or json_schema with a schema")
    return json.dumps(schema)


def answer_message(parts: ParsedAnswer, call_ids: Sequence[str]) -> dict[str, Any]:
    """Return an answer as the message that a client sends back with its next request."""
    message: dict[str, Any] = {"role": "assistant", "content": parts.content}
    if parts.tool_calls:
        calls = zip(parts.tool_calls, call_ids, strict=True)
        message["tool_calls"] = [function_call(call.name, call.arguments, call_id) for call, call_id in calls]
    return message


def refused(error: RecordError) -> RequestRefused:
    """Return a refusal by the chat template as one of the request."""
    return RequestRefused(str(error).removeprefix("prompt: "))
