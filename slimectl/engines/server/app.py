"""The HTTP server around an engine: routes, startup and shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from aiohttp import web

from slimectl.data.token_log_probs import TokenLogProb
from slimectl.engines.embedded.engine import EmbeddedEngine
from slimectl.engines.server import admin, openai_api, sglang_api, weight_updates
from slimectl.engines.server.access import ACCESS, GUARD, Access, admitted
from slimectl.engines.server.connections import KEEP_ALIVE_S, ConnectionLimiter, counted, raise_descriptor_limit
from slimectl.engines.server.engine_thread import EngineThread
from slimectl.engines.server.errors import NOTICES, Notices, error_middleware, line
from slimectl.engines.server.log_probs import prompt_scores
from slimectl.engines.server.requests import RequestTable
from slimectl.engines.server.schema import BODIES, LONGEST_BODY, BodyMemory
from slimectl.engines.server.state import SERVICE, ServerConfig, Service
from slimectl.protocols import OnTokens
from slimectl.types import Completion, SamplingParams

GRACE_S = 0.5
"""Seconds that open connections get to finish at shutdown."""
LOOK_S = 0.25
"""Seconds between checks for requests that have waited too long."""


class Generate(Protocol):
    """Continues tokens. `on_tokens` is called with new tokens, in the engine's thread."""

    def __call__(
        self, tokens: list[int], params: SamplingParams, *, on_tokens: OnTokens | None = None
    ) -> Awaitable[Completion]: ...


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

GET, POST = ("GET",), ("POST",)
ASKING, STEERING = Access.API_KEY, Access.ADMIN_KEY
ROUTES = {
    "/ping": (admin.ping, GET, Access.OPEN),
    "/health": (admin.health, GET, Access.OPEN),
    "/ready": (admin.health, GET, Access.OPEN),
    "/health_generate": (admin.health_generate, GET, Access.OPEN),
    "/model_info": (admin.model_info, GET, ASKING),
    "/get_model_info": (admin.model_info, GET, ASKING),
    "/server_info": (admin.server_info, GET, ASKING),
    "/get_server_info": (admin.server_info, GET, ASKING),
    "/v1/models": (admin.models, GET, ASKING),
    "/v1/models/{name:.+}": (admin.model, GET, ASKING),
    "/v1/loads": (admin.loads, GET, ASKING),
    "/generate": (sglang_api.generate, ("POST", "PUT"), ASKING),
    "/v1/completions": (openai_api.completions, POST, ASKING),
    "/v1/chat/completions": (openai_api.chat, POST, ASKING),
    "/abort_request": (admin.abort_request, POST, STEERING),
    "/pause_generation": (admin.pause_generation, POST, STEERING),
    "/continue_generation": (admin.continue_generation, POST, STEERING),
    "/flush_cache": (admin.flush_cache, POST, STEERING),
    "/release_memory_occupation": (admin.release_memory_occupation, POST, STEERING),
    "/resume_memory_occupation": (admin.resume_memory_occupation, POST, STEERING),
    "/begin_weight_update": (weight_updates.begin_update, POST, STEERING),
    "/end_weight_update": (weight_updates.end_update, POST, STEERING),
    "/update_weights_from_disk": (weight_updates.update_from_disk, POST, STEERING),
    "/update_weights_from_tensor": (weight_updates.update_from_tensor, POST, STEERING),
    "/update_weights_from_distributed": (weight_updates.update_from_distributed, POST, STEERING),
    "/init_weights_update_group": (weight_updates.init_group, POST, STEERING),
    "/destroy_weights_update_group": (weight_updates.destroy_group, POST, STEERING),
    "/update_weight_version": (weight_updates.update_version, POST, STEERING),
    "/weights_checker": (weight_updates.check, POST, STEERING),
}


Score = Callable[[list[int], int], Awaitable[Sequence[TokenLogProb]]]
"""Returns the log-probabilities of a prompt's tokens, with the given number of likeliest tokens at each position."""


class ApiExtension(Protocol):
    """Additional APIs over the engine. Their paths replace the server's own."""

    def routes(self, generate: Generate, score: Score) -> Iterable[tuple[str, str, Handler]]:
        """Return the method, path and handler of each route."""
        ...

    def close(self) -> None:
        """Clean up after the last request."""
        ...


