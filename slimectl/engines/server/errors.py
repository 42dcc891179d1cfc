"""Errors of the HTTP API, and rate-limited warnings."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from slimectl.chats.messages import MessageError
from slimectl.errors import BackendError, SlimectlError, first_line
from slimectl.system.stdio import logger

QUIET_S = 30.0
"""Seconds after which a repeated warning of one kind is logged again."""


class Notices:
    """Logs the first warning of each kind. Repeats are logged only after `QUIET_S` without one."""

    def __init__(self, write: Callable[[str], None] = logger.warning) -> None:
        self._write = write
        self._last: dict[str, float] = {}

    def tell(self, kind: str, text: str) -> None:
        now, last = time.monotonic(), self._last.get(kind)
        self._last[kind] = now
        if last is None or now - last > QUIET_S:
            self._write(f"slimectl serve: {text}")


NOTICES: web.AppKey[Notices] = web.AppKey("notices", Notices)


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
LONGEST = 300
PAUSED = "engine_paused"
"""Error type for a request whose engine stays paused. The client may retry."""
HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": "1"}}


class RequestError(Exception):
    """Raised to reject a request. `field` is the field to correct."""

    def __init__(self, message: str, *, status: int = 400, field: str | None = None, kind: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.field = field
        self.kind = kind


@web.middleware
async def error_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Convert every failure to a one-line JSON error, so that nothing else reaches the client."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        return reply(error.status, _http_message(error, request))
    except (RequestError, MessageError, SlimectlError) as error:
        return reply(
            status_of(error), line(error), field=getattr(error, "field", None), kind=getattr(error, "kind", None)
        )
    except ConnectionError:
        raise  # the client went away
    except Exception as error:
        path = request.path[:LONGEST]
        request.app[NOTICES].tell("surprise", f"{path!a}: {type(error).__name__}: {line(error)}")
        return reply(500, f"{type(error).__name__}: {line(error)}")


def status_of(error: Exception) -> int:
    if isinstance(error, RequestError):
        return error.status
    if isinstance(error, BackendError):
        return 503
    return 400 if type(error) is not SlimectlError else 500


def reply(status: int, message: str, *, field: str | None = None, kind: str | None = None) -> web.Response:
    """Build an error response in the format of both APIs. Clients of weight updates also check `success`."""
    answer = body(status, message, field=field, kind=kind)
    return web.json_response(answer, status=status, headers=HEADERS.get(status))


def body(status: int, message: str, *, field: str | None = None, kind: str | None = None) -> dict[str, Any]:
    kind = kind or ("invalid_request_error" if status < 500 else "server_error")
    message = "".join(letter if letter.isprintable() else " " for letter in message)
    error = {"message": message, "type": kind, "param": field, "code": status}
    return {"success": False, "message": message, "error": error}


def line(error: Exception) -> str:
    """Return the first line of an error, or its type if it has no message."""
    return first_line(error, LONGEST)


def _http_message(error: web.HTTPException, request: web.Request) -> str:
    if error.status == 404:
        return f"{request.path[:LONGEST]}: no such endpoint. See docs/reference/http-api.md for a list."
    if isinstance(error, web.HTTPMethodNotAllowed):
        return f"{request.path[:LONGEST]}: {request.method} is not one of {', '.join(sorted(error.allowed_methods))}"
    return error.reason
