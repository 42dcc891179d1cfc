"""Refusals of the endpoint, the responses to one HTTP request, and answers as messages of a chat."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from slimectl.chats.messages import MessageError, function_call
from slimectl.chats.requests import ChatRequest
from slimectl.chats.template import TEMPLATE_SETTING
from slimectl.data.answers import ParsedAnswer
from slimectl.errors import RecordError, SettingsError


class EndpointError(Exception):
    """Raised for a request that gets an HTTP error, with its status and OpenAI's error code."""

    def __init__(self, message: str, *, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


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