@contextlib.asynccontextmanager
async def running(
    engine: EmbeddedEngine,
    served: ServerConfig,
    listening: socket.socket,
    *,
    extension: ApiExtension | None = None,
) -> AsyncIterator[Service]:
    """Run the server inside the `async with` block."""
    thread, notices = EngineThread(engine), Notices()
    service = Service(served, thread, RequestTable(thread, served.tokenizer), streaming=served.streaming)
    asyncio.get_running_loop().set_exception_handler(lambda _, context: notices.tell("loop", _describe(context)))
    app = web.Application(
        client_max_size=LONGEST_BODY, middlewares=[counted, error_middleware, admitted, *served.middlewares]
    )
    app[SERVICE], app[GUARD], app[NOTICES], app[BODIES] = service, served.guard, notices, BodyMemory()
    access_of: dict[object, Access] = {handler: access for handler, _, access in ROUTES.values()}
    app[ACCESS] = access_of
    replaced: set[tuple[str, str]] = set()
    score = partial(prompt_scores, service)
    for method, path, further in extension.routes(service.generate, score) if extension is not None else ():
        reading = partial(_with_body, further)
        app.router.add_route(method, path, reading)
        access_of[reading] = ASKING
        replaced.add((method, path))
    for path, (handler, methods, _) in ROUTES.items():
        for method in methods:
            if (method, path) not in replaced:
                app.router.add_route(method, path, handler)
    # If a client disconnects, its handler is cancelled and its sequences end.
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=GRACE_S)
    await runner.setup()
    assert runner.server is not None
    limiter = ConnectionLimiter(notices)
    options: dict[str, Any] = {"access_log": None, "keepalive_timeout": KEEP_ALIVE_S, "lingering_time": 2.0}
    accepting = limiter.accept(listening, runner.server, auto_decompress=False, **options)
    work = (accepting, limiter.sweep(), _end_waits(service, served.pause_timeout_s))
    tasks = [asyncio.create_task(coroutine) for coroutine in work]
    try:
        yield service
    finally:
        for task in tasks:
            task.cancel()
        listening.close()
        thread.end_all()
        await runner.cleanup()
        if extension is not None:
            extension.close()
        service.clean = thread.stop() and not service.groups


async def _with_body(handler: Handler, request: web.Request) -> web.StreamResponse:
    """Read the body within the server's limits, then call the handler."""
    async with request.app[BODIES].body(request) as body:
        request._read_bytes = body
    return await handler(request)


async def _end_waits(service: Service, longest_s: float) -> None:
    """Fail requests that wait too long for a paused engine. Runs until cancelled."""
    while True:
        await asyncio.sleep(LOOK_S)
        service.requests.end_waits(longest_s)


def _describe(context: Mapping[str, Any]) -> str:
    """Describe an unhandled asyncio error in one line."""
    error = context.get("exception")
    return f"{context.get('message')}: {line(error)}" if isinstance(error, Exception) else str(context.get("message"))


async def serve(
    engine: EmbeddedEngine,
    served: ServerConfig,
    listening: socket.socket,
    *,
    load: bool,
    ready: Callable[[], None],
    extension: ApiExtension | None = None,
) -> tuple[int, bool]:
    """Serve until SIGINT, SIGTERM or SIGHUP. Return (signal number, whether all threads have ended).

    With `load`, the weights in the folder are loaded first. Otherwise the server waits for a push. `ready` is called
    when weights are loaded, or at once without `load`. Raises CheckpointError if weights cannot be read.
    """
    raise_descriptor_limit()
    stopped: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # ignored under nohup
            asyncio.get_running_loop().add_signal_handler(number, _settle, stopped, int(number))
    async with running(engine, served, listening, extension=extension) as service:
        if load:
            loading: asyncio.Future[None] = asyncio.ensure_future(service.thread.call(service.load_folder))
            futures: list[asyncio.Future[Any]] = [loading, stopped]
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                loading.result()
        if not stopped.done():
            service.status = "lost in a failed update" if load else "waiting for weights"
            ready()
        await stopped
    return stopped.result(), service.clean


def _settle(future: asyncio.Future[int], number: int) -> None:
    if not future.done():
        future.set_result(number)
