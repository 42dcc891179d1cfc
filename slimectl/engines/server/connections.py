"""Limits on a server's connections: their number, how long each may be idle, and a warning when there are too many.

If no descriptor is left, asyncio's own accept loop prints a traceback for each of 4096 tries (CPython 3.11). Here,
connections beyond the limit wait in the system's queue.
"""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket
from contextlib import suppress
from typing import Any

from aiohttp import web

from slimectl.engines.server.errors import Notices, line, reply

MOST_CONNECTIONS = 8192
RESERVED = 64
"""Descriptors reserved for weight files, trainers' process groups and the engine."""

FIRST_REQUEST_S = 20.0
"""Seconds that a new connection may take to send the headers of its first request."""
KEEP_ALIVE_S = 75.0
"""Seconds that a connection may be idle between requests or take to read a response."""
PRESSED_S = 3.0
"""Lower limit for both, and limit for receiving a body, while others wait for a connection."""
SWEEP_S = 0.5
RETRY_S = 0.2
NO_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def raise_descriptor_limit() -> None:
    """Raise this process's descriptor limit to the maximum."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def most_connections() -> int:
    """Return the number of connections that leaves enough descriptors for everything else."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    spare = soft - len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else soft // 2
    return max(2, min(MOST_CONNECTIONS, spare - min(RESERVED, spare // 4)))


class Connection(web.RequestHandler):
    """A client connection that records how long it has waited for its client, and formats errors as JSON."""

    __slots__ = ("_limiter", "reading", "requests", "waits_since")

    def __init__(self, manager: web.Server, limiter: ConnectionLimiter, **options: Any) -> None:
        super().__init__(manager, loop=asyncio.get_running_loop(), **options)
        self._limiter = limiter
        self.requests = 0
        self.waits_since: float | None = self._loop.time()
        """Loop time when it began to wait for the next request, or None during a request."""
        self.reading: float | None = None
        """Loop time when it began to read a body, or None."""

    @property
    def is_writing(self) -> bool:
        """Whether the client has yet to read part of its response."""
        transport = self.transport
        return transport is not None and transport.get_write_buffer_size() > 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._limiter.opened(self)
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._limiter.closed(self)
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Respond to malformed HTTP or a failure outside handlers with one line, and close the connection."""
        if status >= 500 and not isinstance(exc, ConnectionError):  # the client went away
            self.log_exception("a request failed", exc_info=exc)
        if request.writer.output_size > 0:
            raise ConnectionError("the response has already started")
        reason = line(Exception(message)) if message else "this request cannot be handled"
        response = reply(status, f"malformed HTTP request: {reason}" if status == 400 else reason)
        response.force_close()
        return response

    def log_exception(self, *args: Any, **options: Any) -> None:
        error, reason = options.get("exc_info"), str(args[0] if args else "")
        if isinstance(error, Exception):
            reason = f"{type(error).__name__}: {line(error)}"
        self._limiter.notices.tell("connection", f"a connection failed: {reason}")


class ConnectionLimiter:
    """Accepts connections up to a limit, and closes connections with silent clients."""

    def __init__(self, notices: Notices) -> None:
        self.notices = notices
        self.limit = most_connections()
        self._connections: set[Connection] = set()
        self._closed = asyncio.Event()
        self.pressed = False
        """Whether clients may be waiting for a connection."""

    def opened(self, connection: Connection) -> None:
        self._connections.add(connection)

    def closed(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self._closed.set()

    async def accept(self, listener: socket.socket, server: web.Server, **options: Any) -> None:
        """Accept connections until cancelled."""
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        while True:
            await self._wait_for_room()
            try:
                client, _ = await loop.sock_accept(listener)
            except ConnectionAbortedError:
                continue
            except OSError as error:
                if error.errno in NO_RESOURCES:
                    self._tell_full(f"no descriptor is left ({os.strerror(error.errno)})")
                else:
                    self.notices.tell("accept", f"could not accept a connection: {error.strerror}")
                await asyncio.sleep(RETRY_S)
                continue
            try:
                await loop.connect_accepted_socket(lambda: Connection(server, self, **options), client)
            except OSError:  # the client has already disconnected
                client.close()

    async def sweep(self) -> None:
        """Close connections whose clients have been silent too long. Runs until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(SWEEP_S)
            now = loop.time()
            for connection in list(self._connections):
                if self._is_silent(connection, now):
                    connection.force_close()

    def _is_silent(self, connection: Connection, now: float) -> bool:
        if connection.waits_since is None:
            return self.pressed and connection.reading is not None and now - connection.reading > PRESSED_S
        timeout_s = KEEP_ALIVE_S if connection.requests else FIRST_REQUEST_S
        if self.pressed and not connection.is_writing:
            timeout_s = min(PRESSED_S, timeout_s)
        return now - connection.waits_since > timeout_s

    async def _wait_for_room(self) -> None:
        """Wait until another connection may be opened."""
        while len(self._connections) >= self.limit:
            self._tell_full(f"{self.limit} connections are open, the most that the descriptor limit allows")
            self.pressed = True
            self._closed.clear()
            await self._closed.wait()
        self.pressed = self.pressed and len(self._connections) > self.limit // 2

    def _tell_full(self, reason: str) -> None:
        self.notices.tell(
            "full", f"{reason}. New ones wait until one closes. Raise the limit with ulimit -n, or use fewer."
        )


@web.middleware
async def counted(request: web.Request, handler: Any) -> web.StreamResponse:
    """Mark the connection as busy during a request."""
    connection = request.protocol
    if not isinstance(connection, Connection):
        return await handler(request)  # type: ignore[no-any-return]
    connection.waits_since = None
    connection.requests += 1
    try:
        return await handler(request)  # type: ignore[no-any-return]
    finally:
        connection.reading = None
        connection.waits_since = asyncio.get_running_loop().time()
