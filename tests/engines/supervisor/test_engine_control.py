"""Servers that join and leave a pool, on request by files in a run's folder; the servers are small real ones."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_server import server

from slimectl.data.engine_requests import STATE, EngineReply, EngineRequest, ask, read_state, withdraw
from slimectl.data.run_dir import RunDir
from slimectl.engines.supervisor import control, server_pool
from slimectl.engines.supervisor.control import EngineControl
from slimectl.engines.supervisor.health import RunningServer
from slimectl.engines.supervisor.server_pool import ServerPool, WatchOptions
from slimectl.engines.supervisor.server_process import ServerProcess
from slimectl.errors import BackendError, SettingsError

WATCH = WatchOptions(interval_s=600, timeout_s=2)


class Scene:
    """A pool of two servers in a run's folder, and what was announced, restored and counted."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.servers: dict[int, ServerProcess] = {}
        self.events: list[tuple[str, Any]] = []
        self.requests: dict[str, int] = {}
        self.obstacle = ""
        self.pool = ServerPool(self.make, 2, watch=WATCH)
        self.pool.start()
        self.pool.restore, self.pool.announce = self.restore, self.announce
        self.pool.in_flight, self.pool.release = lambda urls: self.requests, lambda i: self.note("released", i)
        self.control = EngineControl(run, self.pool, check=self.check)
        self.control.start()

    def make(self, i: int) -> ServerProcess:
        self.servers[i] = server(self.run, name=f"engine-{i}")
        return self.servers[i]

    def note(self, *event: Any) -> None:
        self.events.append(event)

    def restore(self, url: str) -> str:
        self.note("restored", url)
        return "7"

    def announce(self, addresses: Any, workers: Any, leaving: Any, numbers: dict[str, int]) -> None:
        self.numbers = numbers
        self.note("announced", (list(workers), list(leaving)))

    def check(self, url: str | None) -> None:
        if self.obstacle:
            raise SettingsError(self.obstacle)

    def ask(self, action: Any, count: int = 1, *engines: str, drain_s: float = 0.0) -> EngineReply:
        """Ask as the command does, and return the reply when all is done."""
        name = ask(self.run, EngineRequest(action, count, engines, drain_s=drain_s))
        return self.reply(name)

    def reply(self, name: str) -> EngineReply:
        deadline = time.monotonic() + 60
        while (reply := read_state(self.run).replies.get(name, EngineReply(True))).open:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return reply

    def rows(self) -> list[tuple[int, str, str | None]]:
        self.ask("list")
        return [(row.engine, row.state, row.weight_version) for row in read_state(self.run).engines]

    def close(self) -> None:
        self.control.close()
        self.pool.close()


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setattr(control, "LOOK_S", 0.01)
    monkeypatch.setattr(server_pool, "DRAIN_LOOK_S", 0.01)
    made = Scene(tmp_path)
    yield made
    made.close()


def test_an_engine_joins_with_weights_and_leaves_after_its_requests(scene: Scene):
    assert scene.rows() == [(0, "ready", None), (1, "ready", None)]
    first, second = scene.pool.urls
    joined = scene.ask("add")
    third = scene.pool.urls[2]
    assert joined.done == [f"engine 2 joined at {third} with weights 7"]
    assert scene.events == [("restored", third), ("announced", ([first, second, third], []))]
    assert scene.rows() == [(0, "ready", None), (1, "ready", None), (2, "ready", "7")]

    scene.requests[first] = 3
    name = ask(scene.run, EngineRequest("remove", engines=["0"], drain_s=600))
    while not scene.pool.members[0].leaves:
        time.sleep(0.01)
    assert scene.events[-1] == ("announced", ([second, third], [first]))
    assert scene.rows()[0] == (0, "leaving", None)
    assert scene.servers[0].alive()
    scene.requests.clear()
    assert scene.reply(name).done == ["engine 0 left"]
    assert scene.events[-2:] == [("announced", ([second, third], [])), ("released", 0)]
    assert not scene.servers[0].alive()
    assert [row[0] for row in scene.rows()] == [1, 2]
    assert scene.numbers == {second: 1, third: 2}


def test_requests_move_when_their_time_is_over_and_numbers_are_not_used_again(scene: Scene):
    scene.ask("add")
    scene.requests[scene.pool.urls[2]] = 2
    assert scene.ask("remove").done == ["engine 2 left, 2 requests moved to other engines"]
    assert scene.ask("add").done[0].startswith("engine 3 joined at ")


def test_what_is_impossible_is_refused_with_its_reason_and_nothing_changes(scene: Scene):
    last = "at least one ready engine must stay, or no request could be answered. Add one first."
    assert scene.ask("remove", 2).failed == [last]
    assert scene.ask("remove", 1, "0", "1").failed == [last]
    assert scene.ask("remove", 1, "7").failed == ["engine 7: the run has no such engine, only 0, 1"]
    scene.obstacle = "no GPU is free"
    assert scene.ask("add").failed == ["no GPU is free"]
    scene.obstacle = ""
    reply = scene.reply(ask(scene.run, EngineRequest("add", urls=[scene.pool.urls[1]])))
    assert reply.failed == [f"{scene.pool.urls[1]} is already engine 1"]
    assert scene.rows() == [(0, "ready", None), (1, "ready", None)]
    assert scene.events == []


