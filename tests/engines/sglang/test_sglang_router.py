"""The real sglang-router in front of two workers of `slimectl serve`."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import serving

from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.engines.http.client import HttpEngine
from slimectl.engines.sglang.launch import router_server
from slimectl.engines.sglang.weight_client import SglangWorkers
from slimectl.engines.supervisor.server_pool import ServerPool, WatchOptions
from slimectl.errors import BackendError
from slimectl.system.http import get
from slimectl.types import Completion, SamplingParams

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

PROMPTS = [[*b"once upon a time", 65 + i] for i in range(12)]
LONGEST = 230
"""Tokens of an answer that fills the context of 256."""


class Routed:
    """Two workers without weights of their own; they get in behind the router with the first push."""

    def __init__(self, folder: Path, logs: Path) -> None:
        self.folder = folder
        self.servers = [serving.serve(folder, logs / str(i)) for i in range(2)]
        # As on a cluster with a proxy, which nothing may ask: nobody is there.
        with pytest.MonkeyPatch.context() as patch:
            for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
                patch.setenv(name, "http://127.0.0.1:9")
            self.start(logs)

    def start(self, logs: Path) -> None:
        self.router = router_server("cache_aware", log=logs / "router.log", python=serving.python_of("sglang"))
        self.engine: HttpEngine = serving.client([], self.folder)
        watch = WatchOptions(interval_s=600.0)
        self.fleet = ServerPool(self.servers.__getitem__, 2, router=self.router, watch=watch)
        self.fleet.announce, self.fleet.failed = self.engine.set_urls, self.engine.fail
        self.fleet.restore = lambda url: self.push([url])
        self.engine.troubled = self.fleet.look
        self.fleet.start()
        assert self.behind() == []
        with self.fleet.pause_watch():
            self.push(self.fleet.urls)

    def push(self, urls: list[str]) -> None:
        workers = SglangWorkers(urls, keys=serving.KEYS)
        workers.begin(mode="in_place")
        workers.load_tensors(list(HFCheckpoint().read(self.folder)), version="1")
        workers.end()

    async def ask(self, max_tokens: int, begun: set[int] | None = None) -> list[Completion]:
        """Answer all prompts; `begun` gets the numbers of those whose first tokens have come."""

        async def answer(number: int, prompt: list[int]) -> Completion:
            params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=number)
            if begun is None:
                return await self.engine.generate(prompt, params=params)
            return await self.engine.generate(prompt, params=params, on_tokens=lambda *_: begun.add(number))

        return await asyncio.gather(*(answer(number, prompt) for number, prompt in enumerate(PROMPTS)))

    def behind(self) -> list[str]:
        reply = asyncio.run(get(f"{self.fleet.addresses[0]}/workers", timeout_s=5))
        return sorted(worker["url"] for worker in reply.body["workers"] if worker["is_healthy"])


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory, model_dir: Callable[[], Path]) -> Iterator[Routed]:
    made = Routed(model_dir(), tmp_path_factory.mktemp("logs"))
    yield made
    asyncio.run(made.engine.close())
    made.fleet.close()


def tokens(answers: list[Completion]) -> list[Any]:
    return [answer.tokens for answer in answers]


def test_answers_through_the_router_are_those_of_a_worker(routed: Routed):
    assert len(routed.fleet.addresses) == 1
    assert routed.behind() == sorted(routed.fleet.urls)
    through = asyncio.run(routed.ask(20))
    routed.engine.set_urls(routed.fleet.urls[:1])
    directly = asyncio.run(routed.ask(20))
    routed.engine.set_urls(routed.fleet.addresses, routed.fleet.urls)
    assert tokens(through) == tokens(directly)
    assert [answer.log_probs for answer in through] == [
        pytest.approx(answer.log_probs, abs=1e-4) for answer in directly
    ]
    assert {len(answer.log_probs) for answer in through} == {20}


def test_abort_reaches_the_workers_behind_it(routed: Routed):
    async def scene() -> list[Completion]:
        begun: set[int] = set()
        under_way = asyncio.create_task(routed.ask(LONGEST, begun))
        while len(begun) < len(PROMPTS) and not under_way.done():
            await asyncio.sleep(0.005)
        await routed.engine.abort()
        return [answer for answer in await under_way if len(answer.tokens) < LONGEST]

    unfinished: list[Completion] = []
    for _ in range(10):  # on a busy machine the workers may be done before the abort reaches them
        if unfinished := asyncio.run(scene()):
            break
    assert unfinished
    assert all(answer.finish_reason == "abort" and answer.tokens for answer in unfinished)


def test_a_worker_killed_in_mid_answer_is_replaced_behind_the_router(routed: Routed):
    undisturbed = tokens(asyncio.run(routed.ask(150)))

    async def killed() -> list[Completion]:
        under_way = asyncio.create_task(routed.ask(150))
        await asyncio.sleep(0.2)
        pid = routed.servers[1].pid()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        return await under_way

    assert tokens(asyncio.run(killed())) == undisturbed
    routed.fleet.settle()
    assert routed.fleet.restarts == 1
    assert routed.behind() == sorted(routed.fleet.urls)


def test_a_router_that_dies_is_started_again(routed: Routed):
    undisturbed = tokens(asyncio.run(routed.ask(10)))
    pid = routed.router.pid()
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert tokens(asyncio.run(routed.ask(10))) == undisturbed
    assert routed.behind() == sorted(routed.fleet.urls)


def test_a_worker_that_is_not_there_is_refused_in_one_line(routed: Routed, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(routed.router, "register_timeout_s", 1.0)
    with pytest.raises(BackendError, match=r"sglang-router at http://\S+ (refuses|did not find) http://127.0.0.1:9"):
        routed.router.add("http://127.0.0.1:9")
    routed.router.remove("http://127.0.0.1:9")
    assert routed.behind() == sorted(routed.fleet.urls)
