"""One request to the policy, whichever API it came by: messages and tools in the form that chat templates take."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """The request's own temperature, top_p, top_k, min_p and seed, as far as it names them."""
    n: int = 1
    index: int = 0
    """Number of the response among those to one HTTP request."""
    stream: bool = False
    stream_usage: bool = False
    """Whether a stream of OpenAI's chats and completions ends with the token counts."""
    log_probs: bool = False
    top_log_probs: int = 0
    echo: bool = False
    """Whether a completion starts with its prompt."""
    single_call: bool = False
    """Whether the client takes only the first call of a response."""
    forced_tool: str | None = None
    """Name of the tool that has to be called, "" for any of them; None where the policy decides."""
    json_schema: str | None = None
    """JSON Schema that the answer has to follow, as JSON."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    prompt: str | list[int] | None = None
    unapplied: tuple[str, ...] = ()
    """Keys of the request that cannot be obeyed, and are counted."""
    echoed: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the request that its response repeats."""
    identity: str = field(default_factory=lambda: uuid.uuid4().hex)


MOST_RESPONSES = 64
"""Responses to one HTTP request: prompts times n."""


def numbered(requests: Sequence[ChatRequest]) -> list[ChatRequest]:
    """Return a request for each response to one HTTP request: n to each prompt, with seeds that count up."""
    if len(requests) * requests[0].n > MOST_RESPONSES:
        total = len(requests) * requests[0].n
        raise RequestRefused(f"n: {total} responses to one request are too many. The maximum is {MOST_RESPONSES}.")
    copies = [(request, i) for request in requests for i in range(request.n)]
    return [
        replace(request, index=index, identity=requests[0].identity, sampling=_seeded(request.sampling, i))
        for index, (request, i) in enumerate(copies)
    ]


def _seeded(sampling: Mapping[str, Any], i: int) -> Mapping[str, Any]:
    return {**sampling, "seed": sampling["seed"] + i} if i and "seed" in sampling else sampling


class Body:
    """Fields of a JSON request with checks of their types."""

    def __init__(self, values: Any) -> None:
        if not isinstance(values, dict):
            raise RequestRefused("the body is not a JSON object")
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

    def number(self, name: str, low: float, high: float = 1.0, *, types: tuple[type, ...] = (int, float)) -> Any:
        """Return a number between two bounds, None where it is absent. Raises RequestRefused."""
        value = self.get(name, *types)
        if value is not None and not low <= value <= high:
            raise RequestRefused(f"{name}: must be between {low:g} and {high:g}")
        return value

    def shared(self) -> dict[str, Any]:
        """Return what all APIs name alike: the model, the sampling parameters, and whether to stream."""
        values = {
            "temperature": self.number("temperature", 0, 1e4),
            "top_p": self.number("top_p", 1e-6),
            "top_k": self.number("top_k", -1, 2**31, types=(int,)) or None,
            "min_p": self.number("min_p", 0),
            "seed": self.number("seed", -(2**63), 2**64, types=(int,)),
        }
        return {
            "model": self.get("model", str, default=""),
            "sampling": {name: value for name, value in values.items() if value is not None},
            "stream": self.get("stream", bool, default=False),
        }


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
        raise RequestRefused(f"{at}: is not text, json_object or json_schema with a schema")
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
