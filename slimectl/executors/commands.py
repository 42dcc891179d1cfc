"""Commands in slots of this machine, each with its share of cores and GPUs (protocols.Commands)."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from slimectl.errors import SettingsError

PR_SET_PDEATHSIG = 1


class LocalCommands:
    """Runs commands in `slots` processes. By default there are as many as `devices` allow, or one without devices.

    A command gets `gpus` of the devices. Below 1, several commands share a device. The cores are divided among the
    slots by OMP_NUM_THREADS, unless the environment sets it.
    """

    def __init__(self, *, slots: int | None = None, devices: Sequence[str] = (), gpus: float = 0.0) -> None:
        limit = int(len(devices) / gpus + 1e-9) if devices and gpus else None
        if limit is not None and (slots or 1) > limit:
            raise SettingsError(
                f"sweep.slots: {slots or 1} need {(slots or 1) * gpus:g} GPUs, but this machine shows {len(devices)}. "
                f"Lower it, or let runs share a GPU with sweep.gpus = 0.5."
            )
        self.slots = slots or limit or 1
        self._devices, self._gpus = devices, gpus

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path, slot: int
    ) -> subprocess.Popen[bytes]:
        environment = dict(environment)
        if self.slots > 1:
            environment.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // self.slots)))
        if self._devices and self._gpus:
            first = int(slot * self._gpus + 1e-9)
            share = self._devices[first : first + math.ceil(self._gpus)]
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(share)
        return start_command(command, environment, log)

    def close(self) -> None: ...


def start_command(command: Sequence[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own, so that Ctrl-C reaches only this process.

    On Linux the kernel kills it when the thread that called this ends.
    """
    with log.open("ab") as output:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=dict(environment),
            start_new_session=True, preexec_fn=partial(_prepare, os.getpid()),
        )  # fmt: skip


def _prepare(parent: int) -> None:
    """Let the kernel kill this process when its parent ends, which may have ended already."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Ray 2.60 blocks SIGINT in its workers
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    if (names := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name.strip() for name in names.split(",") if name.strip()]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]
