"""Middlewares of the user's own around the routes of a server."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from slimectl.engines.server.errors import Handler
from slimectl.errors import HookError
from slimectl.user_code import load_callable

SETTING = "engine.middleware_paths"


def middlewares(paths: Sequence[str]) -> tuple[Any, ...]:
    """Return aiohttp middlewares of the functions at these paths, the first one outermost. Raises HookError."""
    return tuple(map(_middleware, paths))


def _middleware(path: str) -> Any:
    function = load_callable(path, setting=SETTING)
    if not inspect.iscoroutinefunction(function) or list(inspect.signature(function).parameters) != [
        "request",
        "handler",
    ]:
        raise HookError(
            f"{SETTING}: {path}: is not a middleware of aiohttp. Write it as `async def NAME(request, handler)`. A "
            f"middleware of Starlette or FastAPI, with (app, router) or (request, call_next), runs in no server here."
        )

    @web.middleware
    async def call(request: web.Request, handler: Handler) -> web.StreamResponse:
        async def proceed(request: web.Request, *, body: Any = None) -> web.StreamResponse:
            """Call the next handler, with another JSON value in place of the body."""
            if body is not None:
                request._read_bytes = json.dumps(body).encode()  # what request.read() returns from now on
            return await handler(request)

        response = await function(request, proceed)
        if not isinstance(response, web.StreamResponse):
            raise TypeError(f"{SETTING}: {path} returned {type(response).__name__}, not a response of aiohttp.web")
        return response

    return call
