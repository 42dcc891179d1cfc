"""Builds the trackers of [track]."""

from __future__ import annotations

import json
import secrets
import string
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from slimectl.errors import MissingExtraError
from slimectl.redaction import redact
from slimectl.registry import TRACKERS
from slimectl.settings import Settings

if TYPE_CHECKING:
    from slimectl.protocols import Tracker
    from slimectl.trackers.base import Identity, TrackedRun

ID_LENGTH = 8
SUFFIX_LENGTH = 6


def check_trackers(settings: Settings) -> None:
    """Check, without loading any library, that the trackers can start.

    Raises MissingExtraError for a library that is not installed, BackendError for a package that is broken.
    """
    for name in settings.track.with_:
        library = TRACKERS.fact(name, "library")
        if library is not None and find_spec(library) is None:
            raise MissingExtraError(library, extra=library, wanted_by="track.with")


def trackers(settings: Settings, folder: Path, *, resumed_at: int | None = None, done: int = 0) -> list[Tracker]:
    """Build the trackers of [track]; the run's metrics.jsonl is written independently of them.

    Raises MissingExtraError, SettingsError or BackendError if one cannot start; those that have started are closed.
    """
    from slimectl.trackers.base import FaultTolerantTracker, TrackedRun

    track = settings.track
    run = TrackedRun(
        folder,
        partial(identity, settings, folder),
        log_dir=Path(track.dir) if track.dir else None,
        one_axis=track.always_use_train_step,
        resumed_at=resumed_at,
        rounds=settings.run.num_rollout,
        rounds_done=done,
    )
    started: list[Tracker] = []
    try:
        for name in track.with_:
            tracker = _start(name, run, settings)
            renames = TRACKERS.fact(name, "renames", False)
            started.append(FaultTolerantTracker(name, tracker if renames else _renamed(tracker, settings)))
    except BaseException:
        for tracker in started:
            tracker.close()
        raise
    return started


def _start(name: str, run: TrackedRun, settings: Settings) -> Tracker:
    """Call a tracker's class with the run, its track.kwargs and, if it brings settings, its own section."""
    from slimectl.trackers.base import starting

    make, arguments = TRACKERS.load(name), dict(settings.track.kwargs.get(name, {}))
    if TRACKERS.is_third_party(name) and (cls := getattr(make, "settings_class", None)):
        arguments["settings"] = settings.part_section(name, cls)
    with starting(name, way_out=f"repair {TRACKERS.package(name)}, or drop {name} from track.with"):
        tracker: Tracker = make(run, **arguments)
    return tracker


def _renamed(tracker: Tracker, settings: Settings) -> Tracker:
    """Wrap a tracker to rename metrics as [track] says; the terminal's tracker has words of its own."""
    from slimectl.trackers.roll_names import Renamed

    if settings.track.naming == "slime":
        return tracker
    return Renamed(
        tracker, keep_slime_names=settings.track.naming == "both", prompts_per_round=settings.run.rollout_batch_size
    )


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
