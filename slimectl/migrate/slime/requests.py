"""Requests to servers, running of coroutines, and free ports."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import os
import random
import socket
from collections.abc import Coroutine, Mapping
from typing import Any

from slimectl.errors import BackendError
from slimectl.system.http import PASSING, backoff_s, request
from slimectl.system.listening import own_address

TIMEOUT_S = 14400.0
"""An address for finding this machine's own address on the route to it. No packet is sent."""


async def post(url: str, payload: Any, max_retries: int = 60, headers: Mapping[str, str] | None = None) -> Any:
    """Send a POST request and return the JSON of the response. Raises BackendError after `max_retries` failures."""
    return await _retried("POST", url, payload or {}, max_retries, headers)


async def get(url: str, max_retries: int = 60, headers: Mapping[str, str] | None = None) -> Any:
    """Send a GET request like `post`."""
    return await _retried("GET", url, None, max_retries, headers)


async def _retried(method: str, url: str, body: Any, max_retries: int, headers: Mapping[str, str] | None) -> Any:
    for attempt in range(1, max_retries + 1):
        try:
            reply = await request(method, url, timeout_s=TIMEOUT_S, body=body, headers=headers)
            if reply.status < 400:
                return reply.body
            error = BackendError(f"{url}: {reply.status} {reply.message}")
            if reply.status not in PASSING:
                break
        except BackendError as failure:
            error = failure
        await asyncio.sleep(backoff_s(attempt, first_s=0.5, longest_s=5.0))
    raise error


def init_http_client(args: Any) -> None:
    """Do nothing: requests here need no client to be created first."""


def get_rollout_num_engines(args: Any) -> int:
    """Return the number of engines, or the number of addresses if the engines are started elsewhere."""
    engine = args.engine
    return len(engine.url) or int(engine.num_engines)


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to completion, even if an event loop is already running."""
    context = contextvars.copy_context()
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(context.run, asyncio.run, coroutine).result()


def is_port_available(port: int) -> bool:
    """Return whether a server could listen on a port of this machine."""
    with socket.socket() as candidate:
        candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            candidate.bind(("", port))
            candidate.listen(1)
        except (OSError, OverflowError):
            return False
    return True


def find_available_port(base_port: int) -> int:
    """Return a free port 100 to 1000 above `base_port`, or close to that range."""
    return get_free_port(base_port + random.randint(100, 1000))


def get_free_port(start_port: int = 10_000, consecutive: int = 1) -> int:
    """Return the first of `consecutive` free ports, searching from `start_port`. Raises OSError if there are none."""
    for port in range(start_port, 65_536 - consecutive):
        if all(is_port_available(port + offset) for offset in range(consecutive)):
            return port
    raise OSError(f"no {consecutive} free ports from {start_port} on")


def get_host_info() -> tuple[str, str]:
    """Return the name and the address of this machine. SLIME_HOST_IP in the environment overrides the address."""
    return socket.gethostname(), os.environ.get("SLIME_HOST_IP") or own_address()
