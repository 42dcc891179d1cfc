"""The promises of the slots of a sweep (protocols.Commands): output, environment, exit codes, signals, the end."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from slimectl.executors.commands import LocalCommands
from slimectl.protocols import Command, Commands

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="needs ray: pip install 'slimectl[ray]'")
ON_RAY = pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.slow, needs_ray])


@pytest.fixture(scope="module", params=["local", ON_RAY])
def commands(request: pytest.FixtureRequest) -> Iterator[Commands]:
    if request.param == "local":
        made: Any = LocalCommands(slots=2)
    else:
        from slimectl.executors.ray.commands import RayCommands

        made = RayCommands(request.getfixturevalue("shared_cluster").address, slots=2, cpus=1, gpus=0)
    yield made
    made.close()


def start(commands: Commands, code: str, log: Path, slot: int = 0, **environment: str) -> Command:
    return commands.start([sys.executable, "-c", code], {**os.environ, **environment}, log, slot)


def code_of(command: Command) -> int:
    while (code := command.poll()) is None:
        time.sleep(0.01)
    return code


def test_a_command_appends_to_its_log_and_has_its_environment_and_exit_code(commands: Commands, tmp_path: Path):
    log = tmp_path / "log"
    log.write_text("before\n")
    code = "import os, sys; print(os.environ['TRY'], flush=True); print('error', file=sys.stderr); sys.exit(3)"
    assert code_of(start(commands, code, log, TRY="one")) == 3
    assert log.read_text() == "before\none\nerror\n"


def test_a_signal_reaches_the_command_and_a_kill_is_its_exit_code(commands: Commands, tmp_path: Path):
    waiting = (
        "import signal, sys, time; signal.signal(2, lambda *_: sys.exit(5)); print('up', flush=True); time.sleep(60)"
    )
    for slot, (number, code) in enumerate({signal.SIGINT: 5, signal.SIGKILL: -9}.items()):
        log = tmp_path / f"log{slot}"
        command = start(commands, waiting, log, slot)
        while not log.exists() or "up" not in log.read_text():
            assert command.poll() is None
            time.sleep(0.01)
        command.send_signal(number)
        assert code_of(command) == code


def test_slots_divide_the_cores_and_the_gpus(tmp_path: Path):
    show = "import os; print(os.environ.get('OMP_NUM_THREADS'), os.environ.get('CUDA_VISIBLE_DEVICES'))"
    environment = {name: text for name, text in os.environ.items() if name not in ("OMP_NUM_THREADS",)}

    def shown(commands: LocalCommands, slot: int, **more: str) -> list[str]:
        log = tmp_path / "log"
        log.unlink(missing_ok=True)
        code_of(commands.start([sys.executable, "-c", show], environment | more, log, slot))
        return log.read_text().split()

    cores = len(os.sched_getaffinity(0))
    whole = LocalCommands(devices=["4", "5", "6", "7"], gpus=2)
    assert whole.slots == 2
    assert shown(whole, 1) == [str(max(1, cores // 2)), "6,7"]
    shared = LocalCommands(devices=["4", "5"], gpus=0.5, slots=3)
    assert shown(shared, 2, OMP_NUM_THREADS="9") == ["9", "5"]
    assert shown(LocalCommands(), 0, CUDA_VISIBLE_DEVICES="3") == ["None", "3"]
