"""Dialect of the HTTP API of one kind of server, and the stream of one answer in it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import aiohttp

from slimectl.engines.http.request import Paused, PendingRequest, Unavailable
from slimectl.errors import BackendError, SettingsError
from slimectl.transport.http import PASSING, error_message, parsed

GetJson = Callable[[str], Awaitable[Any]]
"""Sends GET for a path of one server; returns the parsed body, None where the server refuses."""

PostJson = Callable[[str, Mapping[str, Any]], Awaitable[Any]]
"""Sends POST of a path and a body to one server, with retries; returns the parsed body. Raises BackendError."""


class ServerApi(Protocol):
    """Requests and answers of one kind of server; stateless and picklable."""

    @property
    def name(self) -> str:
        """The servers that speak it, for messages."""
        ...

    @property
    def generate_path(self) -> str: ...

    def generate_body(self, request: PendingRequest) -> dict[str, Any]:
        """Return the body of a request for a stream of tokens with log-probabilities, under `request.request_id`."""
        ...

    def add_event(self, event: Mapping[str, Any], request: PendingRequest) -> None:
        """Add one event of the stream to the answer.

        Raises Refused for an error in the stream, Unavailable if the tokens were not sampled with pushed weights.
        """
        ...

    def is_paused(self, status: int, body: Any) -> bool:
        """Whether a refusal says that the server is paused: this is no failure."""
        ...

    def abort_requests(self, ids: Sequence[str] | None = None) -> list[tuple[str, dict[str, Any]]]:
        """Return path and body of each request that ends the answers with these ids, or all answers without `ids`."""
        ...

    async def model_info(self, get: GetJson) -> Mapping[str, Any] | None:
        """Return model_type, vocab_size and context_length, as far as the server tells; None if its API is another."""
        ...

    async def prompt_log_probs(
        self, post: PostJson, rows: Sequence[Sequence[int]], starts: Sequence[int]
    ) -> list[list[tuple[int, float]]]:
        """Return (token, log-probability) of each row's tokens after position `start`, at temperature 1.

        Raises UnexpectedAnswer for an answer of another form.
        """
        ...

    async def tokenize(self, post: PostJson, text: str) -> list[int]:
        """Return the server's tokens of a text, special tokens included or not."""
        ...


class Refused(Exception):
    """Error in the middle of a stream, with the HTTP status that it would have had at its beginning."""

    def __init__(self, status: int, body: Any) -> None:
        super().__init__(status, body)
        self.status, self.body = status, body


class UnexpectedAnswer(Exception):
    """Error: a server answered in a form that its API does not have."""


MENDED_BY_ASKING_OTHERWISE = {400, 413, 422}


async def generate(
    session: aiohttp.ClientSession,
    url: str,
    request: PendingRequest,
    *,
    api: ServerApi,
    headers: Mapping[str, str] | None = None,
) -> None:
    """Stream an answer into `request`.

    Raises Unavailable or aiohttp's errors if a retry may succeed, SettingsError or BackendError if none will.
    """
    async with session.post(url + api.generate_path, json=api.generate_body(request), headers=headers) as reply:
        if reply.status != 200:
            _refuse(url, reply.status, parsed(await reply.text()), api)
        async for event in _events(reply.content):
            try:
                api.add_event(event, request)
            except Refused as refused:
                _refuse(url, refused.status, refused.body, api)
            if request.finish is not None:
                return
    raise Unavailable("it broke off in the middle of an answer")


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
    if status in MENDED_BY_ASKING_OTHERWISE:
        raise SettingsError(f"engine at {url} refuses the request: {error_message(body)}")
    hint = "; give its key by engine.api_key" if status == 401 else ""
    raise BackendError(f"engine at {url} answers {status}: {error_message(body)}{hint}")
