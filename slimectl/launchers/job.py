"""A run as a job: its commands, and the machines that it needs."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from slimectl.errors import SettingsError
from slimectl.planner.placement import Placement
from slimectl.settings import Settings
from slimectl.settings.launch import LaunchSettings

RAY_PORT = 6379
SIGNAL_EARLY_S = 60
"""Seconds by which Slurm may send the signal before its time (sbatch --signal)."""


@dataclass(frozen=True)
class Job:
    """A run to start or to resume, on `nodes` machines with `gpus_per_node` GPUs each (0 on CPUs)."""

    name: str
    folder: str
    """Folder to start in. Empty: where the scheduler starts it."""
    run: str
    """Folder of the run, relative to `folder` or absolute."""
    arguments: tuple[str, ...]
    """Arguments of `slimectl run` that describe the run: a recipe or a file, -c, -s."""
    nodes: int
    gpus_per_node: int
    executor: str
    address: str | None
    """Address of a running Ray cluster."""
    options: LaunchSettings
    changes: tuple[str, ...] = ()
    """Settings (-s) for a run that existed before the launch."""

    @property
    def start(self) -> str:
        """Command that starts the run."""
        return shlex.join(["slimectl", "run", *self.arguments])

    @property
    def resume(self) -> str:
        """Command that resumes the run."""
        return shlex.join(["slimectl", "run", "--resume", self.run, *self.changes])

    @property
    def uses_ray(self) -> bool:
        return self.executor == "ray"

    @property
    def label(self) -> str:
        """The name as Kubernetes and SkyPilot allow it: it starts with a letter and ends with a letter or digit."""
        words = re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")
        return (words if words[:1].isalpha() else f"run-{words}")[:40].strip("-")


def job_of(settings: Settings, arguments: tuple[str, ...], folder: Path, placement: Placement) -> Job:
    """Return the job of a run with these settings, whose parts are placed as in `placement`.

    Raises SettingsError if several machines are needed without Ray, or if the signal leaves no time to save or to run.
    """
    run, cluster, options = settings.run, settings.cluster, settings.launch
    if options.term_s <= run.grace_s:
        raise SettingsError(
            f"launch.term_s: {options.term_s} leaves no time to save after run.grace_s: {run.grace_s:g}. Raise the "
            f"first, or lower the second."
        )
    if options.time_limit_s <= options.term_s + SIGNAL_EARLY_S:
        raise SettingsError(
            f"launch.time_limit: {options.time_limit} leaves no time to run. Slurm signals the job launch.term_s: "
            f"{options.term_s} seconds before the limit, and up to {SIGNAL_EARLY_S} seconds earlier."
        )
    name = run.name or "run"
    nodes = placement.nodes
    per_node = max((bundle.gpu for bundle in placement.bundles), default=-1) + 1
    if settings.train.device == "cpu":
        nodes, per_node = cluster.actor_num_nodes, 0
    if nodes > 1 and cluster.executor != "ray":
        raise SettingsError(f'cluster.executor: the run needs {nodes} machines. Set cluster.executor = "ray".')
    return Job(
        name=name,
        folder=str(folder),
        run=str(Path(run.dir) / name),
        arguments=arguments,
        nodes=nodes,
        gpus_per_node=per_node,
        executor=cluster.executor,
        address=cluster.ray_address,
        options=options,
    )
