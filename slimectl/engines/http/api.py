"""The interface of a server's HTTP API, and streaming of one response through it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import aiohttp

from slimectl.engines.http.request import Paused, PendingRequest, Unavailable
from slimectl.errors import BackendError, SettingsError
from slimectl.system.http import PASSING, error_message, parsed
from slimectl.types import TopTokens

GetJson = Callable[[str], Awaitable[Any]]
"""Sends a GET request for a path to one server. Returns the parsed body, or None if the server refuses."""

PostJson = Callable[[str, Mapping[str, Any]], Awaitable[Any]]
"""Sends a POST request with a path and a body to one server, with retries.

Returns the parsed body. Raises BackendError.
"""


class ScoredToken(NamedTuple):
    """A token of a prompt, its log-probability, and the likeliest tokens in its place, if they were requested."""

    token: int
    log_prob: float
    top: TopTokens


class ServerApi(Protocol):
    """Request and response formats of one kind of server. Stateless and picklable."""

    @property
    def name(self) -> str:
        """Name of the server for messages."""
        ...

    @property
    def generate_path(self) -> str: ...

    def generate_body(self, request: PendingRequest) -> dict[str, Any]:
        """Return the request body for a stream of tokens with log-probabilities. Its id is `request.request_id`."""
        ...

    def add_event(self, event: Mapping[str, Any], request: PendingRequest) -> None:
        """Add one event of the stream to the response.

        Raises StreamError for an error in the stream, and Unavailable for tokens of weights that were not pushed.
        """
        ...

    def is_paused(self, status: int, body: Any) -> bool:
        """Whether a refusal means that the server is paused, which is not a failure."""
        ...

    def abort_requests(self, ids: Sequence[str] | None = None) -> list[tuple[str, dict[str, Any]]]:
        """Return path and body of each request that aborts the responses with these ids, or all if `ids` is None."""
        ...

    async def model_info(self, get: GetJson) -> Mapping[str, Any] | None:
        """Return model_type, vocab_size and context_length if the server reports them, or None if its API differs."""
        ...

    async def prompt_log_probs(
        self, post: PostJson, rows: Sequence[Sequence[int]], starts: Sequence[int], *, top: int = 0
    ) -> list[list[ScoredToken]]:
        """Score each row's tokens after position `start` at temperature 1, with the `top` likeliest at each.

        Raises UnexpectedAnswer if the response has another form.
        """
        ...

    async def tokenize(self, post: PostJson, text: str) -> list[int]:
        """Return the tokens that the server makes of a text, with or without special tokens."""
        ...


class StreamError(Exception):
    """An error in the middle of a stream, with the HTTP status that it would have had at the start."""

    def __init__(self, status: int, body: Any) -> None:
        super().__init__(status, body)
        self.status, self.body = status, body


class UnexpectedAnswer(Exception):
    """Raised if a server's response does not have the form that its API defines."""


BAD_REQUEST_STATUSES = {400, 413, 422}


async def generate(
    session: aiohttp.ClientSession,
    url: str,
    request: PendingRequest,
    *,
    api: ServerApi,
    headers: Mapping[str, str] | None = None,
) -> None:
    """Stream a response into `request`.

    Raises Unavailable or an aiohttp error if a retry may succeed, else SettingsError or BackendError.
    """
    async with session.post(url + api.generate_path, json=api.generate_body(request), headers=headers) as reply:
        if reply.status != 200:
            _refuse(url, reply.status, parsed(await reply.text()), api)
        async for event in _events(reply.content):
            try:
                api.add_event(event, request)
            except StreamError as refused:
                _refuse(url, refused.status, refused.body, api)
            if request.finish is not None:
                return
    raise Unavailable("the connection broke in the middle of a response")


async def _events(stream: aiohttp.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """Yield the JSON of every server-sent event, across packet boundaries."""
    buffer = b""
    async for packet in stream.iter_any():
        *lines, buffer = (buffer + packet).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                yield json.loads(data)


def _refuse(url: str, status: int, body: Any, api: ServerApi) -> None:
    if api.is_paused(status, body):
        raise Paused(error_message(body))
    if status in PASSING:
        raise Unavailable(f"{status} {error_message(body)}")
    if status in BAD_REQUEST_STATUSES:
        raise SettingsError(f"engine at {url} rejects the request: {error_message(body)}")
    hint = ". Set its key in engine.api_key." if status == 401 else ""
    raise BackendError(f"engine at {url} responds with status {status}: {error_message(body)}{hint}")
