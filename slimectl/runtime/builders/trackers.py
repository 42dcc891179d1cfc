"""Builds the trackers of [track]."""

from __future__ import annotations

import json
import os
import secrets
import string
import sys
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimectl.errors import BackendError, MissingExtraError, SettingsError
from slimectl.plugins.registry import TRACKERS
from slimectl.protocols import NO_PROGRESS, Progress
from slimectl.settings import Settings
from slimectl.settings.placeholders import filled
from slimectl.settings.run import KEY_VARIABLES
from slimectl.settings.secret import reveal
from slimectl.system.redaction import redact, without_secrets
from slimectl.types import Sample, TableRow

if TYPE_CHECKING:
    from slimectl.protocols import Tracker
    from slimectl.trackers.base import Identity, TrackedRun

ID_LENGTH = 8
SUFFIX_LENGTH = 6


def check_trackers(settings: Settings) -> None:
    """Check that the trackers can start. Loads only the libraries that have arguments in track.kwargs.

    Raises MissingExtraError for a library that is not installed, and BackendError for a broken package. Raises
    SettingsError for an unknown argument in track.kwargs, and for a shared run that is set to offline.
    """
    for name in settings.track.with_:
        library = TRACKERS.fact(name, "library")
        if library is not None and find_spec(library) is None:
            raise MissingExtraError(library, extra=library, wanted_by="track.with")
        if settings.track.kwargs.get(name):
            _check_arguments(name, settings)
        tracker_arguments(name, settings)
        _api_key(name, settings)
    _check_shared_mode(settings)
    _place(settings)
    if settings.track.prometheus_port is not None:
        if find_spec("prometheus_client") is None:
            raise MissingExtraError("prometheus_client", extra="prometheus", wanted_by="track.prometheus_port")
        from slimectl.trackers.prometheus import check_address

        check_address(settings.track.prometheus_host, settings.track.prometheus_port)


def check_tracker_arguments(settings: Settings) -> None:
    """Raise SettingsError for unknown arguments in track.kwargs, for every tracker whose library is installed."""
    for name in settings.track.kwargs:
        library = TRACKERS.fact(name, "library")
        if library is None or find_spec(library) is not None:
            _check_arguments(name, settings)


def _check_arguments(name: str, settings: Settings) -> None:
    """Raise SettingsError for an argument of track.kwargs that the tracker does not accept."""
    from slimectl.trackers.arguments import accepted_arguments, check_arguments
    from slimectl.trackers.base import starting

    with starting(name, way_out=f"fix its library, or drop {name} from track.with"), redirect_stdout(sys.stderr):
        accepted = accepted_arguments(TRACKERS.load(name))
    if accepted is not None:
        account = {"api_key": None} if name in KEY_VARIABLES else {}
        check_arguments(f"track.kwargs.{name}", settings.track.kwargs[name], {**accepted, **account})


def _is_offline(name: str, settings: Settings) -> bool:
    """Return whether a tracker is in a mode that needs no account."""
    from slimectl.trackers.base import is_offline

    return is_offline(name, settings.track.kwargs.get(name, {}).get("mode") or settings.track.mode)


def tracker_arguments(name: str, settings: Settings) -> dict[str, Any]:
    """Return a tracker's track.kwargs without its key, with references resolved. Offline, secrets are dropped."""
    setting = f"track.kwargs.{name}"
    options = {key: value for key, value in settings.track.kwargs.get(name, {}).items() if key != "api_key"}
    if _is_offline(name, settings):
        options = without_secrets(options)
    arguments: dict[str, Any] = reveal(filled(options, settings, setting=setting), setting=setting)
    return arguments


def _api_key(name: str, settings: Settings) -> str | None:
    """Return the key of a tracker's account, if settings have one and the tracker is not offline."""
    if name not in KEY_VARIABLES or _is_offline(name, settings):
        return None
    key: str | None = settings.track.kwargs.get(name, {}).get("api_key")
    setting = f"track.kwargs.{name}.api_key" if key else "track.api_key"
    key = reveal(key or settings.track.api_key, setting=setting)
    return key


