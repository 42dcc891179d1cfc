"""A run that makes no progress names the part that is stuck, ends, and continues from there as if it had not hung."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from workshop import Workshop

from slimectl.runtime.grace import GracePeriod
from slimectl.runtime.stall_cause import StallCause
from slimectl.runtime.stall_watch import BUSY_RATE, IO_BYTES, StallWatch
from slimectl.settings import Settings
from slimectl.system.liveness import note_progress, own_stacks
from slimectl.system.processes import ProcessView, look_at

OTHER_MINUTES = 1000.0
"""Seconds between looks: this process never uses a tenth of a core for so long between two lines of a test."""


@contextmanager
def exposed(folder: Path, name: str, code: str) -> Iterator[int]:
    """Start a Python process that exposes itself and then runs `code` in own.py. Yield its id once it has begun."""
    (folder / "own.py").write_text(textwrap.dedent(code))
    start = f"""
        import sys
        from slimectl.system.liveness import expose
        expose({name!r})
        sys.path.insert(0, {str(folder)!r})
        import slimectl.executors.worker_pool as pool
        exec(compile("print(1, flush=True); import own; own.work()", pool.__file__, "exec"))
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(start)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    try:
        yield process.pid
    finally:
        process.kill()
        process.communicate()


def view_when(pid: int, text: str) -> ProcessView:
    """Return the process once its stacks contain a text."""
    while True:
        [view] = look_at([pid], stacks=True)
        if text in view.stacks:
            return view
        time.sleep(0.01)


def own_view() -> ProcessView:
    [view] = look_at([os.getpid()])
    return replace(view, stacks=own_stacks())


def cause(*views: ProcessView, **hooks: str) -> str:
    return str(StallCause(own_view(), views, [(f"score.{name}", value) for name, value in hooks.items()]))


def test_a_process_shows_its_stack_while_it_is_stuck_and_the_setting_that_names_its_function(tmp_path: Path):
    code = """
        import time
        def work():
            return reward(1)
        def reward(sample):
            time.sleep(1e6)
    """
    with exposed(tmp_path, "worker", code) as pid:
        view = view_when(pid, "in reward")
        said = cause(view, custom_rm_path="own.py:reward")
    assert f"worker (process {pid}) is stuck in " in said
    assert "own.py:6 (reward): `time.sleep(1e6)` (score.custom_rm_path = own.py:reward). It sleeps" in said


def test_a_child_that_writes_into_a_pipe_that_is_not_read_is_named_with_the_pipe(tmp_path: Path):
    code = """
        import subprocess, sys
        def work():
            subprocess.Popen(["yes"], stdout=subprocess.PIPE).wait()
    """
    with exposed(tmp_path, "worker", code) as pid:
        view = view_when(pid, "in work")
        while not (children := look_at(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))) or (
            "full pipe" not in children[0].waits
        ):
            time.sleep(0.01)
        said = cause(view, *children)
        os.kill(children[0].pid, signal.SIGKILL)
    pipe = rf"Its child process {children[0].pid} (yes) writes into a full pipe (descriptor 1, pipe:["
    assert pipe in said
    assert f"also open in: {pid})" in said


def test_a_stopped_process_is_named_first(tmp_path: Path):
    with exposed(tmp_path, "rank 1", "import time\ndef work():\n    time.sleep(1e6)\n") as pid:
        os.kill(pid, signal.SIGSTOP)
        while not (views := look_at([pid])) or views[0].state != "T":
            time.sleep(0.01)
    assert cause(*views) == f"rank 1 (process {pid}) is stopped by a signal"


PACKAGE = Path(StallCause.__init__.__code__.co_filename).parents[1]


def rank(number: int, *frames: str) -> ProcessView:
    """A rank with these frames, from the innermost one."""
    lines = ["Current thread 0x1 (most recent call first):", *(f"  File {frame}" for frame in frames)]
    return ProcessView(100 + number, 1, "python", "S", 0.0, 0, f"rank {number}", stacks="\n".join(lines))


DIST = '"/lib/site-packages/torch/distributed/distributed_c10d.py", line 1 in'
ALL_REDUCE = (f"{DIST} all_reduce", f"{DIST} wrapper", f'"{PACKAGE}/policies/fsdp/trainer.py", line 1 in optim_step')
GATHER = (
    '"/lib/site-packages/torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py", line 1 in unshard  # layers.3',
    f'"{PACKAGE}/policies/fsdp/trainer.py", line 2 in forward_backward',
)
IDLE = (f'"{PACKAGE}/executors/rank_process.py", line 1 in recv_bytes',)


def test_collectives_that_differ_are_named_by_rank_with_the_layer():
    said = cause(rank(0, *GATHER), rank(1, *ALL_REDUCE))
    assert said.startswith("the ranks do not call the same collective operations: rank 0 is in unshard of layers.3 (")
    assert "rank 1 is in all_reduce (policies/fsdp/trainer.py:1 (optim_step)" in said


