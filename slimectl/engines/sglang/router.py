"""The process of sglang-router, which puts several servers behind one address."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from slimectl.engines.sglang.disaggregation import bootstrap_port
from slimectl.engines.supervisor.server_process import ServerProcess
from slimectl.errors import BackendError
from slimectl.system.event_loop import run_coroutine
from slimectl.system.http import Reply, request

POLL_S = 0.2
REPLY_TIMEOUT_S = 10.0


class Router(ServerProcess):
    """A router process, built by launch.router_server, and the registration of its workers.

    It forwards only generation requests. Aborts, pauses and weights go directly to the workers.
    """

    register_timeout_s = 60.0
    _url = ""

    def start(self, arguments: Sequence[str] = ()) -> str:
        self._url = super().start(arguments)
        return self._url

    def add(self, worker: str, **kind: Any) -> None:
        """Register a worker, and return once the router sends it requests.

        `kind` may have worker_type, for disaggregation, and api_key. Raises BackendError if the router refuses the
        worker.
        """
        if kind.get("worker_type") == "prefill":
            kind = {"bootstrap_port": bootstrap_port(urlsplit(worker).port or 80), **kind}
        run_coroutine(self._add(worker, kind))

    def remove(self, worker: str) -> None:
        """Remove a worker, so that no request goes there. Does nothing if it is not registered."""
        run_coroutine(self._remove(worker))

    async def _add(self, worker: str, kind: dict[str, Any]) -> None:
        deadline = time.monotonic() + self.register_timeout_s
        reply = await self._ask("POST", "/workers", {"url": worker, **kind})
        if reply.status >= 400:
            raise BackendError(f"sglang-router at {self._url} refuses {worker}: {reply.message}")
        while True:
            registered = await self._worker(worker)
            if registered is not None and registered.get("is_healthy"):
                return
            if time.monotonic() > deadline:
                raise BackendError(
                    f"sglang-router at {self._url} did not find {worker} healthy within {self.register_timeout_s:.0f} s"
                )
            await asyncio.sleep(POLL_S)

    async def _remove(self, worker: str) -> None:
        deadline = time.monotonic() + REPLY_TIMEOUT_S
        while (registered := await self._worker(worker)) is not None:
            await self._ask("DELETE", f"/workers/{registered['id']}")
            if time.monotonic() > deadline:
                raise BackendError(f"sglang-router at {self._url} does not remove {worker}")
            await asyncio.sleep(POLL_S)

    async def _worker(self, url: str) -> dict[str, Any] | None:
        reply = await self._ask("GET", "/workers")
        workers = reply.body["workers"] if reply.status == 200 else []
        return next((worker for worker in workers if worker["url"].rstrip("/") == url.rstrip("/")), None)

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Reply:
        """Send a request, and once more if the connection is lost: a router that is being restarted drops it."""
        try:
            return await request(method, self._url + path, timeout_s=REPLY_TIMEOUT_S, body=body)
        except BackendError:
            await asyncio.sleep(POLL_S)
            return await request(method, self._url + path, timeout_s=REPLY_TIMEOUT_S, body=body)
