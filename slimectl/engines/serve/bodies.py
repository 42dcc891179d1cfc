"""Limits on request bodies: size of one, time to receive it, and memory of all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from slimectl.engines.serve.connections import Connection
from slimectl.engines.serve.refusals import Refused, line

LONGEST_BODY = 32 << 20
MOST_TOGETHER = 128 << 20
"""Maximum bytes of all bodies that are being read or parsed: thousands of clients could each send a large one."""
BODY_S = 60.0
"""Seconds that one may take."""


class BodyMemory:
    """Counts the bytes of bodies in memory."""

    def __init__(self, limit: int | None = None) -> None:
        self._limit = MOST_TOGETHER if limit is None else limit
        self.held = 0

    @asynccontextmanager
    async def body(self, request: web.Request) -> AsyncIterator[bytes]:
        """Read the whole body; its bytes count until the end of the block.

        Raises Refused for one that is too long, comes too slowly or compressed, or does not fit beside the others.
        """
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise Refused("Content-Encoding: compressed bodies are not taken; send it as it is", status=415)
        if (request.content_length or 0) > LONGEST_BODY:
            raise _too_long()
        parts: list[bytes] = []
        try:
            await self._read(request, parts)
            yield b"".join(parts)
        finally:
            self.held -= sum(map(len, parts))

    async def _read(self, request: web.Request, parts: list[bytes]) -> None:
        connection = request.protocol if isinstance(request.protocol, Connection) else None
        if connection is not None:
            connection.reading = asyncio.get_running_loop().time()
        size = 0
        try:
            async with asyncio.timeout(BODY_S):
                async for part in request.content.iter_any():
                    parts.append(part)
                    size += len(part)
                    self.held += len(part)
                    if size > LONGEST_BODY:
                        raise _too_long()
                    if self.held > self._limit:
                        raise Refused("too many large bodies at once; send it again in a moment", status=503)
        except TimeoutError:
            raise Refused(f"the body has not come within {BODY_S:.0f} s; send it again", status=408) from None
        except web.RequestPayloadError as error:
            raise Refused(f"the body broke off: {line(error)}") from None
        if connection is not None:
            connection.reading = None


BODIES: web.AppKey[BodyMemory] = web.AppKey("bodies", BodyMemory)


def _too_long() -> Refused:
    return Refused(f"the body is longer than {LONGEST_BODY >> 20} MiB; send less at once", status=413)