def test_operations_of_other_shapes_differ_too_and_a_gpu_shows_them_only_in_the_flight_recorder():
    sync = f'"{PACKAGE}/policies/fsdp/trainer.py", line 4 in optim_step'
    pending = [f"Operation 7 of default_pg: all_reduce of [[{size}]]" for size in (3, 4)]
    ranks = [replace(rank(i, sync), stacks=f"{rank(i, sync).stacks}\n\n{pending[i]}\n") for i in range(2)]
    said = cause(*ranks)
    assert said.startswith(
        "the ranks do not call the same collective operations: rank 0 is in Operation 7 of default_pg"
    )
    assert "rank 1 is in Operation 7 of default_pg: all_reduce of [[4]] (" in said


def test_the_rank_that_the_others_wait_for_is_the_culprit():
    own = f'"{PACKAGE}/policies/fsdp/trainer.py", line 3 in forward_backward'
    said = cause(rank(0, *ALL_REDUCE), rank(1, '"/home/me/own.py", line 3 in loss', own))
    assert said.startswith("rank 1 (process 101) is stuck in ")
    assert said.endswith(". Meanwhile rank 0 waits in all_reduce")
    assert cause(rank(0, *ALL_REDUCE), rank(1, *ALL_REDUCE)).startswith("ranks 0, 1 all wait in all_reduce. Check the")


def test_an_idle_rank_is_no_culprit():
    assert "rank" not in cause(rank(0, *IDLE), rank(1, *IDLE))


def watch_of(folder: Path, **run: float | None) -> StallWatch:
    settings = Settings.model_validate({"run": run})
    return StallWatch(settings, folder, "slimectl run --resume x", GracePeriod(), may_exit=False)


def test_progress_of_any_process_and_reading_a_model_end_the_silence(tmp_path: Path):
    watch = watch_of(tmp_path)
    idle = ProcessView(1, 0, "python", "S", 0.0, 0, "rank 0", progress=5)
    rates = {
        "a step": watch._rate(idle, replace(idle, progress=6), 1.0),
        "a megabyte": watch._rate(idle, replace(idle, io_bytes=IO_BYTES), 1.0),
        "a few bytes": watch._rate(idle, replace(idle, io_bytes=1000), 1.0),
        "a start that computes": watch._rate(idle, replace(idle, cpu_s=0.5), 1.0),
        "a compiler": watch._rate(replace(idle, name=""), replace(idle, name="", cpu_s=0.5), 1.0),
        "a server": watch._rate(
            replace(idle, name=""), replace(idle, cpu_s=0.5, variables=frozenset({"SLIMECTL_PARENT"})), 1.0
        ),
    }
    watch.is_starting = False
    rates["a rank that spins"] = watch._rate(idle, replace(idle, cpu_s=0.5), 1.0)
    assert rates == {
        "a step": 0.0, "a megabyte": 0.0, "a few bytes": 1.0, "a start that computes": BUSY_RATE, "a compiler": 0.0,
        "a server": 1.0, "a rank that spins": 1.0,
    }  # fmt: skip


def test_a_step_of_this_process_ends_the_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    watch = watch_of(tmp_path)
    monkeypatch.setattr(watch, "_look", list)  # servers of other tests are children of this process
    assert watch._silence(OTHER_MINUTES) == 1.0
    note_progress()
    assert watch._silence(OTHER_MINUTES) == 0.0
    assert watch._silence(OTHER_MINUTES) == 1.0


HANGS = '''
import os, signal, threading

lock = threading.Lock()
lock.acquire()

def reward(sample):
    """The share of small bytes. Hangs in the second round while the file `hang` says how."""
    if sample.index >= 16 and os.path.exists("hang"):
        if open("hang").read() == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        with lock:
            pass
    answer = sample.tokens[len(sample.tokens) - sample.response_length:]
    return sum(token < 64 for token in answer) / len(answer)
'''
SHORT = ("-s", "run.num_rollout=2", "-s", "run.save_interval=none", "-s", "eval.data={}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hang", "workers", "names"),
    [
        (
            "lock",
            "none",
            "is stuck in reward.py:12 (reward): `with lock:` (score.custom_rm_path = reward.py:reward)",
        ),
        ("stop", "1", ") is stopped by a signal"),
    ],
)
def test_a_run_that_hangs_ends_resumably(workshop: Workshop, hang: str, workers: str, names: str):
    (workshop.folder / "reward.py").write_text(HANGS)
    (workshop.folder / "hang").write_text(hang)
    options = (*SHORT, "-s", f"score.workers={workers}", "-s", "run.stall_timeout=5")
    process = workshop.start("run", *options, stderr=subprocess.PIPE, new_session=True)
    _, messages = process.communicate(timeout=300)
    *_, last = messages.decode().splitlines()
    assert process.returncode == 124, messages.decode()
    assert last.startswith("slimectl: no progress for 5 s (run.stall_timeout): ")
    assert names in last
    assert last.endswith("Stacks: runs/a/logs/stall.log. Continue with: slimectl run --resume runs/a")
    assert "Traceback" not in messages.decode()
    log = (workshop.folder / "runs" / "a" / "logs" / "stall.log").read_text()
    assert names in log
    with suppress(ProcessLookupError):
        while True:  # until nothing of its session is left
            os.killpg(process.pid, 0)
            time.sleep(0.01)
    (workshop.folder / "hang").unlink()
    workshop.slimectl("run", "--resume", "runs/a")
    workshop.slimectl("run", *SHORT, "--name", "whole")
    assert workshop.metrics("a") == workshop.metrics("whole")
