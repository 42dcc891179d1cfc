"""Reads and validates request bodies, within limits on size, time and memory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from aiohttp import web

from slimectl.chats.requests import RequestBody
from slimectl.engines.server.connections import Connection
from slimectl.engines.server.engine_thread import run_in_daemon_thread
from slimectl.engines.server.errors import RequestError, line
from slimectl.engines.server.request_keys import ENDPOINTS

LONGEST_BODY = 32 << 20
MOST_TOGETHER = 128 << 20
"""Maximum bytes of all bodies being read or parsed, because thousands of clients could each send a large one."""
BODY_S = 60.0
"""Maximum seconds to receive a body."""


class BodyMemory:
    """Counts the bytes of bodies in memory."""

    def __init__(self) -> None:
        self.held = 0

    @asynccontextmanager
    async def body(self, request: web.Request) -> AsyncIterator[bytes]:
        """Read the whole body. Its bytes count against the limit until the end of the block.

        Raises RequestError if the body is too long, too slow or compressed, or if all bodies together are too large.
        """
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise RequestError(
                "Content-Encoding: compressed bodies are not supported. Send it uncompressed.", status=415
            )
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
                if request._read_bytes is not None:  # a user-defined middleware has read or replaced it
                    parts.append(request._read_bytes)
                    self.held += len(parts[0])
                async for part in request.content.iter_any():
                    parts.append(part)
                    size += len(part)
                    self.held += len(part)
                    if size > LONGEST_BODY:
                        raise _too_long()
                    if self.held > MOST_TOGETHER:
                        raise RequestError("too many large bodies at once. Try again in a moment.", status=503)
        except TimeoutError:
            raise RequestError(f"the body did not arrive within {BODY_S:.0f} s. Send it again.", status=408) from None
        except web.RequestPayloadError as error:
            raise RequestError(f"the body is incomplete: {line(error)}") from None
        if connection is not None:
            connection.reading = None


BODIES: web.AppKey[BodyMemory] = web.AppKey("bodies", BodyMemory)


def _too_long() -> RequestError:
    return RequestError(f"the body is longer than {LONGEST_BODY >> 20} MiB. Send less at a time.", status=413)


LARGE = 1 << 20
"""Bodies of more bytes are parsed in a separate thread."""


async def read(request: web.Request) -> RequestBody:
    """Parse the JSON object in a request's body. An empty body is an empty object.

    Raises RequestError for a body that cannot be read, and MessageError for a key that the endpoint does not have.
    """
    if request.body_exists and request.content_type not in ("application/json", "application/octet-stream"):
        raise RequestError(f"content type {request.content_type!r} is not application/json", status=415)
    async with request.app[BODIES].body(request) as raw:
        parse = partial(json.loads, raw, parse_constant=_reject_constant)
        try:
            # Parsing a large one here would block all other requests.
            value = (await run_in_daemon_thread(parse) if len(raw) > LARGE else parse()) if raw.strip() else {}
        except RecursionError:
            raise RequestError("the body is nested too deeply") from None
        except ValueError as error:  # invalid JSON or UTF-8
            raise RequestError(f"the body is not JSON: {str(error)[:200]}") from None
    fields = RequestBody.of(value)
    resource = request.match_info.route.resource
    assert resource is not None
    fields.check(ENDPOINTS[resource.canonical])
    return fields


def _reject_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")
