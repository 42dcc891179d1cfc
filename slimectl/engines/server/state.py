"""The state shared by a server's endpoints, and the stream of server-sent events."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web
from torch import Tensor

from slimectl.chats.messages import MessageError
from slimectl.chats.requests import GenerationRequest
from slimectl.data.chat import encode, encode_raw
from slimectl.engines.embedded.weight_delta import Delta
from slimectl.engines.server.access import Guard
from slimectl.engines.server.adapters import AdapterBase, AdapterUpdate, MergedAdapter
from slimectl.engines.server.engine_thread import EngineThread, run_in_daemon_thread
from slimectl.engines.server.errors import RequestError, body, line, status_of
from slimectl.engines.server.requests import RequestState, RequestTable, RunningAnswer
from slimectl.errors import SettingsError, SlimectlError
from slimectl.protocols import OnTokens
from slimectl.system.http import send_part
from slimectl.types import Completion, SamplingParams

LONG = 20_000
"""Texts of at least so many characters are tokenized in a separate thread."""

ReadCheckpoint = Callable[[Path], Iterable[tuple[str, Tensor]]]
ReadDelta = Callable[[Path], Delta]


@dataclass(frozen=True, slots=True)
class Streaming:
    """Default stream options of requests."""

    interval: int = 1
    """Number of tokens per chunk."""
    incremental: bool = False
    """Whether a chunk of /generate has only the new tokens."""


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The served model with its folder, config, tokenizer and readers of weights, and who may use it how."""

    folder: Path
    config: Mapping[str, Any]
    tokenizer: Any
    dtype: str
    max_running: int
    read: ReadCheckpoint
    base_model: Callable[[Path], AdapterBase]
    """Opens a folder as the base model of adapters."""
    version: str = "0"
    """The weight version of the folder."""
    read_delta: ReadDelta | None = None
    """Reads the delta between two versions of a folder."""
    middlewares: tuple[Any, ...] = ()
    """User-defined middlewares. They run inside the ones that check keys and format errors."""
    guard: Guard = field(kw_only=True)
    streaming: Streaming = Streaming()
    pause_timeout_s: float = 60.0
    """Seconds that a request may wait for a paused engine."""


@dataclass(slots=True)
class Service:
    served: ServerConfig
    thread: EngineThread
    requests: RequestTable
    status: str = "loading weights"
    """Status message while the engine has no weights."""
    updating: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while weights are loaded, so that updates run one at a time."""
    adapter_update: AdapterUpdate | None = None
    """The adapter that the open session receives."""
    merged: MergedAdapter | None = None
    """The base model and adapter that the engine's weights consist of, if known."""
    groups: dict[str, Any] = field(default_factory=dict)
    """Process groups for weight broadcasts, by name."""
    streaming: Streaming = Streaming()
    clean: bool = True
    """Whether all threads have ended at shutdown."""
    born: float = field(default_factory=time.time)

    @property
    def ready(self) -> bool:
        return self.thread.engine.has_weights

    @property
    def state(self) -> str:
        """ "ok", or the status message while the engine has no weights."""
        return "ok" if self.ready else self.status

    def load_folder(self) -> None:
        """Load the weights of the served folder."""
        self.thread.engine.load_weights(self.served.read(self.served.folder), version=self.served.version)
        self.merged = MergedAdapter(self.served.base_model(self.served.folder))

    def check_ready(self) -> None:
        """Raise RequestError if the engine has no weights. Requests during an update wait until it ends."""
        if not self.thread.engine.accepts:
            raise RequestError(f"the engine has no weights yet: {self.status}", status=503)

    async def generate(
        self, tokens: list[int], params: SamplingParams, *, on_tokens: OnTokens | None = None
    ) -> Completion:
        """Generate one response. `on_tokens` is called with new tokens, in the engine's thread.

        Raises RequestError or SettingsError for a prompt that cannot be continued.
        """
        self.check_ready()
        rid, generation = uuid.uuid4().hex, GenerationRequest(params)
        await self.prepare_grammars([generation])
        with self.requests.ask([(tokens, generation)], [rid], rid=rid) as pending:
            if on_tokens is not None:
                pending.answers[0].sequence.follow(on_tokens)
            [answer] = await pending.finished()
            return answer.completion

    async def prepare_grammars(self, generations: Iterable[GenerationRequest]) -> None:
        """Compile grammars in another thread, because the first one takes a while.

        Raises MessageError with the key that requests the grammar, or SettingsError without a key.
        """
        for grammar, name in {
            generation.params.grammar: generation.restricted_by for generation in generations
        }.items():
            try:
                if grammar is not None:
                    await run_in_daemon_thread(partial(self.thread.engine.grammar, grammar))
            except SettingsError as error:
                if not name:
                    raise
                raise MessageError(name, str(error).partition(": ")[2]) from None

    async def encoded(self, text: str, *, specials: bool = True) -> list[int]:
        """Tokenize a text prompt as rollouts and training do, or without special tokens."""
        call = partial(encode_raw if specials else encode, self.served.tokenizer, text)
        return call() if len(text) < LONG else await run_in_daemon_thread(call)


SERVICE: web.AppKey[Service] = web.AppKey("service", Service)


class EventStream:
    """A response of server-sent events, each with one JSON value."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self.failed = False
        self._response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        )

    async def send(self, value: str) -> None:
        if not self._response.prepared:
            await self._response.prepare(self._request)
        await send_part(self._response, f"data: {value}\n\n")

    async def fail(self, error: Exception) -> None:
        """Send an error as an event, because an HTTP status can no longer be sent."""
        if not self._response.prepared:
            raise error
        self.failed = True
        await self.send(dumped(body(status_of(error), line(error), kind=getattr(error, "kind", None))))

    async def end(self) -> web.StreamResponse:
        await self.send("[DONE]")
        await self._response.write_eof()
        return self._response


COMPACT = json.JSONEncoder(separators=(",", ":"))


def dumped(value: Any) -> str:
    return COMPACT.encode(value)


async def stream_answers(
    request: web.Request, pending: RequestState, chunks: Callable[[RunningAnswer], list[str]]
) -> EventStream:
    """Send the new chunks of responses until all are finished or one fails. The caller ends the stream."""
    stream = EventStream(request)
    try:
        async for answer in pending.growing():
            for chunk in chunks(answer):
                await stream.send(chunk)
    except (RequestError, SlimectlError) as error:
        await stream.fail(error)
    return stream
