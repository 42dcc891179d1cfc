"""What dies in a run does not end it: engines are restarted with the current weights, trainers from a checkpoint."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from forkserver import ForkedProcess
from workshop import Workshop, alike, set_up

ROUNDS = ["-s", "run.num_rollout=6", "-s", "rollout.max_response_len=20", "-s", "rollout.ignore_eos=true"]
"""Short answers: in 10 000 sampled tokens, one may flip by the rounding of another batch, and every metric with it."""

ROUNDS += ["-s", "eval.interval=none", "-s", "run.save_interval=2"]
ROUNDS += ["-s", "score.timeout_s=1000"]  # a round waits in its reward until the test permits it
GATE = '''

small_bytes = reward

def reward(sample):
    """The same, once the round of the sample is permitted."""
    import pathlib, time
    permitted = pathlib.Path(__file__).with_name("permitted")
    while sample.index // 16 >= int(permitted.read_text()):
        time.sleep(0.02)
    return small_bytes(sample)
'''


@pytest.fixture
def workshop(workshop: Workshop) -> Workshop:
    """Rounds of 16 samples, of which no more are finished than were permitted: no run ends before the test is done."""
    with (workshop.folder / "reward.py").open("a") as file:
        file.write(GATE)
    permit(workshop, 1000)
    return workshop


def permit(workshop: Workshop, rounds: int) -> None:
    new = workshop.folder / "permitted.new"
    new.write_text(str(rounds))
    new.replace(workshop.folder / "permitted")


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


def until(condition, *, process: ForkedProcess, limit_s: float = 300.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert process.poll() is None, "the run ended meanwhile"
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.02)


def words(workshop: Workshop) -> str:
    return (workshop.folder / "words.txt").read_text()


def test_three_killed_engines_cost_no_answer_and_change_no_metric(workshop: Workshop):
    workshop.slimectl("run", *ROUNDS, "--name", "undisturbed")
    permit(workshop, 1)
    process = started(workshop, *ROUNDS, "--name", "shot-at", "--engines", "2", "-s", "engine.health_check_interval=1")
    killed = 0
    for rounds, count in ((1, 2), (3, 1)):  # with both gone, the run can only wait for one to come back
        permit(workshop, rounds)
        until(lambda rounds=rounds: rounds_done(workshop, "shot-at") == rounds, process=process)
        for server in descendants(process, "slimectl", "serve")[:count]:
            server.kill()
            killed += 1
        until(lambda killed=killed: words(workshop).count("is back at") >= killed, process=process)
    assert killed == 3
    permit(workshop, 6)
    assert process.wait(timeout=300) == 0, words(workshop)
    assert "restart 3 of 10" in words(workshop)
    alike(workshop.metrics("undisturbed"), workshop.metrics("shot-at"))
    samples = (workshop.folder / "runs/shot-at/step_000006/samples.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["index"] for line in samples) == list(range(5 * 16, 6 * 16))
    assert not [
        p for p in psutil.process_iter(["cmdline"]) if str(workshop.folder) in " ".join(p.info["cmdline"] or [])
    ]


TWO_RANKS = ["-s", "cluster.actor_num_gpus_per_node=2"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, model_dir: Callable[[str], Path]) -> list[dict]:
    """Metrics of a run with two ranks in which nothing dies."""
    workshop = set_up(tmp_path_factory.mktemp("undisturbed"), model_dir("llama"))
    workshop.slimectl("run", *ROUNDS, *TWO_RANKS)
    return workshop.metrics("a")


def test_a_dead_rank_ends_the_step_and_the_run_goes_on_from_its_checkpoint(workshop: Workshop, undisturbed: list[dict]):
    permit(workshop, 3)
    process = started(workshop, *ROUNDS, *TWO_RANKS, "--name", "shot-at")
    until(lambda: rounds_done(workshop, "shot-at") == 3, process=process)
    ranks = [child for child in psutil.Process(process.pid).children() if "spawn_main" in " ".join(child.cmdline())]
    ranks[-1].kill()
    permit(workshop, 6)
    assert process.wait(timeout=300) == 0, words(workshop)
    assert "going on from the last checkpoint (3 restarts left)" in words(workshop)
    alike(undisturbed, workshop.metrics("shot-at"))


def test_restarts_are_bounded(workshop: Workshop):
    permit(workshop, 1)
    process = started(
        workshop, *ROUNDS, "--name", "a", "--engines", "2", "-s", "engine.max_restarts=0",
        "-s", "engine.health_check_interval=1",
    )  # fmt: skip
    until(lambda: rounds_done(workshop, "a") == 1, process=process)
    for child in descendants(process, "slimectl", "serve"):
        child.kill()
    permit(workshop, 6)
    assert process.wait(timeout=300) == 4
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


def test_a_lost_machine_is_survived(workshop: Workshop, machines: Any, undisturbed: list[dict]):
    permit(workshop, 3)
    process = started(workshop, *ROUNDS, *TWO_RANKS, "--name", "shot-at", "--ray-address", machines.address)
    until(lambda: rounds_done(workshop, "shot-at") == 3, process=process)
    machines.remove_node(machine_of_the_ranks(machines), allow_graceful=False)
    permit(workshop, 6)
    assert process.wait(timeout=300) == 0, words(workshop)
    assert "going on from the last checkpoint (3 restarts left)" in words(workshop)
    alike(undisturbed, workshop.metrics("shot-at"))


def machine_of_the_ranks(machines: Any) -> Any:
    """The one below whose raylet two actors hold a rank each."""
    for machine in machines.worker_nodes:
        raylet = psutil.Process(machine.all_processes["raylet"][0].process.pid)
        if sum("RankActor" in " ".join(child.cmdline()) for child in raylet.children(recursive=True)) >= 2:
            return machine
    raise AssertionError("no machine has two ranks")


@pytest.mark.parametrize("how", ["interrupt twice", "kill"])
def test_nothing_is_left_running_when_the_run_is_ended(workshop: Workshop, how: str, tmp_path: Path):
    permit(workshop, 1)
    process = started(workshop, *ROUNDS, "--name", "a", "--engines", "2")
    until(lambda: rounds_done(workshop, "a") == 1, process=process)
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
