"""Builds executors and the GPU placement from settings."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from slimectl.builders.models import device
from slimectl.errors import MissingExtraError, SettingsError
from slimectl.planner.placement import Placement
from slimectl.settings import Settings

if TYPE_CHECKING:
    from slimectl.executors.local import LocalExecutor
    from slimectl.protocols import Executor


def placement(settings: Settings) -> Placement:
    """Assign the GPUs of every machine to trainer ranks and engines."""
    cluster = settings.cluster
    on_gpu = "cuda" in (settings.train.device, settings.engine.device) or device("auto") == "cuda"
    return Placement(
        actor_nodes=cluster.actor_num_nodes,
        actor_gpus_per_node=cluster.actor_num_gpus_per_node,
        engines=0 if settings.engine.url else settings.num_engines,
        gpus_per_engine=cluster.rollout_num_gpus_per_engine,
        gpus_per_node=cluster.num_gpus_per_node,
        colocate=cluster.colocate,
        on_gpu=on_gpu,
    )


def check_executor(settings: Settings) -> None:
    """Check the executor before anything is built. Raises MissingExtraError, or SettingsError for a bad placement."""
    if settings.cluster.executor != "ray":
        return
    if find_spec("ray") is None:
        raise MissingExtraError("ray", extra="ray", wanted_by='cluster.executor = "ray"')
    if problems := list(placement(settings).problems()):
        raise SettingsError("\n".join(problems))


def executor(settings: Settings, *, logs: Path | None = None, trains: bool = True) -> Executor:
    """Build the executor: of this machine, or of a Ray cluster; output of ranks and actors goes to files in `logs`.

    Without `trains`, no GPUs are reserved for ranks.
    """
    if settings.cluster.executor == "ray":
        check_executor(settings)
        from slimectl.executors.ray import RayExecutor

        places = placement(settings) if trains else replace(placement(settings), actor_nodes=0)
        return RayExecutor(settings.cluster.ray_address, placement=places if places.bundles else None, logs=logs)
    from slimectl.executors.local import LocalExecutor

    return LocalExecutor(logs=logs)


def graders() -> LocalExecutor:
    """Build the executor of the processes of this machine that grade samples."""
    from slimectl.executors.local import LocalExecutor

    return LocalExecutor()
