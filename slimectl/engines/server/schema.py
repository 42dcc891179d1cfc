"""Reads request bodies, within limits of size, time and memory, and gives typed access to their keys."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from aiohttp import web

from slimectl.chats.request_keys import Keys
from slimectl.engines.server.connections import Connection
from slimectl.engines.server.engine_thread import run_in_daemon_thread
from slimectl.engines.server.errors import RequestError, line
from slimectl.engines.server.request_keys import ENDPOINTS

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
            raise RequestError("Content-Encoding: compressed bodies are not taken; send it as it is", status=415)
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
                if request._read_bytes is not None:  # a middleware of the user's has read or replaced it
                    parts.append(request._read_bytes)
                    self.held += len(parts[0])
                async for part in request.content.iter_any():
                    parts.append(part)
                    size += len(part)
                    self.held += len(part)
                    if size > LONGEST_BODY:
                        raise _too_long()
                    if self.held > self._limit:
                        raise RequestError("too many large bodies at once; send it again in a moment", status=503)
        except TimeoutError:
            raise RequestError(f"the body has not come within {BODY_S:.0f} s; send it again", status=408) from None
        except web.RequestPayloadError as error:
            raise RequestError(f"the body broke off: {line(error)}") from None
        if connection is not None:
            connection.reading = None


BODIES: web.AppKey[BodyMemory] = web.AppKey("bodies", BodyMemory)


def _too_long() -> RequestError:
    return RequestError(f"the body is longer than {LONGEST_BODY >> 20} MiB; send less at once", status=413)


NUMBERS = 2**31
"""Upper bound of counts."""
LARGE = 1 << 20
"""Bytes from which a body is parsed in a separate thread."""


async def read(request: web.Request) -> RequestBody:
    """Parse the JSON object in a request's body. An empty body is an empty object.

    Raises RequestError for a body that cannot be read, and MessageError for a key that the endpoint would ignore.
    """
    if request.body_exists and request.content_type not in ("application/json", "application/octet-stream"):
        raise RequestError(f"content type {request.content_type!r} is not application/json", status=415)
    async with request.app[BODIES].body(request) as raw:
        parse = partial(json.loads, raw, parse_constant=_reject_constant)
        try:
            # A large one would block all other requests.
            value = (await run_in_daemon_thread(parse) if len(raw) > LARGE else parse()) if raw.strip() else {}
        except RecursionError:
            raise RequestError("the body is nested too deeply") from None
        except ValueError as error:  # JSON and UTF-8 alike
            raise RequestError(f"the body is not JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise RequestError("the body is not a JSON object")
    resource = request.match_info.route.resource
    assert resource is not None
    ENDPOINTS[resource.canonical].check(value)
    return RequestBody(value)


def _reject_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


class RequestBody:
    """JSON object with typed access to its fields; absent and null mean the default."""

    def __init__(self, values: dict[str, Any], *, at: str = "") -> None:
        self._values = values
        self._at = at

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def raw(self, name: str) -> Any:
        return self._values.get(name)

    def refuse(self, name: str, reason: str) -> RequestError:
        """Return the error to raise for a field."""
        return RequestError(f"{self._at}{name}: {reason}", field=self._at + name)

    def check(self, keys: Keys) -> None:
        """Raise MessageError for a key that would be ignored."""
        keys.check(self._values, self._at)

    def number(self, name: str, default: float, *, low: float, high: float) -> float:
        value = self._values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refuse(name, f"{_short(value)} is not a number")
        if not low <= value <= high or (isinstance(value, float) and not math.isfinite(value)):
            raise self.refuse(name, f"{_short(value)} is not between {low:g} and {high:g}")
        return float(value)

    def whole(self, name: str, default: int, *, low: int = 0, high: int = NUMBERS) -> int:
        value = self._values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.refuse(name, f"{_short(value)} is not a whole number")
        if not low <= value <= high:
            raise self.refuse(name, f"{_short(value)} is not between {low} and {high}")
        return value

    def seed(self, name: str) -> int | None:
        return self.whole(name, 0, low=-(2**63), high=2**64) if name in self else None

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(name, f"{_short(value)} is not true or false")
        return value

    def text(self, name: str, default: str | None = None, *, longest: int | None = None) -> str | None:
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.refuse(name, f"{_short(value)} is not a string")
        return self.checked(name, value, longest=longest)

    def needed(self, name: str) -> str:
        value = self.text(name, longest=4096)
        if not value:
            raise self.refuse(name, "is missing")
        return value

    def checked(self, name: str, value: str, *, longest: int | None = None) -> str:
        """Return the string, if it can be encoded as UTF-8."""
        if longest is not None and len(value) > longest:
            raise self.refuse(name, f"is longer than {longest} characters")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise self.refuse(name, "holds half of a surrogate pair, which is no text") from None
        return value

    def texts(self, name: str, *, max_count: int) -> list[str]:
        """Return one string or a list of them as a list."""
        value = self._values.get(name)
        values = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(values, list) or not all(isinstance(text, str) for text in values):
            raise self.refuse(name, "is neither a string nor a list of strings")
        if len(values) > max_count:
            raise self.refuse(name, f"are {len(values)} strings, and {max_count} are the most")
        return [self.checked(name, text) for text in values]

    def tokens(self, name: str, value: Any) -> list[int]:
        if not isinstance(value, list) or not all(type(token) is int for token in value):
            raise self.refuse(name, "is not a list of token ids")
        return value

    def objects(self, name: str) -> list[dict[str, Any]] | None:
        value = self._values.get(name)
        if value is not None and (not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value)):
            raise self.refuse(name, "is not a list of objects")
        return value

    def object(self, name: str) -> dict[str, Any]:
        value = self._values.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.refuse(name, "is not an object")
        return value or {}

    def choice(self, name: str, default: str, choices: tuple[str, ...]) -> str:
        value = self._values.get(name)
        if value is None:
            return default
        if value not in choices:
            raise self.refuse(name, f"{_short(value)} is not one of {', '.join(choices)}")
        return str(value)


def _short(value: Any) -> str:
    """Shorten a value for a message; a list or a number of a thousand digits is not printed whole."""
    if isinstance(value, str):
        return ascii(value[:60])
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**18:
        return "the number"
    return str(value)[:60] if isinstance(value, int | float) else f"the {type(value).__name__}"
