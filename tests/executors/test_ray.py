"""What only a Ray cluster can do wrong: addresses, versions, deaths, Ctrl-C, and what is left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from slimectl.algorithms.losses import SftLoss
from slimectl.errors import BackendError, DiedError, SettingsError
from slimectl.executors.local import LocalExecutor
from slimectl.planner.placement import Placement
from slimectl.policies.rank_group import DistributedPolicy
from slimectl.runtime.stall_cause import StallCause
from slimectl.system.processes import ProcessView
from slimectl.types import TrainingSample

pytestmark = [pytest.mark.ray, pytest.mark.slow]

ray = pytest.importorskip("ray")

from machines import is_gone  # noqa: E402
from ray_cases import Diary, nothing, policy_over_ranks, sums, tell_where  # noqa: E402

from slimectl.executors.ray import RayExecutor, cluster  # noqa: E402
from slimectl.executors.ray.failures import processes_at  # noqa: E402


@pytest.fixture(scope="module")
def executor(shared_cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayExecutor]:
    made = RayExecutor(shared_cluster.address, logs=tmp_path_factory.mktemp("logs"))
    yield made
    made.close()


def test_a_hosted_object_that_dies_is_named_with_its_last_words(executor: RayExecutor):
    diary = executor.host(Diary, name="diary")
    with pytest.raises(DiedError, match=r"diary died \(on .*: .*\)\. See .*diary\.log") as caught:
        diary.die("oh no")
    assert "oh no" in caught.value.__notes__[0]
    with pytest.raises(DiedError, match="diary died"):
        diary.pages()
    with pytest.raises(DiedError, match="diary died"):
        next(executor.stream(diary.pages, ahead=1))
    assert list(executor.host(Diary, name="diary").pages()) == []  # the name is free again


def test_an_ended_host_is_closed_first(executor: RayExecutor, tmp_path: Path):
    executor.host(partial(Diary, tmp_path / "closed"), name="closing")
    executor.host(Diary, name="closing")
    assert (tmp_path / "closed").exists()


def test_a_policy_over_ranks_is_the_same_here_and_there(executor: RayExecutor, model_dir: Callable[..., Path]):
    """To the last digit, where both ranks are on one machine: each computes with its share of the cores."""
    build = partial(policy_over_ranks, model_dir("qwen3"))
    one_machine = RayExecutor(placement=Placement(actor_gpus_per_node=2, gpus_per_node=4))  # of the cluster above
    found = []
    for where in (one_machine, LocalExecutor()):
        policy = DistributedPolicy(where, build, ranks=2)
        rows = [TrainingSample([5, 6, 7, 8, 9, i], 3, [1.0] * 3, group=i) for i in range(4)]
        steps = [policy.forward_backward(rows, SftLoss()) | policy.optim_step() for _ in range(2)]
        found.append((policy.log_probs(rows), steps, policy.consume_weights(sums)))
        policy.close()
    one_machine.close()
    assert found[0] == found[1]


def test_a_rank_that_the_others_wait_for_is_named(executor: RayExecutor):
    group = executor.group(tell_where, nothing, ranks=2)
    list(group.answers())
    group.send("wait")
    while True:
        views = executor.list_processes(stacks=True)
        stacks = {view.name: view.stacks for view in views if view.name.startswith("rank ")}
        if "in tell_where" in stacks["rank 0"] and "in barrier" in stacks["rank 1"]:
            break
    driver = ProcessView(os.getpid(), 0, "python", "S", 0.0, 0)
    group.end(polite=False)
    first = next(view for view in views if view.name == "rank 0")
    cause = str(StallCause(driver, views, []))
    assert cause.startswith(f"rank 0 (process {first.pid}) is stuck in ")
    assert "(tell_where): `time.sleep(1000)`" in cause
    assert cause.endswith(". Meanwhile rank 1 waits in barrier")


def test_processes_of_another_machine_are_seen_there(executor: RayExecutor):
    host = executor.host(Diary, name="watched")._host
    view, *_ = processes_at(host.location.node, "192.0.2.1", [host.location.pid], stacks=False)
    assert (view.name, view.pid, view.machine) == ("watched", host.location.pid, "192.0.2.1")


def test_more_engines_than_were_placed_are_refused(executor: RayExecutor):
    with pytest.raises(BackendError, match="needs a placement that has engines"):
        executor.host(nothing, name="engine", gpus=1)


def test_another_version_of_ray_is_said(executor: RayExecutor):
    """The cluster says that it is of another version."""
    client, key = ray._private.worker.global_worker.gcs_client, (b"CLUSTER_METADATA", b"cluster")
    written = client.internal_kv_get(*key)
    client.internal_kv_put(key[0], json.dumps(json.loads(written) | {"ray_version": "2.9.0"}).encode(), True, key[1])
    try:
        with pytest.raises(BackendError, match=r"Ray: 2\.9\.0 .* Ray: \d.*\. Install the versions of the cluster"):
            cluster._check_is_ray_head(ray.get_runtime_context().gcs_address)
    finally:
        client.internal_kv_put(key[0], written, True, key[1])


@pytest.mark.parametrize(
    ("address", "kind", "message"),
    [
        (
            "127.0.0.1:1",
            BackendError,
            "Ray at 127.0.0.1:1 is not answering (0.2 s: [Errno 111] Connection refused)",
        ),
        (
            "ray://10.0.0.1:10001",
            SettingsError,
            "cluster.ray_address: ray://10.0.0.1:10001: give host:port",
        ),
        ("head", SettingsError, "cluster.ray_address: head: give host:port of the head, or auto"),
    ],
)
def test_an_address_without_a_cluster_is_one_line(
    address: str, kind: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(cluster, "REACH_S", 0.2)
    with pytest.raises(kind) as caught:
        cluster._check_reachable(address)
    assert str(caught.value).startswith(message)


def test_what_listens_but_is_no_cluster_is_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cluster, "TRY_S", 0.5)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        pytest.raises(BackendError, match=r"did not answer as a Ray head within 0\.5 s"),
    ):
        cluster._check_is_ray_head(f"127.0.0.1:{server.getsockname()[1]}")


ALONE = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a script started the tests with &
sys.path[:0] = {path!r}
from functools import partial
from pathlib import Path
from slimectl.executors.ray import RayExecutor
from ray_cases import Diary
if __name__ == "__main__":
    executor = RayExecutor()
    import ray
    print(ray._private.worker._global_node.get_session_dir_path(), flush=True)
    try:
{body}
    finally:
        executor.close()
"""


