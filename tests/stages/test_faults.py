"""What dies in a run does not end it: engines are restarted with the current weights, trainers from a checkpoint."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from forkserver import Process
from machines import processes
from workshop import Workshop, alike, set_up

pytestmark = pytest.mark.slow

ROUNDS = ["-s", "run.num_rollout=4", "-s", "rollout.max_response_len=20", "-s", "rollout.ignore_eos=true"]
"""Short answers: in 10 000 sampled tokens, one may flip by the rounding of another batch, and every metric with it."""

ROUNDS += ["-s", "eval.interval=none", "-s", "run.save_interval=2"]
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


def started(workshop: Workshop, *arguments: str, **options: Any) -> Process:
    log = (workshop.folder / "words.txt").open("wb")
    return workshop.start("run", *arguments, stdout=log, stderr=log, **options)


def descendants(process: Process, *words: str) -> list[psutil.Process]:
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


def until(condition, *, process: Process, limit_s: float = 300.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert process.poll() is None, "the run ended meanwhile"
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.02)


def words(workshop: Workshop) -> str:
    return (workshop.folder / "words.txt").read_text()


ADDRESSES = """
import json

def note(args, sample):
    with open("addresses.jsonl", "a") as file:
        print(json.dumps(args.engine.url), file=file)
    assert args.engine.url[0] == f"http://{args.sglang_router_ip}:{args.sglang_router_port}"
"""
TWO_RANKS = ["-s", "cluster.actor_num_gpus_per_node=2"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, model_dir: Callable[[str], Path]) -> list[dict]:
    """Metrics of a run with two ranks in which nothing dies."""
    workshop = set_up(tmp_path_factory.mktemp("undisturbed"), model_dir("llama"))
    workshop.slimectl("run", *ROUNDS, *TWO_RANKS)
    return workshop.metrics("a")


def test_two_killed_engines_cost_no_answer_and_change_no_metric(workshop: Workshop, undisturbed: list[dict]):
    """With both gone, the run can only wait for one to come back."""
    permit(workshop, 1)
    (workshop.folder / "addresses.py").write_text(ADDRESSES)
    process = started(
        workshop, *ROUNDS, *TWO_RANKS, "--name", "shot-at", "--engines", "2",
        "-s", "engine.health_check_interval=1", "-s", "rollout.sample_hook_path=addresses.note",
    )  # fmt: skip
    until(lambda: rounds_done(workshop, "shot-at") == 1, process=process)
    servers = descendants(process, "slimectl", "serve")
    assert len(servers) == 2
    for server in servers:
        server.kill()
    until(lambda: words(workshop).count("is back at") == 2, process=process)
    permit(workshop, 4)
    assert process.wait(timeout=300) == 0, words(workshop)
    assert "Restart 2 of 10" in words(workshop)
    alike(undisturbed, workshop.metrics("shot-at"))
    samples = (workshop.folder / "runs/shot-at/step_000004/samples.jsonl").read_text().splitlines()
    addresses = [json.loads(line) for line in (workshop.folder / "addresses.jsonl").read_text().splitlines()]
    assert len(addresses[0]) == len(addresses[-1]) == 2
    assert all(f"is back at {url}" in words(workshop) for url in addresses[-1])  # those of the new servers
    assert sorted(json.loads(line)["index"] for line in samples) == list(range(3 * 16, 4 * 16))
    named = [p for p in psutil.process_iter(["cmdline"]) if str(workshop.folder) in " ".join(p.info["cmdline"] or [])]
    _, alive = psutil.wait_procs(named, timeout=300)  # ranks end with their parent, a moment after it
    assert not alive


def test_a_dead_rank_ends_the_step_and_the_run_goes_on_from_its_checkpoint(workshop: Workshop, undisturbed: list[dict]):
    permit(workshop, 3)
    process = started(workshop, *ROUNDS, *TWO_RANKS, "--name", "shot-at")
    until(lambda: rounds_done(workshop, "shot-at") == 3, process=process)
    fork_server = next(child for child in descendants(process) if "forkserver import main" in " ".join(child.cmdline()))
    fork_server.children()[-1].kill()
    permit(workshop, 4)
    assert process.wait(timeout=300) == 0, words(workshop)
    assert "Continuing from the last checkpoint (3 restarts left)" in words(workshop)
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
    permit(workshop, 4)
    assert process.wait(timeout=300) == 4
    last = words(workshop).splitlines()[-1]
    assert "all 0 restarts have been used (engine.max_restarts)" in last


@pytest.mark.ray
def test_a_lost_machine_is_survived(workshop: Workshop, ray_machines: Any, undisturbed: list[dict]):
    permit(workshop, 3)
    process = started(workshop, *ROUNDS, *TWO_RANKS, "--name", "shot-at", "--ray-address", ray_machines.address)
    until(lambda: rounds_done(workshop, "shot-at") == 3, process=process)
    machine = machine_of_the_ranks(ray_machines)
    workers = processes(machine)
    ray_machines.remove_node(machine, allow_graceful=False)
    for worker in workers:  # they outlive their raylet by up to a second, in which the run could end
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.kill()
    permit(workshop, 4)
    assert process.wait(timeout=300) == 0, words(workshop)
    assert "Continuing from the last checkpoint (3 restarts left)" in words(workshop)
    alike(undisturbed, workshop.metrics("shot-at"))


def machine_of_the_ranks(machines: Any) -> Any:
    """The one on which two actors hold a rank each."""
    for machine in machines.worker_nodes:
        if sum("RankActor" in " ".join(process.cmdline()) for process in processes(machine)) >= 2:
            return machine
    raise AssertionError("no machine has two ranks")


def shared_blocks(owner: Process) -> list[Path]:
    """The blocks of shared memory of a process."""
    return [*Path("/dev/shm").glob(f"slimectl_{owner.pid}_*")]


@pytest.mark.parametrize("how", ["interrupt twice", "kill", "kill the group"])
def test_nothing_is_left_when_the_run_is_ended(workshop: Workshop, how: str):
    permit(workshop, 1)
    # Of the tests here this one has servers that begin as for users.
    options = {"fork_children": how != "kill", "new_session": how == "kill the group"}
    process = started(workshop, *ROUNDS, "--name", "a", "--engines", "2", "-s", "sync.transport=tensor", **options)
    until(lambda: rounds_done(workshop, "a") == 1, process=process)
    left = psutil.Process(process.pid).children(recursive=True)
    assert len(left) >= 2
    assert len(shared_blocks(process)) == 1
    if how == "kill the group":
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert len(shared_blocks(process)) == 1  # nobody is left who could remove it: the next run does
        workshop.slimectl("run", *ROUNDS, "-s", "run.num_rollout=1", "--name", "b")
    elif how == "kill":
        process.kill()
        process.wait()
    else:
        process.send_signal(signal.SIGINT)
        time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=300) in (130, 0)
    _, alive = psutil.wait_procs(left, timeout=300)
    assert not alive
    assert not shared_blocks(process)
