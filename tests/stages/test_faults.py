"""What dies in a run does not end it: engines are restarted with the current weights, trainers from a checkpoint."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from forkserver import ForkedProcess
from workshop import Workshop, alike

ROUNDS = ["-s", "run.num_rollout=24", "-s", "rollout.max_response_len=120", "-s", "rollout.ignore_eos=true"]
ROUNDS += ["-s", "eval.interval=none", "-s", "run.save_interval=4"]


def started(workshop: Workshop, *arguments: str) -> ForkedProcess:
    log = (workshop.folder / "words.txt").open("wb")
    return workshop.start("run", *arguments, stdout=log, stderr=log)


def descendants(process: ForkedProcess, *words: str) -> list[psutil.Process]:
    """The running processes below it whose command line has all the words."""
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        try:
            if all(word in child.cmdline() for word in words) and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
        except psutil.NoSuchProcess:
            pass
    return found


def rounds_done(workshop: Workshop, run: str) -> int:
    path = workshop.folder / "runs" / run / "perf.jsonl"
    return path.read_text().count("perf/train_time") if path.exists() else 0


def until(condition, *, process: ForkedProcess, limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert process.poll() is None, "the run ended meanwhile"
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.02)


def words(workshop: Workshop) -> str:
    return (workshop.folder / "words.txt").read_text()


def test_five_killed_engines_cost_no_answer_and_change_no_metric(workshop: Workshop):
    workshop.slimectl("run", *ROUNDS, "--name", "undisturbed")
    process = started(workshop, *ROUNDS, "--name", "shot-at", "--engines", "2", "-s", "engine.health_check_interval=1")
    killed = 0
    for count in (2, 2, 1):  # with both gone, the run can only wait for one to come back
        done = rounds_done(workshop, "shot-at")
        until(lambda done=done: rounds_done(workshop, "shot-at") > done, process=process)
        for server in descendants(process, "slimectl", "serve")[:count]:
            server.kill()
            killed += 1
        if killed < 5:
            until(lambda killed=killed: words(workshop).count("is back at") == killed, process=process)
    assert killed == 5
    assert process.wait(timeout=90) == 0, words(workshop)
    assert "restart 4 of 10" in words(workshop)
    alike(workshop.metrics("undisturbed"), workshop.metrics("shot-at"))
    samples = (workshop.folder / "runs/shot-at/step_000024/samples.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["index"] for line in samples) == list(range(23 * 16, 24 * 16))
    assert not [
        p for p in psutil.process_iter(["cmdline"]) if str(workshop.folder) in " ".join(p.info["cmdline"] or [])
    ]


def test_a_dead_rank_ends_the_step_and_the_run_goes_on_from_its_checkpoint(workshop: Workshop):
    two = ["-s", "cluster.actor_num_gpus_per_node=2"]
    workshop.slimectl("run", *ROUNDS, *two, "--name", "undisturbed")
    process = started(workshop, *ROUNDS, *two, "--name", "shot-at")
    until(lambda: rounds_done(workshop, "shot-at") >= 5, process=process)
    ranks = [child for child in psutil.Process(process.pid).children() if "spawn_main" in " ".join(child.cmdline())]
    ranks[-1].kill()
    assert process.wait(timeout=90) == 0, words(workshop)
    assert "going on from the last checkpoint (3 restarts left)" in words(workshop)
    alike(workshop.metrics("undisturbed"), workshop.metrics("shot-at"))


def test_restarts_are_bounded(workshop: Workshop):
    process = started(
        workshop, *ROUNDS, "--name", "a", "--engines", "2", "-s", "engine.max_restarts=0",
        "-s", "engine.health_check_interval=1",
    )  # fmt: skip
    until(lambda: rounds_done(workshop, "a") >= 1, process=process)
    for child in descendants(process, "slimectl", "serve"):
        child.kill()
    assert process.wait(timeout=60) == 4
    last = words(workshop).splitlines()[-1]
    assert "all 0 restarts are used (engine.max_restarts)" in last


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A Ray cluster: a head on which nothing is placed, and two machines with room for two ranks each."""
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "0")  # how full this machine is, is not what is tested
    store = {"object_store_memory": 80_000_000}
    head = {"num_cpus": 0, "include_dashboard": False, **store}
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
    for _ in range(2):
        cluster.add_node(num_cpus=2, **store)
    yield cluster
    cluster.shutdown()


def test_a_lost_machine_is_survived(workshop: Workshop, machines: Any):
    two = ["-s", "cluster.actor_num_gpus_per_node=2", "-s", "run.num_rollout=16"]
    workshop.slimectl("run", *ROUNDS, *two, "--name", "undisturbed")
    process = started(workshop, *ROUNDS, *two, "--name", "shot-at", "--ray-address", machines.address)
    until(lambda: rounds_done(workshop, "shot-at") >= 5, process=process, limit_s=120)
    machines.remove_node(machine_of_the_ranks(machines), allow_graceful=False)
    assert process.wait(timeout=240) == 0, words(workshop)
    assert "going on from the last checkpoint (3 restarts left)" in words(workshop)
    alike(workshop.metrics("undisturbed"), workshop.metrics("shot-at"))


def machine_of_the_ranks(machines: Any) -> Any:
    """The one below whose raylet two actors hold a rank each."""
    for machine in machines.worker_nodes:
        raylet = psutil.Process(machine.all_processes["raylet"][0].process.pid)
        if sum("RankActor" in " ".join(child.cmdline()) for child in raylet.children(recursive=True)) >= 2:
            return machine
    raise AssertionError("no machine has two ranks")


@pytest.mark.parametrize("how", ["interrupt twice", "kill"])
def test_nothing_is_left_running_when_the_run_is_ended(workshop: Workshop, how: str, tmp_path: Path):
    process = started(workshop, *ROUNDS, "-s", "run.num_rollout=400", "--name", "a", "--engines", "2")
    until(lambda: rounds_done(workshop, "a") >= 2, process=process)
    left = psutil.Process(process.pid).children(recursive=True)
    assert len(left) >= 2
    if how == "kill":
        process.kill()
        process.wait()
    else:
        process.send_signal(signal.SIGINT)
        time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) in (130, 0)
    _, alive = psutil.wait_procs(left, timeout=15)
    assert not alive
    assert not [name for name in os.listdir("/dev/shm") if str(process.pid) in name]