def started(body: str, **options: Any) -> subprocess.Popen[str]:
    """A program that drives a cluster of its own."""
    indented = "\n".join(f"        {line}" for line in body.splitlines())
    path = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
    command = [sys.executable, "-c", ALONE.format(path=path, body=indented)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, start_new_session=True, **pipes, **options)


def test_a_program_finds_its_hooks_has_only_data_on_stdout_and_leaves_nothing_after_ctrl_c(tmp_path: Path):
    """In one cluster, which the program starts: its reward of the working directory, then a stream that waits."""
    (tmp_path / "my_reward.py").write_text(
        "import os, sys\n"
        "def grade(n):\n"
        "    print('graded', n)\n"
        "    if n == 1: os._exit(1)\n"
        "    return n, open('scale').read()\n"
    )
    (tmp_path / "scale").write_text("ten")
    program = started(
        "sys.path.insert(0, '')\n"
        "import my_reward\n"
        "from slimectl.executors.ray import actors\n"
        "actors.GRACE_S = 10_000.0\n"
        "print(list(executor.map(my_reward.grade, range(3), workers=1)), flush=True)\n"
        "for _ in executor.stream(partial(Diary().slowly, Path('begun')), ahead=1): print('item')",
        cwd=tmp_path,
    )
    assert program.stdout is not None
    session, results = program.stdout.readline().strip(), program.stdout.readline().strip()
    assert re.fullmatch(r"\[\(0, 'ten'\), BackendError\('the worker died on it \(.*\)'\), \(2, 'ten'\)\]", results)
    until((tmp_path / "begun").exists)
    os.killpg(program.pid, signal.SIGINT)
    out, err = program.communicate(timeout=300)  # and not the 10 000 s that a stream gets to end here
    assert out == ""
    assert "graded 0" in err
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert is_gone(session)
    assert not Path(session).exists()


def test_a_killed_driver_takes_cluster_and_actors_with_it():
    program = started("print(executor.host(Diary, name='diary').process(), flush=True)\ntime.sleep(100)")
    assert program.stdout is not None
    session, actor = program.stdout.readline().strip(), program.stdout.readline().strip()
    program.kill()
    program.communicate()
    until(lambda: not running(session, actor))  # two agents of Ray's own follow within a minute


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.05)


def running(session: str, actor: str) -> list[str]:
    """The command lines that name a session, or are the actor's."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            text = (folder / "cmdline").read_text()
        except OSError:
            continue
        if session in text or (text and folder.name == actor):
            found.append(text)
    return found
