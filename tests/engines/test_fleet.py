"""Servers that are killed or hang in the middle of answers, and are mended; the servers are `slimectl serve`."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import serving

from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.engines.http.client import HttpEngine
from slimectl.engines.sglang.weight_client import SglangWorkers
from slimectl.engines.supervisor.server_pool import ServerPool, WatchOptions
from slimectl.engines.supervisor.server_process import ServerProcess
from slimectl.errors import BackendError
from slimectl.types import Completion, SamplingParams

pytestmark = pytest.mark.slow

RESTARTS = 2
"""As many as the tests need before the last, which has none left."""
PROMPTS = [[*b"once upon a time", 65 + i] for i in range(12)]


class Scene:
    """A fleet of two, an engine that asks it, and what has been announced."""

    def __init__(self, folder: Path, logs: Path, **options: Any) -> None:
        self.folder = folder
        self.servers = [serving.serve(folder, logs / str(i)) for i in range(3)]
        self.announced: list[list[str]] = []
        self.restored: list[str] = []
        self.engine: HttpEngine = serving.client([], folder)
        self.fleet = ServerPool(self.servers.__getitem__, 2, watch=WatchOptions(**options))
        self.fleet.announce, self.fleet.restore = self.announce, self.restore
        self.fleet.failed = self.engine.fail
        self.engine.troubled = self.fleet.look
        self.fleet.start()
        self.push(self.fleet.urls, version="3")

    def announce(self, addresses: Any, *more: Any) -> None:
        self.announced.append(list(addresses))
        self.engine.set_urls(addresses, *more)

    def restore(self, url: str) -> str:
        assert all(url not in addresses for addresses in self.announced)
        self.push([url], version="3")
        self.restored.append(url)
        return "3"

    def push(self, urls: list[str], *, version: str) -> None:
        workers = SglangWorkers(urls, keys=serving.KEYS)
        workers.begin(mode="in_place")
        workers.load_tensors(list(HFCheckpoint().read(self.folder)), version=version)
        workers.end()

    async def ask(self, max_tokens: int = 200) -> list[Completion]:
        asked = enumerate(PROMPTS)
        params = [SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=i) for i, _ in asked]
        return await asyncio.gather(
            *(self.engine.generate(p, params=each) for p, each in zip(PROMPTS, params, strict=True))
        )

    def close(self) -> None:
        asyncio.run(self.engine.close())
        self.fleet.close()


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory, model_dir: Callable[[], Path]) -> Iterator[Scene]:
    """Looked at when something is wrong: the interval is longer than the tests."""
    options = {"interval_s": 600.0, "timeout_s": 3.0, "max_restarts": RESTARTS}
    made = Scene(model_dir(), tmp_path_factory.mktemp("logs"), **options)
    yield made
    made.close()


@pytest.fixture(scope="module")
def undisturbed(at: Scene) -> list[list[int]]:
    return [answer.tokens for answer in asyncio.run(at.ask())]


def strike(server: ServerProcess, number: int) -> None:
    pid = server.pid()
    assert pid is not None
    os.kill(pid, number)


def test_a_server_killed_in_mid_answer_loses_nothing_and_comes_back_with_the_weights(
    at: Scene, undisturbed: list[list[int]], caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO, logger="slimectl")
    first, before = at.fleet.urls[0], at.fleet.restarts

    async def killed() -> list[Completion]:
        under_way = asyncio.create_task(at.ask())
        await asyncio.sleep(0.3)
        strike(at.servers[0], signal.SIGKILL)
        return await under_way

    disturbed = asyncio.run(killed())
    assert [answer.tokens for answer in disturbed] == undisturbed
    assert {tuple(answer.weight_versions) for answer in disturbed} == {("3",)}
    at.fleet.settle()
    assert (at.fleet.restarts, len(at.fleet.urls)) == (before + 1, 2)
    assert first not in at.announced[-2]
    assert at.announced[-1] == at.fleet.urls == [at.restored[-1], at.fleet.urls[1]]
    assert [answer.tokens for answer in asyncio.run(at.ask())] == undisturbed
    said = [line for line in caplog.messages if line.startswith("engine 0")]
    assert said[0].startswith(f"engine 0 at {first} died (killed; out of memory?")
    assert said[0].endswith(f"Restart {before + 1} of {RESTARTS}")
    assert said[1].startswith(f"engine 0 is back at {at.restored[-1]} after ")


def test_a_server_that_hangs_is_taken_for_dead_and_its_requests_go_elsewhere(at: Scene, undisturbed: list[list[int]]):
    before = at.fleet.restarts

    async def hung() -> list[Completion]:
        strike(at.servers[1], signal.SIGSTOP)
        under_way = asyncio.create_task(at.ask(max_tokens=20))
        await asyncio.sleep(0.3)
        at.fleet.look()
        return await under_way

    assert [answer.tokens for answer in asyncio.run(hung())] == [tokens[:20] for tokens in undisturbed]
    at.fleet.settle()
    assert (at.fleet.restarts, len(at.fleet.urls)) == (before + 1, 2)


def test_a_server_is_not_looked_at_while_weights_change(at: Scene):
    before = at.fleet.restarts
    with at.fleet.pause_watch():
        strike(at.servers[0], signal.SIGSTOP)
        at.fleet.look()
        time.sleep(4.0)
        strike(at.servers[0], signal.SIGCONT)
    at.fleet.settle()
    assert at.fleet.restarts == before


def test_requests_move_while_engines_join_and_leave(at: Scene, undisturbed: list[list[int]]):
    """One joins in mid-answer, one leaves after its answers, and one at once."""

    async def changed() -> tuple[list[Completion], list[int]]:
        under_way = [asyncio.create_task(at.ask())]
        joined = await asyncio.to_thread(at.fleet.add)
        assert joined.number == 2
        while not under_way[-1].done() and joined.url not in at.engine.in_flight():
            under_way.append(asyncio.create_task(at.ask()))
            await asyncio.sleep(0.05)
        moved = [await asyncio.to_thread(at.fleet.remove, 0, drain_s=60)]
        under_way.append(asyncio.create_task(at.ask()))
        await asyncio.sleep(0.05)
        moved += [await asyncio.to_thread(at.fleet.remove, 2, drain_s=0)]
        return [answer for task in under_way for answer in await task], moved

    at.fleet.in_flight = lambda urls: at.engine.in_flight()
    completions, moved = asyncio.run(changed())
    assert [completion.tokens for completion in completions] == undisturbed * (len(completions) // len(PROMPTS))
    assert {tuple(completion.weight_versions) for completion in completions} == {("3",)}
    assert moved[0] == 0
    assert moved[1] > 0
    assert [at.servers[i].alive() for i in range(3)] == [False, True, False]
    at.fleet._numbers = iter([0])
    at.fleet.add()  # back to two


def test_when_no_restart_is_left_whoever_waits_hears_of_it(at: Scene):
    while at.fleet.restarts < RESTARTS:  # where this test runs alone
        strike(at.servers[0], signal.SIGKILL)
        at.fleet.settle()
    for server in at.servers[:2]:
        strike(server, signal.SIGKILL)
    words = rf"engine \d at http://.* died \(killed; out of memory\?.*\), and all {RESTARTS} restarts have been used"
    with pytest.raises(BackendError, match=words):
        asyncio.run(at.ask())
    with pytest.raises(BackendError, match="restarts have been used"):
        at.fleet.settle()


def test_a_fleet_of_which_one_cannot_start_leaves_none_running(tmp_path: Path, model_dir: Callable[[], Path]):
    good = serving.serve(model_dir(), tmp_path / "good", weight_version="0")
    bad = serving.serve(tmp_path / "no such model", tmp_path / "bad", weight_version="0")
    with pytest.raises(BackendError, match=r"serve died while starting .*no such model"):
        ServerPool([good, bad].__getitem__, 2).start()
    assert not good.alive()
    assert not bad.alive()
