"""An engine over HTTP: one or more servers, or a router in front of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from slimectl.engines.http.api import ServerApi
from slimectl.engines.http.dispatch import CONNECT_S, ClientOptions, Dispatch, LoadBalancer
from slimectl.engines.http.request import PendingRequest
from slimectl.engines.limits import check_prompt
from slimectl.engines.stop_tokens import StopTokens
from slimectl.errors import BackendError, SettingsError
from slimectl.protocols import OnTokens
from slimectl.system.client import Background
from slimectl.system.event_loop import run_coroutine
from slimectl.system.http import get
from slimectl.types import Completion, SamplingParams


@dataclass(frozen=True)
class ServedModel:
    """The model that servers sample from."""

    vocabulary: int
    max_context: int
    """Maximum tokens of prompt and response."""

    decode: Callable[..., str] | None = None
    """Converts tokens to text. Without it, the server's text is used."""

    stops: StopTokens = field(default_factory=StopTokens)
    """Added to the stop tokens of each request."""


class HttpEngine:
    """protocols.Engine over HTTP, for any event loop and thread.

    `api` is the API of the servers. `urls` accept generation requests: one router, or servers among which the client
    balances requests. `workers` are the servers themselves, if they differ. If a server fails, its requests restart
    from the beginning on a server of the latest `set_urls`, so that one server generates the whole response.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        api: ServerApi,
        model: ServedModel,
        workers: Sequence[str] | None = None,
        options: ClientOptions = ClientOptions(),
    ) -> None:
        self.api, self.model, self.options = api, model, options
        self.max_context = model.max_context
        self.troubled: Callable[[str], object] = lambda url: None
        """Called with every server that failed, so that its monitor checks it at once."""

        self._urls, self._workers, self._leaving = list(urls), list(workers or urls), list[str]()
        self._numbers: Mapping[str, int] | None = None
        self.addresses = list(urls)
        """The latest request addresses. The list object stays the same."""
        self.generated_tokens = 0
        """Number of tokens in all completions."""
        self._failure: BaseException | None = None
        self._background = Background("slimectl-engine-client")
        self._dispatch: Dispatch | None = None

    async def generate(
        self, tokens: list[int], *, params: SamplingParams, on_tokens: OnTokens | None = None
    ) -> Completion:
        """Continue `tokens`. `on_tokens` is called with the tokens of every packet, in another thread.

        Raises SettingsError if the prompt leaves no room in the context, and for a grammar. Raises BackendError
        if no server responds.
        """
        if params.grammar is not None:
            raise SettingsError(
                "a grammar requires engine.backend = embedded. Servers return log-probabilities after its mask, "
                "which trainers do not compute."
            )
        check_prompt(tokens, params, vocabulary=self.model.vocabulary, max_context=self.max_context)
        params = self.model.stops.added_to(params)
        flight = PendingRequest(
            list(tokens),
            params,
            limit=min(params.max_tokens, self.max_context - len(tokens)),
            key=hash(tuple(tokens)),
            stop_tokens=frozenset(params.stop_token_ids if params.ignore_eos else ()),
            decode=self.model.decode,
            on_tokens=on_tokens,
        )
        completion = await asyncio.wrap_future(self._background.submit(self._complete(flight)))
        self.generated_tokens += len(completion.tokens)
        return completion

    async def abort(self) -> None:
        """End every request in flight. Each returns its tokens so far with finish "abort"."""
        if self._background.runs:
            await asyncio.wrap_future(self._background.submit(self._abort()))

    async def close(self) -> None:
        """Abort all requests and close all connections. The engine can be used again."""
        if self._background.runs:
            await asyncio.wrap_future(self._background.submit(self._close_dispatch()))
            self._background.stop()

    def set_urls(
        self,
        urls: Sequence[str],
        workers: Sequence[str] | None = None,
        leaving: Sequence[str] = (),
        numbers: Mapping[str, int] | None = None,
    ) -> None:
        """Replace the servers. `numbers` are those of the engines.

        Waiting requests go to the new ones. With an empty list, requests wait for the next call. Requests on servers
        that are `leaving` may finish there.
        """
        self._urls, self._workers = list(urls), list(urls if workers is None else workers)
        self._leaving, self._numbers = list(leaving), numbers
        self.addresses[:] = urls or self.addresses
        if self._background.runs:
            self._background.submit(self._announce()).result()

    def in_flight(self) -> dict[str, int]:
        """Return the number of requests in flight by the address that they were sent to."""
        dispatch = self._dispatch
        return {} if dispatch is None else dispatch.balance.in_flight()

    def fail(self, error: BaseException) -> None:
        """Fail all waiting requests with this error, because no server will come back."""
        self._failure = error
        if self._background.runs:
            self._background.submit(self._announce()).result()

    def check_model(self, expected: Mapping[str, Any]) -> None:
        """Check the model of every worker against `expected`: model_type, architectures, vocab_size and so on.

        Do not call it within an event loop. Raises BackendError if a worker does not respond or serves another model.
        """
        for url in self._workers:
            info = run_coroutine(self.api.model_info(partial(self._get, url)))
            if info is None:
                raise BackendError(f"engine at {url} does not report its model. Is it {self.api.name}?")
            for name, value in expected.items():
                served = info.get(name)
                if served is not None and value is not None and served != value:
                    raise BackendError(
                        f"engine at {url} serves another model: its {name} is {served}, but model.path has {value}"
                    )
            length = info.get("context_length")  # may be less than the model's
            if isinstance(length, int) and length > 0:
                self.max_context = min(self.max_context, length)

    async def _get(self, url: str, path: str) -> Any:
        try:
            reply = await get(url + path, timeout_s=CONNECT_S, headers=self.options.keys.headers(url, path))
        except BackendError as error:
            raise BackendError(f"engine at {url} is not answering. Start one with `slimectl serve`.") from error
        if reply.status in (401, 403):
            raise BackendError(f"engine at {url}: {path}: {reply.message}. Set its key in engine.api_key.")
        return reply.body if reply.status == 200 else None

    # The methods below run in the background loop.

    async def _complete(self, flight: PendingRequest) -> Completion:
        return await self._get_dispatch().complete(flight)

    async def _abort(self) -> None:
        if self._dispatch is not None:
            await self._dispatch.abort([*self._workers, *self._leaving])

    async def _announce(self) -> None:
        if self._dispatch is not None:
            self._dispatch.announce(self._urls, self._leaving, self._numbers)
            if self._failure is not None:
                self._dispatch.balance.fail(self._failure)

    async def _close_dispatch(self) -> None:
        await self._abort()
        dispatch, self._dispatch = self._dispatch, None
        if dispatch is not None:
            await dispatch.close()

    def _get_dispatch(self) -> Dispatch:
        if self._dispatch is None:
            balance = LoadBalancer(self._urls, concurrency=self.options.concurrency, affinity=self.options.affinity)
            if self._failure is not None:
                balance.fail(self._failure)
            self._dispatch = Dispatch(
                balance,
                self.api,
                self.options,
                troubled=lambda url: self.troubled(url),  # it may be replaced
            )
        return self._dispatch
