"""One request to the policy, from any API, with messages and tools in the form that chat templates expect."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from slimectl.chats.messages import MessageError, function_call
from slimectl.chats.request_body import RequestBody
from slimectl.chats.template import TEMPLATE_SETTING
from slimectl.data.answers import ParsedAnswer
from slimectl.errors import RecordError, SettingsError


class EndpointError(Exception):
    """Raised for a request that gets an HTTP error, with its status and OpenAI's error code."""

    def __init__(self, message: str, *, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """Messages and tools of one turn, with the client's limits. `prompt` replaces them in a completion."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    model: str = ""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """The request's temperature, top_p, top_k, min_p and seed, if given."""
    n: int = 1
    index: int = 0
    """Index of the response within one HTTP request."""
    stream: bool = False
    stream_usage: bool = False
    """Whether a stream of OpenAI's chats or completions ends with the token counts."""
    log_probs: bool = False
    top_log_probs: int = 0
    echo: bool = False
    """Whether a completion starts with its prompt."""
    single_call: bool = False
    """Whether the client uses only the first call of a response."""
    forced_tool: str | None = None
    """Name of the tool that must be called, "" for any of them, or None if the policy decides."""
    json_schema: str | None = None
    """JSON Schema that the answer must follow, as JSON."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    prompt: str | list[int] | None = None
    unapplied: tuple[str, ...] = ()
    """Keys of the request that cannot be applied. They are counted."""
    echoed: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the request that its response repeats."""
    identity: str = field(default_factory=lambda: uuid.uuid4().hex)


MOST_RESPONSES = 64
"""Maximum number of responses to one HTTP request: prompts times n."""


def numbered(requests: Sequence[ChatRequest]) -> list[ChatRequest]:
    """Return one request per response to an HTTP request: n for each prompt, with increasing seeds."""
    if len(requests) * requests[0].n > MOST_RESPONSES:
        total = len(requests) * requests[0].n
        raise MessageError("n", f"{total} responses to one request are too many. The maximum is {MOST_RESPONSES}.")
    copies = [(request, i) for request in requests for i in range(request.n)]
    return [
        replace(request, index=index, identity=requests[0].identity, sampling=_seeded(request.sampling, i))
        for index, (request, i) in enumerate(copies)
    ]


def _seeded(sampling: Mapping[str, Any], i: int) -> Mapping[str, Any]:
    return {**sampling, "seed": sampling["seed"] + i} if i and "seed" in sampling else sampling


def shared_fields(body: RequestBody) -> dict[str, Any]:
    """Return the fields with the same name in all APIs: the model, the sampling parameters, and whether to stream."""
    values = {
        "temperature": body.number("temperature", 1.0, low=0, high=1e4),
        "top_p": body.number("top_p", 1.0, low=1e-6, high=1),
        "top_k": body.whole("top_k", 0, low=-1) or -1,
        "min_p": body.number("min_p", 0.0, low=0, high=1),
        "seed": body.seed("seed"),
    }
    return {
        "model": body.text("model", ""),
        "sampling": {name: value for name, value in values.items() if name in body},
        "stream": body.flag("stream"),
        "template_kwargs": body.object("chat_template_kwargs"),
    }


def answer_message(parts: ParsedAnswer, call_ids: Sequence[str]) -> dict[str, Any]:
    """Return an answer as the message that a client sends back with its next request."""
    message: dict[str, Any] = {"role": "assistant", "content": parts.content}
    if parts.tool_calls:
        calls = zip(parts.tool_calls, call_ids, strict=True)
        message["tool_calls"] = [function_call(call.name, call.arguments, call_id) for call, call_id in calls]
    return message


@contextmanager
def refusing() -> Iterator[None]:
    """Turn an error of the chat template into EndpointError, or into MessageError if it is about an argument."""
    try:
        yield
    except RecordError as error:
        raise EndpointError(str(error).removeprefix("prompt: ")) from None
    except SettingsError as error:
        name, _, reason = str(error).removeprefix(f"{TEMPLATE_SETTING}: ").partition(" ")
        if not str(error).startswith(TEMPLATE_SETTING):
            raise
        raise MessageError(f"chat_template_kwargs.{name}", reason) from None
