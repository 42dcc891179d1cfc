"""A death, a cancellation and what cannot be pickled are the results of their calls; the others stay as they are."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from slimectl.errors import HookError
from slimectl.executors import worker_pool
from slimectl.executors.worker_pool import WorkerDiedError, WorkerPool, WorkerStuckError
from slimectl.plugins.containment import converted


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    made = WorkerPool(1)
    yield made
    made.close()
    assert not [child for child in multiprocessing.active_children() if child.name == "slimectl-worker"]


def dies_on_multiples_of_three(n: int) -> int:
    if n % 3 == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return n


@pytest.mark.parametrize("workers", [1, 2])
def test_a_death_at_any_moment_is_the_result_of_its_call_alone(workers: int):
    pool = WorkerPool(workers)
    futures = [pool.submit(dies_on_multiples_of_three, n, timeout_s=None) for n in range(9)]
    for n, future in enumerate(futures):
        if n % 3:
            assert future.result() == n
        else:
            with pytest.raises(WorkerDiedError) as death:
                future.result()
            assert death.value.exit_code == -signal.SIGKILL
    pool.close()


def leaves_a_child_that_holds_the_pipe(_: Any) -> None:
    if os.fork() == 0:
        time.sleep(60)
    os._exit(7)


def test_a_dead_worker_is_noticed_though_its_child_holds_the_pipe(pool: WorkerPool):
    with pytest.raises(WorkerDiedError) as death:
        pool.submit(leaves_a_child_that_holds_the_pipe, None, timeout_s=None).result(30)
    assert death.value.exit_code == 7


def process_id(_: Any) -> int:
    return os.getpid()


def exits(code: int) -> None:
    sys.exit(code)


def test_an_exit_ends_the_worker_not_the_command(pool: WorkerPool):
    with pytest.raises(WorkerDiedError) as death:
        pool.submit(exits, 3, timeout_s=None).result()
    assert death.value.exit_code == 3


def test_a_worker_that_died_between_two_calls_is_replaced(pool: WorkerPool):
    pid = pool.submit(process_id, None, timeout_s=None).result()
    os.kill(pid, signal.SIGKILL)
    [process] = [child for child in multiprocessing.active_children() if child.pid == pid]
    process.join()
    assert pool.submit(process_id, None, timeout_s=None).result() != pid


class Unpicklable(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def raises(error: str) -> None:
    raise {"plain": ValueError("two"), "unpicklable": Unpicklable(1, 2)}[error]


def returns_a_function(_: Any) -> Any:
    return lambda: None


def test_what_a_call_raises_and_what_cannot_be_pickled_are_its_errors(pool: WorkerPool):
    with pytest.raises(ValueError, match="two") as error:
        pool.submit(raises, "plain", timeout_s=None).result()
    assert "in raises" in error.value.__notes__[0]  # its traceback
    with pytest.raises(Exception, match="Unpicklable: 1 and 2"):
        pool.submit(raises, "unpicklable", timeout_s=None).result()
    with pytest.raises(Exception, match="pickle"):
        pool.submit(returns_a_function, None, timeout_s=None).result()
    with pytest.raises(Exception, match="pickle"):
        pool.submit(lambda item: item, None, timeout_s=None).result()
    assert pool.submit(dies_on_multiples_of_three, 1, timeout_s=None).result() == 1


def writes_its_process_id_and_waits(file: Path) -> None:
    file.with_suffix(".part").write_text(str(os.getpid()))
    file.with_suffix(".part").rename(file)
    while True:
        time.sleep(60)


def ignores_that_it_is_to_stop(file: Path) -> None:
    signal.signal(worker_pool.STOP_SIGNAL, signal.SIG_IGN)
    writes_its_process_id_and_waits(file)


def when_written(file: Path) -> int:
    while not file.exists():
        time.sleep(0.01)
    return int(file.read_text())


@pytest.mark.parametrize("function", [writes_its_process_id_and_waits, ignores_that_it_is_to_stop])
def test_a_cancelled_call_ends_its_worker(
    pool: WorkerPool, function: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(worker_pool, "GRACE_S", 0.2)
    call = pool.submit(function, tmp_path / "pid", timeout_s=None)
    waiting = pool.submit(process_id, None, timeout_s=None)
    pid = when_written(tmp_path / "pid")
    pool.cancel(call)
    assert waiting.result() != pid
    with pytest.raises(WorkerDiedError):
        call.result()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_call_that_takes_too_long_ends_its_worker(pool: WorkerPool, tmp_path: Path):
    pool.submit(process_id, None, timeout_s=None).result()
    call = pool.submit(writes_its_process_id_and_waits, tmp_path / "pid", timeout_s=0.5)
    with pytest.raises(WorkerStuckError):
        call.result()
    assert pool.submit(dies_on_multiples_of_three, 1, timeout_s=None).result() == 1


def test_the_end_of_the_pool_ends_calls_under_way_and_cancels_those_that_wait(tmp_path: Path):
    pool = WorkerPool(1)
    call = pool.submit(writes_its_process_id_and_waits, tmp_path / "pid", timeout_s=None)
    waiting = pool.submit(process_id, None, timeout_s=None)
    pid = when_written(tmp_path / "pid")
    pool.close()
    with pytest.raises(WorkerDiedError):
        call.result(0)
    with pytest.raises(CancelledError):
        waiting.result(0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


class BusyWhenFreed:
    """An exception in its __del__ cannot be raised: Python prints its traceback."""

    def __del__(self) -> None:
        deadline = time.monotonic() + 0.2
        while time.monotonic() < deadline:
            pass


def catches_everything(file: Path) -> None:
    file.touch()
    while True:
        with suppress(BaseException):
            BusyWhenFreed()


def runs_as_user_code(file: Path) -> None:
    with converted("score.custom_rm_path: mine.py:reward"):
        catches_everything(file)


def fails_once_it_exists(file: Path) -> None:
    while not file.exists():
        time.sleep(0.01)
    with converted("score.custom_rm_path: mine.py:reward"):
        raise ValueError("no")


def test_a_failing_reward_ends_a_busy_one_beside_it_without_a_traceback(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(worker_pool, "GRACE_S", 20.0)
    pool = WorkerPool(2)
    busy = pool.submit(runs_as_user_code, tmp_path / "busy", timeout_s=None)
    with pytest.raises(HookError, match="raised ValueError: no"):
        pool.submit(fails_once_it_exists, tmp_path / "busy", timeout_s=None).result()
    pool.close()
    with pytest.raises(WorkerDiedError) as death:
        busy.result(0)
    assert death.value.exit_code == 1  # it ended itself, and was not killed
    assert capfd.readouterr().err == ""


def test_a_program_that_does_not_close_its_pool_ends(tmp_path: Path):
    program = tmp_path / "program.py"
    program.write_text(
        "import abs_of\n"
        "from slimectl.executors.worker_pool import WorkerPool\n"
        "if __name__ == '__main__':\n"
        "    print(WorkerPool(2).submit(abs_of.minus_two, None, timeout_s=None).result())\n"
    )
    (tmp_path / "abs_of.py").write_text("def minus_two(_):\n    return abs(-2)\n")
    ended = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "2\n", "")
