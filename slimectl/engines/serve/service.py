"""What every endpoint of a server shares."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web
from torch import Tensor

from slimectl.engines.serve.answers import Desk
from slimectl.engines.serve.refusals import Refused, body, line, status_of
from slimectl.engines.serve.thread import EngineThread, apart
from slimectl.errors import SlimectlError

LONG = 20_000
"""Characters from which a text is tokenised outside the server's loop."""

SEND_S = 60.0
"""How long a client may read nothing of a stream."""

ReadCheckpoint = Callable[[Path], Iterable[tuple[str, Tensor]]]


@dataclass(frozen=True, slots=True)
class Served:
    """What is served: the model's folder and its facts, its tokenizer, and how a folder of new weights is read."""

    folder: Path
    config: Mapping[str, Any]
    tokenizer: Any
    dtype: str
    max_running: int
    read: ReadCheckpoint
    version: str = "0"
    """Weight version of the folder."""


@dataclass(frozen=True, slots=True)
class Streaming:
    """How streams are cut where a request does not say."""

    interval: int = 1
    """Tokens between two chunks."""
    incremental: bool = False
    """Whether a chunk of /generate tells only what is new."""


@dataclass(slots=True)
class Service:
    served: Served
    thread: EngineThread
    desk: Desk
    status: str = "loading weights"
    """What is waited for while there are no weights."""
    updating: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while weights come: one after another."""
    groups: dict[str, Any] = field(default_factory=dict)
    """Process groups that weights are broadcast in, by name."""
    streaming: Streaming = Streaming()
    clean: bool = True
    """Whether no thread was left behind at the end."""
    born: float = field(default_factory=time.time)

    @property
    def ready(self) -> bool:
        return self.thread.engine.has_weights

    @property
    def state(self) -> str:
        """ "ok", or what is waited for."""
        return "ok" if self.ready else self.status

    def check_ready(self) -> None:
        """Raises Refused while nothing can be answered; requests that come during an update wait for its end."""
        if not self.thread.engine.accepts:
            raise Refused(f"the engine has no weights yet: {self.status}", status=503)

    async def encoded(self, text: str) -> list[int]:
        """Token ids, as SGLang and OpenAI tokenise a prompt: with the tokens that the tokenizer puts around it."""
        encode = partial(self.served.tokenizer.encode, text, add_special_tokens=True)
        return list(encode() if len(text) < LONG else await apart(encode))


SERVICE: web.AppKey[Service] = web.AppKey("service", Service)


class EventStream:
    """Server-sent events, one JSON value each."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        )

    async def send(self, value: str) -> None:
        if not self._response.prepared:
            await self._response.prepare(self._request)
        await self._write(f"data: {value}\n\n".encode())

    async def fail(self, error: Exception) -> None:
        """Say in the stream what went wrong; a status can be sent no more."""
        if not self._response.prepared:
            raise error
        await self.send(dumped(body(status_of(error), line(error), kind=getattr(error, "kind", None))))

    async def end(self) -> web.StreamResponse:
        await self.send("[DONE]")
        await self._response.write_eof()
        return self._response

    async def _write(self, data: bytes) -> None:
        """Raises ConnectionResetError if the client does not read: what it asked for then ends."""
        try:
            async with asyncio.timeout(SEND_S):
                await self._response.write(data)
        except TimeoutError:
            raise ConnectionResetError(f"the client has read nothing for {SEND_S:.0f} s") from None


COMPACT = json.JSONEncoder(separators=(",", ":"))
STREAMED = (Refused, SlimectlError)
"""What may go wrong once a stream has begun."""


def dumped(value: Any) -> str:
    return COMPACT.encode(value)