def test_an_engine_that_cannot_start_or_load_weights_leaves_nothing(scene: Scene):
    def broken(i: int) -> ServerProcess:
        scene.servers[i] = server(scene.run, "sys.exit('RuntimeError: CUDA out of memory')", name=f"engine-{i}")
        return scene.servers[i]

    def refused(url: str) -> str:
        raise BackendError(f"engine at {url}: /update was refused")

    scene.pool._make = broken
    (line,) = scene.ask("add").failed
    assert line.startswith("engine-2 died while starting (exit code 1): RuntimeError: CUDA out of memory")
    scene.pool._make, scene.pool.restore = scene.make, refused
    (line,) = scene.ask("add").failed
    assert line.endswith("/update was refused")
    assert not scene.servers[3].alive()
    assert [event for event in scene.events if event[0] == "released"] == [("released", 2), ("released", 3)]
    assert scene.rows() == [(0, "ready", None), (1, "ready", None)]


def test_an_engine_that_joined_is_restarted_like_others_and_one_that_leaves_is_not(scene: Scene):
    scene.ask("add")
    scene.servers[2].stop()
    scene.pool.settle()
    assert scene.rows()[2] == (2, "ready", "7")
    assert (scene.pool.restarts, scene.pool.losses) == (1, 1)
    scene.requests[scene.pool.urls[2]] = 1
    name = ask(scene.run, EngineRequest("remove", engines=["2"], drain_s=600))
    while not scene.pool.members[2].leaves:
        time.sleep(0.01)
    scene.servers[2].stop()
    scene.pool.settle()
    assert scene.pool.restarts == 1
    scene.requests.clear()
    assert scene.reply(name).done == ["engine 2 left"]


def test_an_engine_that_is_being_restarted_can_be_removed(scene: Scene, monkeypatch: pytest.MonkeyPatch):
    stuck = server(scene.run, "time.sleep(600)", name="engine-0")
    monkeypatch.setattr(scene.servers[0], "program", stuck.program)
    scene.servers[0].stop()
    scene.pool._check_servers()
    assert scene.rows()[0] == (0, "restarting", None)
    assert scene.ask("remove", 1, "0").done == ["engine 0 left"]
    scene.pool.settle()
    assert not scene.servers[0].alive()
    assert scene.rows() == [(1, "ready", None)]


def test_running_servers_leave_when_they_die_except_the_last(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    servers = [server(tmp_path, name=str(i)) for i in range(2)]
    urls = [each.start() for each in servers]
    pool = ServerPool(lambda i: RunningServer(urls[i]), 2, watch=WatchOptions(interval_s=600, timeout_s=0.2))
    pool.start()
    try:
        servers[0].stop()
        pool.settle()
        assert (pool.urls, pool.losses) == (urls[1:], 1)
        assert caplog.messages == [
            f"engine 0 at {urls[0]} does not answer and leaves the run. When it is back, add it with: "
            f"slimectl engines add RUN --url {urls[0]}"
        ]
        servers[1].stop()
        pool.settle()
        assert (pool.urls, pool.losses) == (urls[1:], 1)
        thread = threading.Thread(target=pool._check_servers)
        pool.watch = WatchOptions(timeout_s=600)
        thread.start()
    finally:
        pool.close()
        for each in servers:
            each.stop()
    thread.join(60)  # closing ends the check of a server that does not answer
    assert not thread.is_alive()


def test_a_run_says_that_it_starts_with_other_engines_than_it_ended_with(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO, logger="slimectl")
    row = {"engine": 0, "url": "", "machine": "", "state": "ready", "weight_version": None, "requests": 0}
    (tmp_path / STATE).write_text(json.dumps({"engines": [row] * 3, "replies": {}}))
    pool = ServerPool(lambda i: RunningServer(f"http://127.0.0.1:{i}"), 2, watch=WatchOptions(watches=False))
    made = EngineControl(tmp_path, pool, check=lambda url: None)
    made.start()
    made.close()
    assert caplog.messages == [
        "the run had 3 engines before, and starts with the 2 of its settings. Change them with: slimectl engines"
    ]


def test_a_new_start_of_a_run_drops_requests_to_the_old_one(tmp_path: Path):
    folder = RunDir(tmp_path / "run")
    folder.start("")
    name = ask(folder.path, EngineRequest("add", 1))
    mine = folder.path / "engines" / "notes.txt"
    mine.write_text("the user's")
    folder.adopt()
    assert [path.name for path in mine.parent.iterdir()] == ["notes.txt"]
    withdraw(folder.path, name)  # is gone already
    assert read_state(folder.path).engines == ()
