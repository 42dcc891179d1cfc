"""The HTTP server around an engine: its routes, its start, its end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

from aiohttp import web

from slimectl.engines.embedded.engine import EmbeddedEngine
from slimectl.engines.serve import control, generate, openai, weights
from slimectl.engines.serve.answers import Desk
from slimectl.engines.serve.refusals import explained
from slimectl.engines.serve.service import SERVICE, Served, Service, Streaming
from slimectl.engines.serve.thread import EngineThread
from slimectl.errors import BackendError, SettingsError

LONGEST_BODY = 32 << 20
BACKLOG = 4096
GRACE_S = 0.5
"""How long open connections may take to hear that all ends."""

EITHER, GET, POST = ("GET", "POST"), ("GET",), ("POST",)
ROUTES = {
    "/ping": (control.ping, GET),
    "/health": (control.health, GET),
    "/ready": (control.health, GET),
    "/health_generate": (control.health_generate, GET),
    "/model_info": (control.model_info, GET),
    "/get_model_info": (control.model_info, GET),
    "/server_info": (control.server_info, GET),
    "/get_server_info": (control.server_info, GET),
    "/v1/models": (control.models, GET),
    "/v1/models/{name:.+}": (control.model, GET),
    "/v1/loads": (control.loads, GET),
    "/generate": (generate.generate, ("POST", "PUT")),
    "/v1/completions": (openai.completions, POST),
    "/v1/chat/completions": (openai.chat, POST),
    "/abort_request": (control.abort_request, POST),
    "/pause_generation": (control.pause_generation, POST),
    "/continue_generation": (control.continue_generation, POST),
    "/flush_cache": (control.flush_cache, EITHER),
    "/release_memory_occupation": (control.release_memory_occupation, EITHER),
    "/resume_memory_occupation": (control.resume_memory_occupation, EITHER),
    "/begin_weight_update": (weights.begin_update, POST),
    "/end_weight_update": (weights.end_update, POST),
    "/update_weights_from_disk": (weights.update_from_disk, POST),
    "/update_weights_from_tensor": (weights.update_from_tensor, POST),
    "/update_weights_from_distributed": (weights.update_from_distributed, POST),
    "/init_weights_update_group": (weights.init_group, POST),
    "/destroy_weights_update_group": (weights.destroy_group, POST),
    "/update_weight_version": (weights.update_version, POST),
    "/weights_checker": (weights.check, EITHER),
}


def bound(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 is any free one. Raises BackendError if it is taken, SettingsError for a bad host."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    except (socket.gaierror, UnicodeError):
        raise SettingsError(f"--host: {host} is no address; give one of this machine, or 0.0.0.0 for all") from None
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise BackendError(f"{host}:{port}: address already in use; try --port {_free_port(host)}") from None
        why = os.strerror(error.errno or 0).lower()
        raise BackendError(f"{host}:{port}: cannot be listened on: {why}; give another --host or --port") from None


def _free_port(host: str) -> int:
    with bound(host, 0) as probe:
        return int(probe.getsockname()[1])


@contextlib.asynccontextmanager
async def running(
    engine: EmbeddedEngine, served: Served, listening: socket.socket, *, streaming: Streaming = Streaming()
) -> AsyncIterator[Service]:
    """A server that answers within the block."""
    thread = EngineThread(engine)
    service = Service(served, thread, Desk(thread, served.tokenizer), streaming=streaming)
    app = web.Application(client_max_size=LONGEST_BODY, middlewares=[explained])
    app[SERVICE] = service
    for path, (handler, methods) in ROUTES.items():
        for method in methods:
            app.router.add_route(method, path, handler)
    # A client that goes away cancels its handler, and what it asked for ends.
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=GRACE_S)
    await runner.setup()
    try:
        await web.SockSite(runner, listening, backlog=BACKLOG).start()
        yield service
    finally:
        thread.end_all()
        await runner.cleanup()
        service.clean = thread.stop() and not service.groups


async def serve(
    engine: EmbeddedEngine,
    served: Served,
    listening: socket.socket,
    *,
    load: bool,
    streaming: Streaming,
    ready: Callable[[], None],
) -> tuple[int, bool]:
    """Answer until SIGINT or SIGTERM comes: (which of them, whether no thread was left behind).

    With `load` the weights of the folder are read first, else they are waited for; `ready` is called then. Raises
    CheckpointError if they cannot be read.
    """
    stopped: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, _settle, stopped, int(number))
    async with running(engine, served, listening, streaming=streaming) as service:
        if load:
            loading: asyncio.Future[None] = asyncio.ensure_future(
                service.thread.call(lambda: engine.load_weights(served.read(served.folder), version=served.version))
            )
            both: list[asyncio.Future[Any]] = [loading, stopped]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                loading.result()
        if not stopped.done():
            service.status = "they were lost to a failed update" if load else "waiting for weights"
            ready()
        await stopped
    return stopped.result(), service.clean


def _settle(future: asyncio.Future[int], number: int) -> None:
    if not future.done():
        future.set_result(number)
