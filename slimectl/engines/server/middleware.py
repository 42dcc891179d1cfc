"""Loads user-defined middlewares for the server."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from slimectl.engines.server.errors import Handler
from slimectl.errors import HookError
from slimectl.plugins.callables import load_callable

SETTING = "engine.middleware_paths"


def middlewares(paths: Sequence[str]) -> tuple[Any, ...]:
    """Return aiohttp middlewares for the functions at these paths, the first one outermost. Raises HookError."""
    return tuple(map(_middleware, paths))


def _middleware(path: str) -> Any:
    function = load_callable(path, setting=SETTING)
    if not inspect.iscoroutinefunction(function) or list(inspect.signature(function).parameters) != [
        "request",
        "handler",
    ]:
        raise HookError(
            f"{SETTING}: {path}: is not an aiohttp middleware. Define it as `async def NAME(request, handler)`. "
            f"Starlette and FastAPI middlewares, with (app, router) or (request, call_next), are not supported."
        )

    @web.middleware
    async def call(request: web.Request, handler: Handler) -> web.StreamResponse:
        async def proceed(request: web.Request, *, body: Any = None) -> web.StreamResponse:
            """Call the next handler, optionally with another JSON body."""
            if body is not None:
                request._read_bytes = json.dumps(body).encode()  # the next request.read() returns this
            return await handler(request)

        response = await function(request, proceed)
        if not isinstance(response, web.StreamResponse):
            raise TypeError(f"{SETTING}: {path} returned {type(response).__name__}, not a response of aiohttp.web")
        return response

    return call
