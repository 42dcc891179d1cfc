"""Builds the trackers of [track]."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimectl.errors import MissingExtraError
from slimectl.redaction import redact
from slimectl.settings import Settings

if TYPE_CHECKING:
    from slimectl.protocols import Tracker
    from slimectl.trackers.base import Identity

EXTRAS = ("tensorboard", "wandb", "swanlab")
"""Trackers that need a library of the same name, which the extra of that name installs."""

ID_LENGTH = 8
SUFFIX_LENGTH = 6


def check_trackers(settings: Settings) -> None:
    """Check that the trackers' libraries are installed, without loading them. Raises MissingExtraError."""
    for name in settings.track.with_:
        if name in EXTRAS and find_spec(name) is None:
            raise MissingExtraError(name, extra=name, wanted_by="track.with")


def trackers(settings: Settings, folder: Path, *, resumed_at: int | None = None, done: int = 0) -> list[Tracker]:
    """Build the trackers of [track]; the run's metrics.jsonl is written independently of them.

    Raises MissingExtraError, SettingsError or BackendError if one cannot start; those that have started are closed.
    """
    from slimectl.trackers.base import FaultTolerantTracker

    one_axis = settings.track.always_use_train_step
    makers: dict[str, Callable[[dict[str, Any]], Tracker]] = {
        "stdout": partial(_stdout, settings.run.num_rollout, done),
        "jsonl": partial(_jsonl, folder),
        "tensorboard": partial(_tensorboard, folder, resumed_at, one_axis),
        "wandb": partial(_wandb, settings, folder),
        "swanlab": partial(_swanlab, settings, folder),
    }
    started: list[Tracker] = []
    try:
        for name in settings.track.with_:
            tracker = makers[name](settings.track.kwargs.get(name, {}))
            started.append(FaultTolerantTracker(name, tracker if name == "stdout" else _renamed(tracker, settings)))
    except BaseException:
        for tracker in started:
            tracker.close()
        raise
    return started


def _renamed(tracker: Tracker, settings: Settings) -> Tracker:
    """Wrap a tracker to rename metrics as [track] says; the terminal's tracker has other words, and is not wrapped."""
    from slimectl.trackers.roll_names import Renamed

    if settings.track.naming == "slime":
        return tracker
    return Renamed(
        tracker, keep_slime_names=settings.track.naming == "both", prompts_per_round=settings.run.rollout_batch_size
    )


def _stdout(total: int | None, done: int, kwargs: dict[str, Any]) -> Tracker:
    """Build a live progress bar on a terminal, a plain line per step elsewhere."""
    import sys

    if sys.stderr.isatty():
        from slimectl.trackers.stdout import ProgressTracker

        return ProgressTracker(total=total, done=done)
    from slimectl.trackers.stdout import StdoutTracker

    return StdoutTracker(**kwargs)


def _jsonl(folder: Path, kwargs: dict[str, Any]) -> Tracker:
    """Build the JSONL tracker: metrics and times in a line; metrics.jsonl has only values that the seed determines."""
    from slimectl.trackers.jsonl import JsonlTracker

    return JsonlTracker(Path(kwargs.get("path", folder / "tracked.jsonl")))


def _tensorboard(folder: Path, resumed_at: int | None, one_axis: bool, kwargs: dict[str, Any]) -> Tracker:
    from slimectl.trackers.tensorboard import TensorboardTracker

    return TensorboardTracker(folder / "tensorboard", one_axis=one_axis, purge_step=resumed_at, **kwargs)


def _wandb(settings: Settings, folder: Path, kwargs: dict[str, Any]) -> Tracker:
    from slimectl.trackers.wandb import WandbTracker

    track = settings.track
    log_dir = Path(track.dir) if track.dir else folder  # wandb makes a folder `wandb` in it
    return WandbTracker(log_dir, identity(settings, folder), one_axis=track.always_use_train_step, **kwargs)


def _swanlab(settings: Settings, folder: Path, kwargs: dict[str, Any]) -> Tracker:
    from slimectl.trackers.swanlab import SwanlabTracker

    track = settings.track
    log_dir = Path(track.dir) if track.dir else folder / "swanlab"
    return SwanlabTracker(log_dir, identity(settings, folder), one_axis=track.always_use_train_step, **kwargs)


def identity(settings: Settings, folder: Path) -> Identity:
    """Return the run identity of hosted trackers; its id is drawn once, and saved in the run's folder for a resume."""
    from slimectl.data.run_dir import write_text
    from slimectl.trackers.base import Identity

    track, file = settings.track, folder / "track.json"
    if not file.exists():
        letters = string.ascii_lowercase + string.digits
        write_text(file, json.dumps({"run_id": "".join(secrets.choice(letters) for _ in range(ID_LENGTH))}) + "\n")
    saved_id: str = json.loads(file.read_text())["run_id"]
    name = settings.run.name or "run"
    config = redact(settings.model_dump(mode="json", by_alias=True))
    config["track"].pop("kwargs")
    return Identity(
        run_id=track.run_id or saved_id,
        name=f"{name}-{saved_id[:SUFFIX_LENGTH]}" if track.random_suffix else name,
        project=track.project,
        entity=track.entity,
        group=track.group,
        mode=track.mode,
        host=track.host,
        config=config,
    )
