"""Process of sglang-router in front of several servers: one address, and a policy that selects a server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from slimectl.engines.sglang.disaggregation import bootstrap_port
from slimectl.engines.supervisor.server_process import ServerProcess
from slimectl.errors import BackendError
from slimectl.transport.event_loop import run_coroutine
from slimectl.transport.http import Reply, request

POLL_S = 0.2
REPLY_TIMEOUT_S = 10.0


class Router(ServerProcess):
    """Router process, as launch.router_server makes it, and the workers behind it.

    It forwards generation requests only: aborts, pauses and weights go to the workers themselves.
    """

    register_timeout_s = 60.0
    _url = ""

    def start(self, arguments: Sequence[str] = ()) -> str:
        self._url = super().start(arguments)
        return self._url

    def add(self, worker: str, **kind: Any) -> None:
        """Register a worker; returns when it gets requests. `kind`: worker_type, for disaggregation, and api_key.

        Raises BackendError if the router refuses it.
        """
        if kind.get("worker_type") == "prefill":
            kind = {"bootstrap_port": bootstrap_port(urlsplit(worker).port or 80), **kind}
        run_coroutine(self._add(worker, kind))

    def remove(self, worker: str) -> None:
        """Remove a worker, so that no request goes there; does nothing if it is not registered."""
        run_coroutine(self._remove(worker))

    async def _add(self, worker: str, kind: dict[str, Any]) -> None:
        deadline = time.monotonic() + self.register_timeout_s
        reply = await self._ask("POST", "/workers", {"url": worker, **kind})
        if reply.status >= 400:
            raise BackendError(f"sglang-router at {self._url} refuses {worker}: {reply.words}")
        while True:
            registered = await self._worker(worker)
            if registered is not None and registered.get("is_healthy"):
                return
            if time.monotonic() > deadline:
                raise BackendError(
                    f"sglang-router at {self._url} has not found {worker} healthy in {self.register_timeout_s:.0f} s"
                )
            await asyncio.sleep(POLL_S)

    async def _remove(self, worker: str) -> None:
        deadline = time.monotonic() + REPLY_TIMEOUT_S
        while (registered := await self._worker(worker)) is not None:
            await self._ask("DELETE", f"/workers/{registered['id']}")
            if time.monotonic() > deadline:
                raise BackendError(f"sglang-router at {self._url} does not let go of {worker}")
            await asyncio.sleep(POLL_S)

    async def _worker(self, url: str) -> dict[str, Any] | None:
        reply = await self._ask("GET", "/workers")
        workers = reply.body["workers"] if reply.status == 200 else []
        return next((worker for worker in workers if worker["url"].rstrip("/") == url.rstrip("/")), None)

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Reply:
        return await request(method, self._url + path, timeout_s=REPLY_TIMEOUT_S, body=body)
