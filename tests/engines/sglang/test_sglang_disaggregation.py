"""Real SGLang servers that only prefill and only decode, behind the real sglang-router; Mooncake moves the cache."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import serving

from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.engines.embedded.engine import EmbeddedEngine
from slimectl.engines.http.client import HttpEngine
from slimectl.engines.sglang.launch import router_server
from slimectl.engines.sglang.topology import groups_of
from slimectl.engines.supervisor.server_pool import ServerPool, WatchOptions
from slimectl.system.http import get
from slimectl.types import Completion

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


class Disaggregated:
    """A server that prefills and one that decodes, in a pool behind the router; the first push brings weights."""

    def __init__(self, folder: Path, logs: Path) -> None:
        self.folder, python = folder, serving.python_of("sglang")
        specs = groups_of(folder, num_engines=2, gpus_per_engine=1, prefill_num_servers=1)
        self.servers = [serving.sglang(folder, logs, spec=spec, preloaded=True) for spec in specs]
        self.router = router_server("cache_aware", log=logs / "router.log", python=python, disaggregated=True)
        self.engine: HttpEngine = serving.client([], folder)
        kinds, watch = [spec.router_kind() for spec in specs], WatchOptions(interval_s=600.0)
        self.pool = ServerPool(self.servers.__getitem__, 2, router=self.router, kinds=kinds, watch=watch)
        self.pool.announce, self.pool.failed, self.pool.restore = self.engine.set_urls, self.engine.fail, self.restore
        self.engine.troubled = self.pool.look
        self.version = "1"
        self.pool.start()
        self.push(self.pool.urls, "1")

    def restore(self, url: str) -> None:
        self.push([url], self.version)

    def push(self, urls: list[str], version: str, *, mode: str = "retract") -> None:
        workers = serving.workers(urls)
        workers.begin(mode=mode)
        workers.load_tensors(list(HFCheckpoint().read(self.folder)), version=version)
        workers.end()
        self.version = version

    def kill(self, i: int) -> None:
        pid = self.servers[i].pid()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory, model_dir: Callable[[], Path]) -> Iterator[Disaggregated]:
    probe = [serving.python_of("sglang"), "-E", "-c", "import mooncake.engine"]
    if subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("needs Mooncake in SGLang's Python: see Prefill and decode in docs/clusters.md")
    scene = Disaggregated(model_dir(), tmp_path_factory.mktemp("logs"))
    yield scene
    asyncio.run(scene.engine.close())
    scene.pool.close()


def tokens(answers: list[Completion]) -> list[Any]:
    return [answer.tokens for answer in answers]


def test_answers_have_the_log_probabilities_of_the_model(at: Disaggregated, make_engine: Callable[..., EmbeddedEngine]):
    serving.assert_log_probs_of_model(asyncio.run(serving.ask(at.engine)), make_engine)


def test_a_push_in_mid_answer_reaches_both_kinds(at: Disaggregated):
    async def pushed() -> list[Completion]:
        under_way = asyncio.create_task(serving.ask(at.engine, 120))
        await asyncio.sleep(1.0)
        await asyncio.to_thread(at.push, at.pool.urls, "2")
        return await under_way

    undisturbed = tokens(asyncio.run(serving.ask(at.engine, 120)))
    answers = asyncio.run(pushed())
    assert tokens(answers) == undisturbed
    versions = [asyncio.run(get(f"{url}/model_info", timeout_s=5)).body["weight_version"] for url in at.pool.urls]
    assert versions == ["2", "2"]
    assert {answer.weight_versions[-1] for answer in asyncio.run(serving.ask(at.engine, 2))} == {"2"}


def test_abort_ends_answers_on_both_sides(at: Disaggregated):
    async def aborted() -> list[Completion]:
        under_way = asyncio.create_task(serving.ask(at.engine, 200))
        await asyncio.sleep(1.0)
        await at.engine.abort()
        return await under_way

    assert {answer.finish_reason for answer in asyncio.run(aborted())} == {"abort"}


@pytest.mark.parametrize("killed", [0, 1], ids=["prefill", "decode"])
def test_one_that_dies_is_restarted_and_paired_again(at: Disaggregated, killed: int):
    undisturbed = tokens(asyncio.run(serving.ask(at.engine)))
    restarts = at.pool.restarts
    at.kill(killed)
    assert tokens(asyncio.run(serving.ask(at.engine))) == undisturbed
    at.pool.settle()
    assert (at.pool.restarts, len(at.pool.urls)) == (restarts + 1, 2)
    assert tokens(asyncio.run(serving.ask(at.engine))) == undisturbed
