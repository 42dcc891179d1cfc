"""Settings to trackers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimectl.settings import Settings

if TYPE_CHECKING:
    from slimectl.ports import Tracker


def trackers(settings: Settings, folder: Path, *, resumed_at: int | None = None, done: int = 0) -> list[Tracker]:
    """The trackers of [track]; the run's own metrics.jsonl is written besides."""
    makers: dict[str, Callable[[dict[str, Any]], Tracker]] = {
        "stdout": partial(_stdout, settings.run.num_rollout, done),
        "jsonl": partial(_jsonl, folder),
        "tensorboard": partial(_tensorboard, folder, resumed_at, settings.track.always_use_train_step),
    }
    return [makers[name](settings.track.kwargs.get(name, {})) for name in settings.track.with_]


def _stdout(total: int | None, done: int, kwargs: dict[str, Any]) -> Tracker:
    """A live bar on a terminal, a plain line a step elsewhere."""
    import sys

    if sys.stderr.isatty():
        from slimectl.trackers.progress import ProgressTracker

        return ProgressTracker(total=total, done=done)
    from slimectl.trackers.stdout import StdoutTracker

    return StdoutTracker(**kwargs)


def _jsonl(folder: Path, kwargs: dict[str, Any]) -> Tracker:
    """What every tracker gets, metrics and times in one line; metrics.jsonl has only what the seed decides."""
    from slimectl.trackers.jsonl import JsonlTracker

    return JsonlTracker(Path(kwargs.get("path", folder / "tracked.jsonl")))


def _tensorboard(folder: Path, resumed_at: int | None, one_axis: bool, kwargs: dict[str, Any]) -> Tracker:
    from slimectl.trackers.tensorboard import TensorboardTracker

    return TensorboardTracker(folder / "tensorboard", one_axis=one_axis, purge_step=resumed_at, **kwargs)
