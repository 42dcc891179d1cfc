"""Members of a server pool, and their health checks."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from slimectl.errors import BackendError
from slimectl.system.event_loop import run_coroutine
from slimectl.system.http import get

ANSWER_S = 30.0
RETRY_S = 0.5
"""Seconds between health requests to a server that failed one, until the timeout."""


class Server(Protocol):
    """A process that serves HTTP. The object may live on another machine."""

    def start(self) -> str: ...

    def alive(self) -> bool: ...

    def death(self) -> str: ...

    def stop(self) -> None: ...


class RouterProcess(Server, Protocol):
    """A router, which has one address for all servers."""

    def add(self, worker: str, **kind: Any) -> None: ...

    def remove(self, worker: str) -> None: ...


@dataclass(slots=True)
class RunningServer:
    """A server that was started elsewhere. It is neither restarted nor stopped from here."""

    url: str
    has_left: bool = False

    def start(self) -> str:
        return self.url

    def alive(self) -> bool:
        """Return whether it is in use. Its process cannot be seen from here."""
        return not self.has_left

    def death(self) -> str:
        return "it does not answer"

    def stop(self) -> None:
        """End health checks that are under way. The server continues."""
        self.has_left = True


@dataclass(slots=True, eq=False)
class Member:
    number: int
    server: Server
    kind: Mapping[str, Any] = field(default_factory=dict)
    """Options for registration with the router."""

    url: str = ""
    state: str = "starting"
    """starting, loading weights, ready, restarting or leaving."""

    weight_version: str | None = None
    """Weights of the last push, if there was one."""

    routed: bool = False
    """Whether it is registered with the router."""

    @property
    def up(self) -> bool:
        """Whether it accepts requests: it responds and has the current weights."""
        return self.state == "ready"

    @property
    def leaves(self) -> bool:
        return self.state == "leaving"

    @property
    def is_ours(self) -> bool:
        """Whether it was started here, so that it is restarted."""
        return not isinstance(self.server, RunningServer)


async def healthy(members: Sequence[Member], *, timeout_s: float) -> list[bool]:
    """Return for each member whether it is alive and responds to /health with 200 in time."""
    return await asyncio.gather(*(_healthy(member, timeout_s) for member in members))


def is_ready(member: Member) -> bool:
    """Whether a server has weights. Raises BackendError if it does not respond."""
    return run_coroutine(get(f"{member.url}/health", timeout_s=ANSWER_S)).status == 200


async def _healthy(member: Member, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while (left_s := deadline - time.monotonic()) > 0 and await asyncio.to_thread(is_alive, member.server):
        with contextlib.suppress(BackendError):
            reply = await get(f"{member.url}/health", timeout_s=left_s)
            waits = isinstance(reply.body, dict) and "waiting" in str(reply.body.get("status"))
            if reply.status == 200 or waits:  # `slimectl serve` before its first push
                return True
        await asyncio.sleep(min(RETRY_S, left_s))
    return False


def is_alive(server: Server) -> bool:
    """Whether a server is alive. It is not if its host is gone."""
    try:
        return server.alive()
    except Exception:
        return False


def failure_reason(server: Server) -> str:
    """Return why a server died, or why this cannot be determined."""
    try:
        return server.death()
    except Exception as error:
        return str(error)


def stop_quietly(server: Server) -> None:
    with contextlib.suppress(Exception):  # its host is gone
        server.stop()
