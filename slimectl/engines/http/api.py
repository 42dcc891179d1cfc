"""Dialect of a server's HTTP API: all that clients must know of one kind of server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from slimectl.engines.http.request import PendingRequest

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