def _place(settings: Settings) -> dict[str, str | None]:
    """Return project, entity, group, run_id and dir of [track], with placeholders replaced."""
    names = ("project", "entity", "group", "run_id", "dir")
    return {name: filled(getattr(settings.track, name), settings, setting=f"track.{name}") for name in names}


def _check_shared_mode(settings: Settings) -> None:
    """Raise SettingsError if track.mode is shared but another source sets a different wandb mode."""
    if settings.track.mode != "shared":
        return
    modes = {
        "track.kwargs.wandb.mode": settings.track.kwargs.get("wandb", {}).get("mode"),
        "WANDB_MODE": os.environ.get("WANDB_MODE"),
    }
    for source, mode in modes.items():
        if mode in ("offline", "dryrun", "disabled"):
            raise SettingsError(
                f"track.mode: shared contradicts {source} = {mode}: a shared run needs wandb's server, and "
                f"wandb has no offline shared mode. Drop {source}, or set track.mode = {mode}."
            )


def start_trackers(
    settings: Settings,
    folder: Path,
    *,
    resumed: bool = False,
    resumed_at: int | None = None,
    rounds: int | None = None,
    done: int = 0,
    progress: Progress = NO_PROGRESS,
) -> list[Tracker]:
    """Build the trackers of [track]. The run's metrics.jsonl is written independently of them.

    `rounds` is the number of rounds, if known, and `done` the number of finished ones. `resumed` is true if the run has
    records from before. `progress` shows the run on a terminal.

    Raises MissingExtraError, SettingsError or BackendError if one cannot start. All started trackers are then closed.
    """
    from slimectl.trackers.base import FaultTolerantTracker

    run = replace(
        tracked_run(settings, folder),
        resumed=resumed,
        resumed_at=resumed_at,
        rounds=rounds,
        rounds_done=done,
        progress=progress,
    )
    started: list[Tracker] = []
    try:
        for name in settings.track.with_:
            tracker = _start(name, run, settings)
            renames = TRACKERS.fact(name, "renames", False)
            started.append(FaultTolerantTracker(name, tracker if renames else _renamed(tracker, settings)))
        if settings.track.prometheus_port is not None:
            from slimectl.trackers.prometheus import PrometheusTracker

            endpoint = PrometheusTracker(run, host=settings.track.prometheus_host, port=settings.track.prometheus_port)
            renamed = _renamed(endpoint, settings)
            started.append(FaultTolerantTracker("the endpoint", renamed, setting="track.prometheus_port"))
    except BaseException:
        for tracker in started:
            tracker.close()
        raise
    return started


def tracked_run(settings: Settings, folder: Path) -> TrackedRun:
    """Return the description of the run that every tracker gets, from [track]."""
    from slimectl.trackers.base import TrackedRun

    log_dir = _place(settings)["dir"]
    return TrackedRun(
        folder,
        partial(identity, settings, folder),
        log_dir=Path(log_dir) if log_dir else None,
        one_axis=settings.track.always_use_train_step,
    )


def sample_table(
    trackers: Sequence[Tracker], settings: Settings, name: str, samples: Iterable[Sample]
) -> list[TableRow]:
    """Return the samples of the dataset `name` for the trackers: track.samples, or the rows that a terminal shows."""
    rows = max((_table_rows(tracker, settings) for tracker in trackers), default=0)
    from slimectl.stages.evaluate import resolve_dataset_settings, table_of

    return table_of(samples, rows, reward_key=resolve_dataset_settings(settings, name).score.reward_key)


def log_samples(
    trackers: Sequence[Tracker], settings: Settings, name: str, table: Sequence[TableRow], *, step: int
) -> None:
    """Log a table of samples of the dataset `name`, with the number of rows that each tracker uses."""
    for tracker in trackers:
        if rows := table[: _table_rows(tracker, settings)]:
            tracker.table(f"eval/{name}/samples", rows, step=step)


