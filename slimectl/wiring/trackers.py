"""Settings to trackers."""

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
    from slimectl.ports import Tracker
    from slimectl.trackers.identity import Identity

EXTRAS = ("tensorboard", "wandb", "swanlab")
"""Trackers that need a library, of their own name, which the extra of that name installs."""

ID_LENGTH = 8
SUFFIX_LENGTH = 6


def check_trackers(settings: Settings) -> None:
    """Raises MissingExtraError if a tracker's library is not installed; none is loaded."""
    for name in settings.track.with_:
        if name in EXTRAS and find_spec(name) is None:
            raise MissingExtraError(name, extra=name, wanted_by="track.with")


def trackers(settings: Settings, folder: Path, *, resumed_at: int | None = None, done: int = 0) -> list[Tracker]:
    """The trackers of [track]; the run's own metrics.jsonl is written besides.

    Raises MissingExtraError, SettingsError or BackendError if one cannot start; those that have started are closed.
    """
    from slimectl.trackers.guarded import Guarded

    one_axis = settings.track.always_use_train_step
    makers: dict[str, Callable[[dict[str, Any]], Tracker]] = {
        "stdout": partial(_stdout, settings.run.num_rollout, done),
        "jsonl": partial(_jsonl, folder),
        "tensorboard": partial(_tensorboard, folder, resumed_at, one_axis),
        "wandb": partial(_wandb, settings, folder),
        "swanlab": partial(_swanlab, settings, folder),
    }
    made: list[Tracker] = []
    try:
        for name in settings.track.with_:
            tracker = makers[name](settings.track.kwargs.get(name, {}))
            made.append(Guarded(name, tracker if name == "stdout" else _named(tracker, settings)))
    except BaseException:
        for tracker in made:
            tracker.close()
        raise
    return made


def _named(tracker: Tracker, settings: Settings) -> Tracker:
    """The tracker, getting the names that [track] asks for; the words on the terminal are not named after metrics."""
    from slimectl.trackers.roll_names import Renamed

    if settings.track.naming == "slime":
        return tracker
    return Renamed(
        tracker, keep_slime_names=settings.track.naming == "both", prompts_per_round=settings.run.rollout_batch_size
    )


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


def _wandb(settings: Settings, folder: Path, kwargs: dict[str, Any]) -> Tracker:
    from slimectl.trackers.wandb import WandbTracker

    track = settings.track
    where = Path(track.dir) if track.dir else folder  # wandb makes a folder `wandb` in it
    return WandbTracker(where, identity(settings, folder), one_axis=track.always_use_train_step, **kwargs)


def _swanlab(settings: Settings, folder: Path, kwargs: dict[str, Any]) -> Tracker:
    from slimectl.trackers.swanlab import SwanlabTracker

    track = settings.track
    where = Path(track.dir) if track.dir else folder / "swanlab"
    return SwanlabTracker(where, identity(settings, folder), one_axis=track.always_use_train_step, **kwargs)


def identity(settings: Settings, folder: Path) -> Identity:
    """As what services know this run; its id is drawn once, and kept in the run's folder for a resume."""
    from slimectl.data.rundir import write_text
    from slimectl.trackers.identity import Identity

    track, kept = settings.track, folder / "track.json"
    if not kept.exists():
        letters = string.ascii_lowercase + string.digits
        write_text(kept, json.dumps({"run_id": "".join(secrets.choice(letters) for _ in range(ID_LENGTH))}) + "\n")
    drawn: str = json.loads(kept.read_text())["run_id"]
    name = settings.run.name or "run"
    config = redact(settings.model_dump(mode="json", by_alias=True))
    config["track"].pop("kwargs")
    return Identity(
        run_id=track.run_id or drawn,
        name=f"{name}-{drawn[:SUFFIX_LENGTH]}" if track.random_suffix else name,
        project=track.project,
        entity=track.entity,
        group=track.group,
        mode=track.mode,
        host=track.host,
        config=config,
    )
