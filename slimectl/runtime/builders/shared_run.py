"""Shares one wandb run between the driver and the trainer's ranks: track.mode = "shared"."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimectl.runtime.builders.trackers import identity, tracked_run, tracker_arguments
from slimectl.settings import Settings

if TYPE_CHECKING:
    from slimectl.protocols import Executor, RankGroup, RankPipe, Serve
    from slimectl.trackers.base import Identity


def tracked_executor(executor: Executor, settings: Settings, folder: Path) -> Executor:
    """Return an executor whose ranks write into the wandb run if track.mode is shared, else the given one."""
    if settings.track.mode != "shared":
        return executor
    sharing: Executor = RunSharingExecutor(executor, *_shared_run(settings, folder))
    return sharing


def joined_wandb_run(settings: Settings, folder: Path) -> AbstractContextManager[None]:
    """Return a context in which this process writes into a wandb run that another process started."""
    return _join_run(*_shared_run(settings, folder), f"process-{os.getpid()}")


def _shared_run(settings: Settings, folder: Path) -> tuple[Identity, Path, Mapping[str, Any]]:
    """Return the wandb run, the folder of its files, and wandb's own settings."""
    run, arguments = identity(settings, folder), tracker_arguments("wandb", settings)
    log_dir = tracked_run(settings, folder).log_dir
    run = replace(
        run,
        project=arguments.get("project", run.project),
        entity=arguments.get("entity", run.entity),
        run_id=arguments.get("id", run.run_id),
        # Ranks on other machines do not have the environment of this one.
        host=run.host or os.environ.get("WANDB_BASE_URL"),
        api_key=run.api_key or os.environ.get("WANDB_API_KEY"),
        config=None,
    )
    place = Path(arguments.get("dir") or arguments.get("log_dir") or log_dir or folder) / "wandb"
    return run, place, arguments.get("settings", {})


class RunSharingExecutor:
    """An executor whose ranks join the wandb run before they serve requests, and leave it when they end.

    The label of a rank is `rank-R`, or `rank-R-of-G` in the G-th group of ranks, such as a critic's.
    """

    def __init__(self, executor: Executor, run: Identity, folder: Path, settings: Mapping[str, Any]) -> None:
        self._executor = executor
        self._join = partial(_join_run, run, folder, settings)
        self._groups = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def group(self, serve: Serve, build: Callable[[], Any], *, ranks: int) -> RankGroup:
        self._groups += 1
        return self._executor.group(partial(_serve_in_run, self._join, self._groups, serve), build, ranks=ranks)


def _join_run(run: Identity, folder: Path, settings: Mapping[str, Any], label: str) -> AbstractContextManager[None]:
    from slimectl.trackers.wandb import joined_run

    return joined_run(run, folder / label, label, settings)


def _serve_in_run(
    join: Callable[[str], AbstractContextManager[None]],
    group: int,
    serve: Serve,
    build: Callable[[], Any],
    pipe: RankPipe,
) -> None:
    """Serve a rank's requests within the wandb run."""
    rank = os.environ["RANK"]
    with join(f"rank-{rank}" if group == 1 else f"rank-{rank}-of-{group}"):
        serve(build, pipe)