def log_rewards(trackers: Sequence[Tracker], rewards: Sequence[float], *, step: int) -> None:
    """Log a histogram of the rewards of a round to the trackers that support it."""
    from slimectl.trackers.base import log_histogram

    for tracker in trackers if rewards else ():
        log_histogram(tracker, "rollout/reward_histogram", rewards, step=step)


def _table_rows(tracker: Tracker, settings: Settings) -> int:
    """Return a tracker's number of table rows: track.samples, or its attribute `shown_rows` if that is larger."""
    return max(settings.track.samples, getattr(tracker, "shown_rows", 0))


def evaluation_trackers(settings: Settings) -> list[Tracker]:
    """Build the trackers of an evaluation outside a run, except the terminal, which has its own summary.

    Their files go into the folder NAME-eval under run.dir, so that evaluations with the same name form one curve. No
    endpoint is opened, because it would close at once.
    """
    names = [name for name in settings.track.with_ if name != "stdout"]
    if not names:
        return []
    folder = Path(settings.run.dir) / "-".join(filter(None, (settings.run.name, "eval")))
    folder.mkdir(parents=True, exist_ok=True)
    track = settings.track.model_copy(update={"with_": names, "prometheus_port": None})
    return start_trackers(settings.model_copy(update={"track": track}), folder)


def _start(name: str, run: TrackedRun, settings: Settings) -> Tracker:
    """Create a tracker from the run, its track.kwargs and, if it has settings, its own section."""
    from slimectl.trackers.base import starting

    make = TRACKERS.load(name)
    if settings.track.kwargs.get(name):
        _check_arguments(name, settings)
    arguments = tracker_arguments(name, settings)
    run = replace(run, identity=partial(identity, settings, run.folder, tracker=name))
    if TRACKERS.is_third_party(name) and (cls := getattr(make, "settings_class", None)):
        arguments["settings"] = settings.part_section(name, cls)
    with starting(name, way_out=f"fix {TRACKERS.package(name)}, or drop {name} from track.with"):
        tracker: Tracker = make(run, **arguments)
    if lacking := [method for method in ("log", "table", "close") if not callable(getattr(tracker, method, None))]:
        raise BackendError(
            f"{TRACKERS.package(name)}: its tracker {name} lacks the method {' and '.join(lacking)}. Fix or "
            f"uninstall that package."
        )
    return tracker


def _renamed(tracker: Tracker, settings: Settings) -> Tracker:
    """Wrap a tracker to rename metrics according to [track]. The terminal's tracker has its own labels."""
    from slimectl.trackers.roll_names import Renamed

    if settings.track.naming == "slime":
        return tracker
    keeps_slime_names, prompts_per_round = settings.track.naming == "both", settings.run.rollout_batch_size
    renamed: Any = Renamed(tracker, keep_slime_names=keeps_slime_names, prompts_per_round=prompts_per_round)
    return renamed  # type: ignore[no-any-return]


def identity(settings: Settings, folder: Path, *, tracker: str = "wandb") -> Identity:
    """Return the run identity of a hosted tracker. Its id is drawn once and saved in the run's folder."""
    from slimectl.data.atomic_replace import write_text
    from slimectl.trackers.base import Identity

    track, file = settings.track, folder / "track.json"
    if not file.exists():
        letters = string.ascii_lowercase + string.digits
        write_text(file, json.dumps({"run_id": "".join(secrets.choice(letters) for _ in range(ID_LENGTH))}) + "\n")
    saved_id: str = json.loads(file.read_text())["run_id"]
    name = settings.run.name or "run"
    config = redact(settings.model_dump(mode="json", by_alias=True))
    config["track"].pop("kwargs")
    place = _place(settings)
    return Identity(
        run_id=place["run_id"] or saved_id,
        name=f"{name}-{saved_id[:SUFFIX_LENGTH]}" if track.random_suffix else name,
        project=place["project"] or track.project,
        entity=place["entity"],
        group=place["group"],
        mode=track.mode,
        host=track.host,
        api_key=_api_key(tracker, settings),
        config=config,
    )
