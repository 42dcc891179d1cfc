"""Commands on the machines of a Ray cluster, each in an actor that reserves its CPUs and GPUs (protocols.Commands)."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slimectl.errors import BackendError
from slimectl.executors.commands import start_command
from slimectl.executors.ray.cluster import connect, disconnect, ray

OWN_VARIABLES = ("CUDA_VISIBLE_DEVICES", "RAY_")
"""Beginnings of environment variables that Ray sets for an actor, so that the driver's do not replace them."""


class CommandActor:
    """Runs one command on its machine. The folder and the log must be the same files there."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, command: list[str], environment: dict[str, str], folder: str, log: str) -> None:
        ray_variables = {name: text for name, text in os.environ.items() if name.startswith(OWN_VARIABLES)}
        os.chdir(folder)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # Ray 2.60 ignores it in its workers, so exit codes would be lost
        self._process = start_command(command, {**environment, **ray_variables}, Path(log))

    def poll(self) -> int | None:
        return None if self._process is None else self._process.poll()

    def send_signal(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)


class RayCommand:
    """Driver side of a CommandActor (protocols.Command)."""

    def __init__(self, actor: Any, started: Any) -> None:
        self._actor, self._started = actor, started

    def poll(self) -> int | None:
        """Return the exit code, or None while the command waits for resources or runs. A lost machine counts as KILL.

        Raises BackendError if the command cannot be started there.
        """
        try:
            if not ray.wait([self._started], timeout=0)[0]:
                return None
            ray.get(self._started)
            code: int | None = ray.get(self._actor.poll.remote())
        except ray.exceptions.RayTaskError as error:
            raise BackendError(f"a run cannot be started on Ray: {error.cause}") from error
        except ray.exceptions.RayError:
            code = -signal.SIGKILL
        if code is not None:
            ray.kill(self._actor)
        return code

    def send_signal(self, number: int) -> None:
        if number == signal.SIGKILL or not ray.wait([self._started], timeout=0)[0]:
            ray.kill(self._actor)  # its command ends with it
        else:
            self._actor.send_signal.remote(number)


class RayCommands:
    """Runs each command with `cpus` and `gpus` of the cluster at `address`, or of one that is started here.

    By default there are as many slots as the cluster has room for.
    """

    def __init__(self, address: str | None, *, slots: int | None, cpus: int, gpus: float) -> None:
        self._session = connect(address, cpus=cpus * (slots or 1))
        self._options: dict[str, Any] = {"num_cpus": cpus, "num_gpus": gpus, "max_restarts": 0}
        resources = ray.cluster_resources()
        room = int(resources.get("CPU", 0) / cpus)
        if gpus:
            room = min(room, int(resources.get("GPU", 0) / gpus + 1e-9))
        if not room:
            self.close()
            raise BackendError(
                f"Ray: no machine has {cpus} CPUs and {gpus:g} GPUs for a run. Lower sweep.cpus or sweep.gpus."
            )
        self.slots = slots or room

    def start(self, command: Sequence[str], environment: Mapping[str, str], log: Path, slot: int) -> RayCommand:
        actor_class: Any = ray.remote(CommandActor)
        actor = actor_class.options(**self._options).remote()
        variables = {"OMP_NUM_THREADS": str(self._options["num_cpus"]), **environment}
        started = actor.start.remote([*command], variables, os.getcwd(), str(log.absolute()))
        return RayCommand(actor, started)

    def close(self) -> None:
        disconnect(self._session)
