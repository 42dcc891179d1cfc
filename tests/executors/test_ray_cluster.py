"""Two machines of four GPUs, simulated: who lands where is what the plan said, and a lost machine is survived."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from slimectl.errors import BackendError, DiedError
from slimectl.planner.placement import Placement

pytest.importorskip("ray")

from machines import complete
from ray_cases import Engine, http_server, nothing, tell_where

from slimectl.engines.supervisor.node_group import NodeGroup
from slimectl.executors.ray import RayExecutor

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module", autouse=True)
def joined(shared_cluster: Any) -> Iterator[None]:
    """This process joins the cluster once, for all executors of these tests."""
    first = RayExecutor(shared_cluster.address)
    yield
    first.close()


def spots_of(executor: RayExecutor) -> list[tuple[str, str]]:
    assert executor.places is not None
    return executor.places.spots


def assert_planned(executor: RayExecutor, placement: Placement) -> list[str]:
    """Ray's places are the plan's; the nodes in the plan's order."""
    spots = spots_of(executor)
    nodes = list(dict.fromkeys(node for node, _ in spots))
    assert spots == [(nodes[bundle.node], str(bundle.gpu)) for bundle in placement.bundles]
    return nodes


def test_apart_ranks_and_engines_are_where_the_plan_said(shared_cluster: Any):
    placement = Placement(actor_gpus_per_node=4, engine_gpus=(1,) * 4, gpus_per_node=4)
    executor = RayExecutor(shared_cluster.address, placement=placement)
    try:
        nodes = assert_planned(executor, placement)
        assert len(nodes) == 2
        group = executor.group(tell_where, nothing, ranks=2)
        assert list(group.answers()) == [[(nodes[0], (str(rank),), str(rank)) for rank in range(2)]]
        engine = executor.host(Engine, name="engine-0", gpus=1)
        assert engine.where() == (nodes[1], ("0",), "0")
        again = [executor.host(Engine, name=name, gpus=1) for name in ("engine-1", "engine-0")]
        assert [engine.where()[:2] for engine in again] == [(nodes[1], ("1",)), (nodes[1], ("0",))]
    finally:
        executor.close()


def test_a_server_over_two_machines_has_a_process_on_each_and_is_restarted_as_one(shared_cluster: Any, tmp_path: Path):
    placement = Placement(engine_gpus=(8,), gpus_per_node=4, colocate=True)
    executor = RayExecutor(shared_cluster.address, placement=replace(placement, actor_nodes=0))
    try:
        nodes = assert_planned(executor, executor.places.placement)
        engines = [executor.host(Engine, name=name, gpus=4) for name in ("engine-0", "engine-0-node-1")]
        assert [engine.where() for engine in engines] == [(nodes[0], ("0",), "0,1,2,3"), (nodes[1], ("0",), "0,1,2,3")]
        logs = [tmp_path / "0.log", tmp_path / "1.log"]
        processes = [
            executor.host(partial(http_server, log), name=name, gpus=4)
            for log, name in zip(logs, ("engine-0", "engine-0-node-1"), strict=True)
        ]
        group = NodeGroup(processes, lambda address: [f"--meet={address}"])
        first = group.start()
        assert group.alive()
        os.kill(processes[1].pid(), signal.SIGKILL)
        while group.alive():
            time.sleep(0.05)
        assert group.death().startswith("on machine 1 of 2: killed")
        assert group.start() != first
        assert [log.read_text().count("--meet=") for log in logs] == [2, 2]
        group.stop()
    finally:
        executor.close()


def test_colocated_ranks_share_with_engines_and_outlive_a_machine(ray_machines: Any):
    placement = Placement(actor_nodes=2, actor_gpus_per_node=4, engine_gpus=(2,) * 4, gpus_per_node=4, colocate=True)
    executor = RayExecutor(ray_machines.address, placement=placement)
    try:
        nodes = assert_planned(executor, placement)
        group = executor.group(tell_where, nothing, ranks=5)
        planned = [(nodes[bundle.node], (str(bundle.gpu),), str(bundle.gpu)) for bundle in placement.bundles]
        assert list(group.answers()) == [planned[:5]]  # all five: what is left unread would count as the next answer
        engines = [executor.host(Engine, name=f"engine-{i}", gpus=2) for i in range(2)]
        assert [engine.where() for engine in engines] == [
            (nodes[0], ("0",), "0,1"), (nodes[0], ("2",), "2,3")
        ]  # fmt: skip
        group.send("wait")
        lost = next(node for node in ray_machines.worker_nodes if node.node_id == nodes[1])
        ray_machines.remove_node(lost, allow_graceful=False)
        with pytest.raises(DiedError, match=r"rank \d+ of 5 died \(on .*: its machine has left the cluster"):
            list(group.answers())  # the others wait for 1000 s, longer than a test may take
        assert engines[1].where()[0] == nodes[0]
        complete(ray_machines)
        group = executor.group(tell_where, nothing, ranks=5)
        (told,) = group.answers()
        assert [node for node, _, _ in told[:4]] == [nodes[0]] * 4
        assert told[4][0] not in nodes
        group.end()
    finally:
        executor.close()


def test_a_cluster_that_is_too_small_says_what_is_there_and_what_is_asked_for(shared_cluster: Any):
    with pytest.raises(BackendError, match=r"has 8 GPUs on 2 machines, 8 of them free, but the run needs 12 "):
        RayExecutor(
            shared_cluster.address,
            placement=Placement(actor_nodes=3, actor_gpus_per_node=4, gpus_per_node=4),
            wait_s=1.0,
        )


def test_an_impossible_placement_is_refused_before_anything_is_held(shared_cluster: Any):
    with pytest.raises(BackendError, match="splits engine 1 over two machines"):
        RayExecutor(shared_cluster.address, placement=Placement(actor_gpus_per_node=2, engine_gpus=(4, 4)))
