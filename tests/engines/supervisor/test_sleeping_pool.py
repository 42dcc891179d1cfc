"""Servers that sleep are not checked, and one that died in its sleep is restarted by the push after it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from executors.ray_cases import http_server

from slimectl.engines.supervisor.server_pool import ServerPool, WatchOptions
from slimectl.engines.weight_sync.base import WeightSynchronizer
from slimectl.errors import BackendError
from slimectl.types import Metrics


class Line:
    """A transport to the server of a pool. Whatever it asks of a dead server fails."""

    weight_version = "1"

    def __init__(self, pool: ServerPool, server: Any) -> None:
        self.pool, self.server, self.asked = pool, server, []

    def ask(self, what: str) -> None:
        self.asked.append(what)
        if not self.server.alive():
            raise BackendError("engine cannot be reached")

    def sleep(self) -> None:
        self.ask("sleep")

    def wake(self) -> None:
        self.ask("wake")

    def push(self) -> Metrics:
        self.ask("push")
        return {}


@pytest.mark.parametrize("starts_asleep", [False, True])
def test_a_server_that_died_in_its_sleep_is_restarted_by_the_next_push(tmp_path: Path, starts_asleep: bool):
    server = http_server(tmp_path / "server.log")
    pool = ServerPool(lambda _: server, 1, watch=WatchOptions(watches=False, timeout_s=1.0))
    line: Any = Line(pool, server)
    sync = WeightSynchronizer(line, line, pool=pool, asleep=starts_asleep)
    pool.start()
    try:
        pool.rest(starts_asleep)
        sync.sleep()
        sync.sleep()
        pid = server.pid()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        while server.alive():
            time.sleep(0.01)
        pool.settle()
        assert pool.restarts == 0  # a restarted server would take the memory that the trainer uses
        sync.wake()
        sync.wake()
        assert sync.version is None
        sync.push()
        assert (pool.restarts, sync.version) == (1, "1")
        assert line.asked == [*([] if starts_asleep else ["sleep"]), "wake", "push", "push"]
    finally:
        pool.close()
