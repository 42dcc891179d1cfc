"""Builds executors and the GPU placement from settings."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pydantic import BaseModel

from slimectl.errors import MissingExtraError, SettingsError
from slimectl.planner.placement import Placement
from slimectl.plugins.registry import EXECUTORS
from slimectl.runtime.builders.backends import backend
from slimectl.runtime.builders.models import device
from slimectl.settings import Settings

if TYPE_CHECKING:
    from slimectl.protocols import Commands, Executor
    from slimectl.settings.sweep import SweepSettings


def placement(settings: Settings) -> Placement:
    """Assign the GPUs of every machine to trainer ranks and engines."""
    cluster = settings.cluster
    in_process = cluster.executor == "local" and not settings.uses_servers
    on_gpu = "cuda" in (settings.train.device, settings.engine.device) or device("auto") == "cuda"
    return Placement(
        actor_nodes=cluster.actor_num_nodes,
        actor_gpus_per_node=cluster.actor_num_gpus_per_node,
        engine_gpus=() if settings.engine.url else settings.engine_gpus,
        gpus_per_node=cluster.num_gpus_per_node,
        colocate=cluster.colocate or in_process,
        on_gpu=on_gpu,
    )


class ExecutorBackend:
    """Base class of executor backends. Other packages derive from it, with a constructor without arguments."""

    settings_class: ClassVar[type[BaseModel] | None] = None
    """Class of the executor's own settings section, which has the executor's name. None if there is none."""

    def check(self, settings: Settings) -> None:
        """Check that it can work, before anything is built. Raises an error with the remedy."""

    def spans_machines(self, settings: Settings) -> bool:
        """Return whether servers that it hosts must be reachable from other machines."""
        return True

    def build(self, settings: Settings, *, logs: Path | None, trains: bool) -> Executor:
        """Build the executor. Ranks and actors log to files in `logs`. Ranks get GPUs only if `trains` is true."""
        raise NotImplementedError

    def commands(self, sweep: SweepSettings, settings: Settings) -> Commands:
        """Build the slots of a sweep whose runs have settings like these."""
        raise SettingsError(f"sweep.executor: {sweep.executor} cannot run sweeps. Set it to local or ray.")


class LocalBackend(ExecutorBackend):
    """Threads and processes of this machine."""

    def spans_machines(self, settings: Settings) -> bool:
        return False

    def check(self, settings: Settings) -> None:
        self._servers_gpus(settings, trains=True)  # raises

    def build(self, settings: Settings, *, logs: Path | None, trains: bool) -> Executor:
        from slimectl.executors.local import LocalExecutor

        places, gpus = self._servers_gpus(settings, trains=trains)
        return LocalExecutor(logs=logs, placement=places, gpus=gpus)

    def _servers_gpus(self, settings: Settings, *, trains: bool) -> tuple[Placement | None, list[str]]:
        """Return the placement of servers on GPUs, and this machine's GPUs.

        Raises SettingsError if they are too few.
        """
        from slimectl.executors.commands import visible_gpus

        if not settings.uses_servers or settings.engine.url or device(settings.engine.device) != "cuda":
            return None, []
        places, gpus = placement(settings), visible_gpus()
        if not trains or device(settings.train.device) != "cuda":
            places = replace(places, actor_nodes=0)
        if problems := list(places.problems()):
            raise SettingsError("\n".join(problems))
        if places.nodes > 1 or len(places.bundles) > len(gpus):
            shared = "" if settings.cluster.colocate else ", or let engines and trainer share them (cluster.colocate)"
            raise SettingsError(
                f"cluster.rollout_num_gpus: engines and trainer need {len(places.bundles)} GPUs, but this machine shows"
                f" {len(gpus)}. Use fewer{shared}, or use more machines (cluster.executor = ray)."
            )
        return places, gpus

    def commands(self, sweep: SweepSettings, settings: Settings) -> Commands:
        from slimectl.executors.commands import LocalCommands, visible_gpus

        devices = visible_gpus() if device("auto") == "cuda" else []
        return LocalCommands(slots=sweep.slots, devices=devices, gpus=_gpus(sweep, settings))


class RayBackend(ExecutorBackend):
    """A Ray cluster, or one that is started on this machine."""

    def check(self, settings: Settings) -> None:
        if find_spec("ray") is None:
            raise MissingExtraError("ray", extra="ray", wanted_by='cluster.executor = "ray"')
        if settings.cluster.ray_address is not None:
            from slimectl.executors.ray.cluster import check_address

            check_address(settings.cluster.ray_address)
        if problems := list(placement(settings).problems()):
            raise SettingsError("\n".join(problems))

    def spans_machines(self, settings: Settings) -> bool:
        return settings.cluster.ray_address is not None

    def build(self, settings: Settings, *, logs: Path | None, trains: bool) -> Executor:
        self.check(settings)
        from slimectl.executors.ray import RayExecutor

        places = placement(settings) if trains else replace(placement(settings), actor_nodes=0)
        return RayExecutor(settings.cluster.ray_address, placement=places if places.bundles else None, logs=logs)

    def commands(self, sweep: SweepSettings, settings: Settings) -> Commands:
        if find_spec("ray") is None:
            raise MissingExtraError("ray", extra="ray", wanted_by='sweep.executor = "ray"')
        from slimectl.executors.ray.commands import RayCommands

        gpus = _gpus(sweep, settings) if device("auto") == "cuda" or sweep.gpus else 0.0
        return RayCommands(sweep.ray_address, slots=sweep.slots, cpus=sweep.cpus, gpus=gpus)


def _gpus(sweep: SweepSettings, settings: Settings) -> float:
    """Return the GPUs of a run of a sweep. A run on Ray reserves its own from the cluster."""
    if sweep.gpus is not None:
        return sweep.gpus
    if settings.cluster.executor == "ray":
        return 0.0
    return float(len(placement(settings).bundles) if settings.uses_servers else settings.cluster.ranks)


def commands(sweep: SweepSettings, settings: Settings) -> Commands:
    """Build the slots that sweep.executor names."""
    return backend(EXECUTORS, sweep.executor, ExecutorBackend).commands(sweep, settings)


def executor_backend(settings: Settings) -> ExecutorBackend:
    """Return what cluster.executor names."""
    return backend(EXECUTORS, settings.cluster.executor, ExecutorBackend)


def executor(settings: Settings, *, logs: Path | None = None, trains: bool = True) -> Executor:
    """Build the executor that cluster.executor names. Output of ranks and actors goes to files in `logs`.

    Without `trains`, no GPUs are reserved for ranks.
    """
    return executor_backend(settings).build(settings, logs=logs, trains=trains)
