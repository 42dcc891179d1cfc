"""The local, read-only server of a view: the page's files, and the answers to its questions.

Every address begins with a random token, so that other users of the machine and pages of other sites cannot read
anything. A Host header that is not a loopback name is refused (DNS rebinding).
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import signal
from collections.abc import AsyncIterator, Callable
from importlib.resources import files
from socket import socket

from aiohttp import web

from slimectl.cli.viewer.api import ViewApi, json_text
from slimectl.errors import SlimectlError

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
PAGE_FILES = files("slimectl.cli.viewer") / "page"
TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml", "txt": "text/plain"}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
COMPRESSED_CHARS = 1 << 20
"""Minimum length of a compressed answer. A browser on another machine may read it through a tunnel."""
INDEX_SLICE_S = 0.2
"""Seconds for which an index grows in the background before the server can end."""


def application(api: ViewApi, token: str) -> web.Application:
    """Return the application, whose pages are below /TOKEN/."""

    async def page(request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"] or "index.html"
        kind = name.rpartition(".")[2]
        resource = PAGE_FILES / name
        if "/" in name or kind not in TYPES or not resource.is_file():
            return _error(404, f"{name[:80]}: no such page")
        return web.Response(body=resource.read_bytes(), content_type=TYPES[kind], charset="utf-8")

    async def question(request: web.Request) -> web.StreamResponse:
        name, parameters = request.match_info["question"], dict(request.query)
        try:
            text = await asyncio.to_thread(lambda: json_text(api.answer(name, parameters)))
        except SlimectlError as error:
            return _error(400, str(error))
        except OSError as error:
            return _error(400, f"{error.filename}: {error.strerror or error}")
        response = web.Response(text=text, content_type="application/json")
        if len(text) > COMPRESSED_CHARS:
            response.enable_compression()
        return response

    @web.middleware
    async def admitted(request: web.Request, handler: Callable) -> web.StreamResponse:  # type: ignore[type-arg]
        refusal = _refusal(request, token)
        response: web.StreamResponse = _error(403, refusal) if refusal else await _without_exceptions(request, handler)
        response.headers.update(HEADERS)
        return response

    app = web.Application(middlewares=[admitted])
    app.router.add_get("/{token}/api/{question}", question)
    app.router.add_get("/{token}/{name:[^/]*}", page)
    return app


async def _without_exceptions(request: web.Request, handler: Callable) -> web.StreamResponse:  # type: ignore[type-arg]
    try:
        response: web.StreamResponse = await handler(request)
    except web.HTTPException as error:
        return _error(error.status, f"{request.path[:80]}: {error.reason}")
    return response


def _refusal(request: web.Request, token: str) -> str:
    """Return why a request is refused, or "" if it is accepted."""
    hosts = request.headers.getall("Host", [])
    name = hosts[0].rpartition(":")[0] or hosts[0] if len(hosts) == 1 else ""
    if name.lower() not in LOOPBACK:
        return f"Host: {name[:80]!a} is not a name of this server. Open the address that slimectl view printed"
    if request.headers.get("Sec-Fetch-Site", "none") not in ("same-origin", "none"):
        return "another site may not read this view. Open the address that slimectl view printed"
    first = request.path.lstrip("/").partition("/")[0]
    if not hmac.compare_digest(first.encode(), token.encode()):
        return "the address lacks the token of this view. Open the address that slimectl view printed"
    return ""


def _error(status: int, message: str) -> web.Response:
    return web.Response(status=status, text=json.dumps({"error": message}), content_type="application/json")


@contextlib.asynccontextmanager
async def running(api: ViewApi, token: str, listening: socket) -> AsyncIterator[None]:
    """Run the server during the block. Indexes of large files grow meanwhile."""
    runner = web.AppRunner(application(api, token), access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    await web.SockSite(runner, listening).start()
    growing = asyncio.create_task(_grow_indexes(api))
    try:
        yield
    finally:
        growing.cancel()
        await runner.cleanup()


async def _grow_indexes(api: ViewApi) -> None:
    """Extend the open indexes until cancelled."""
    while True:
        for index in api.library.open_indexes():
            if not index.complete:
                await asyncio.to_thread(index.extend, INDEX_SLICE_S)
        await asyncio.sleep(INDEX_SLICE_S)


async def serve(api: ViewApi, token: str, listening: socket, *, ready: Callable[[], None]) -> int:
    """Serve until SIGINT, SIGTERM or SIGHUP. Return the number of the signal."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()

    def end(number: int) -> None:
        if not ended.done():
            ended.set_result(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, end, int(number))
    async with running(api, token, listening):
        ready()
        loop.run_in_executor(None, api.preload)
        return await ended
