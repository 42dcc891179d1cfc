"""A real SGLang of two tensor-parallel ranks, each in a process of its own, as on two machines."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import serving

from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.engines.embedded.engine import EmbeddedEngine
from slimectl.engines.http.client import HttpEngine
from slimectl.engines.sglang.topology import groups_of
from slimectl.engines.supervisor.node_group import NodeGroup
from slimectl.engines.supervisor.server_pool import ServerPool, WatchOptions

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


class TwoMachines:
    """One server over two processes in a pool; the first push brings its weights."""

    def __init__(self, folder: Path, logs: Path) -> None:
        self.folder = folder
        (spec,) = groups_of(folder, num_engines=1, gpus_per_engine=2, gpus_per_node=1)
        self.processes = [serving.sglang(folder, logs, spec=part, preloaded=True) for part in spec.parts()]
        self.engine: HttpEngine = serving.client([], folder)
        group = NodeGroup(self.processes, lambda address: [f"--dist-init-addr={address}"])
        self.pool = ServerPool(lambda _: group, 1, watch=WatchOptions(interval_s=600.0))
        self.pool.announce, self.pool.failed, self.pool.restore = self.engine.set_urls, self.engine.fail, self.push
        self.engine.troubled = self.pool.look
        self.pool.start()
        self.push(self.pool.urls[0])

    def push(self, url: str) -> None:
        workers = serving.workers([url])
        assert workers.ranks == [2]
        workers.begin(mode="retract")
        workers.load_tensors(list(HFCheckpoint().read(self.folder)), version="1")
        workers.end()


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory, model_dir: Callable[[], Path]) -> Iterator[TwoMachines]:
    scene = TwoMachines(model_dir(), tmp_path_factory.mktemp("logs"))
    yield scene
    asyncio.run(scene.engine.close())
    scene.pool.close()


def test_two_machines_answer_with_the_log_probabilities_of_the_model(
    at: TwoMachines, make_engine: Callable[..., EmbeddedEngine]
):
    serving.assert_log_probs_of_model(asyncio.run(serving.ask(at.engine)), make_engine)


def test_the_loss_of_the_second_machine_restarts_the_server_with_the_weights(at: TwoMachines):
    undisturbed = [answer.tokens for answer in asyncio.run(serving.ask(at.engine))]
    pid = at.processes[1].pid()
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert [answer.tokens for answer in asyncio.run(serving.ask(at.engine))] == undisturbed
    at.pool.settle()
    assert (at.pool.restarts, len(at.pool.urls)) == (1, 1)
    assert {tuple(answer.weight_versions) for answer in asyncio.run(serving.ask(at.engine))} == {("1",)}
