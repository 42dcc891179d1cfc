"""Logging and tracking for your own programs: `configure_logger`, `init_tracking` and `log`."""

from __future__ import annotations

import atexit
import logging
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimectl.data.json_values import plain_number
from slimectl.data.metrics_catalogue import axis_of
from slimectl.errors import SettingsError
from slimectl.hooks.args import FlatSettings, settings_of
from slimectl.hooks.logged_metrics import collect
from slimectl.runtime import builders
from slimectl.settings import Settings
from slimectl.system.stdio import logger

if TYPE_CHECKING:
    from slimectl.protocols import Tracker

DATE_FORMAT = "%Y-%m-%d %H:%M:%S"


class _Session:
    """Logger and trackers of this process."""

    is_configured = False
    trackers: list[Tracker] | None = None
    """None before init_tracking."""
    joined = ExitStack()
    """Another process's run that this one has joined."""


_session = _Session()


def configure_logger(prefix: str = "") -> None:
    """Send messages of level INFO and above to stderr, as `[2026-01-31 12:00:00 PREFIX] file.py:7 - message`.

    Only the first call in a process has an effect. `prefix` follows the time directly.
    """
    if _session.is_configured:
        return
    _session.is_configured = True
    escaped = prefix.replace("%", "%%")
    message_format = f"[%(asctime)s{escaped}] %(filename)s:%(lineno)d - %(message)s"
    logging.basicConfig(level=logging.INFO, format=message_format, datefmt=DATE_FORMAT, force=True)


def init_tracking(args: Any, primary: bool = True) -> None:
    """Start the trackers of `args`: wandb with use_wandb, TensorBoard with use_tensorboard, others of track.with.

    A secondary process (`primary` false) writes into the wandb run of the primary, if that is in the mode "shared" and
    `args.wandb_run_id` has its id, which the primary sets. Otherwise it logs nothing. Raises BackendError or
    MissingExtraError if a tracker cannot start, and SettingsError if tracking has already started.
    """
    if _session.trackers is not None:
        raise SettingsError("init_tracking was already called in this process. Call finish_tracking first.")
    settings = _tracked_settings(args)
    folder = Path(settings.run.dir) / (settings.run.name or "run")
    if primary:
        builders.check_trackers(settings)
        if settings.track.with_ or settings.track.prometheus_port is not None:
            folder.mkdir(parents=True, exist_ok=True)
        _session.trackers = builders.start_trackers(settings, folder)
        if "wandb" in settings.track.with_:
            args.wandb_run_id = builders.identity(settings, folder).run_id
    else:
        _session.trackers = []
        if "wandb" in settings.track.with_ and settings.track.mode == "shared" and settings.track.run_id:
            _session.joined.enter_context(builders.joined_wandb_run(settings, folder))
    atexit.register(finish_tracking)


def _tracked_settings(args: Any) -> Settings:
    """Return the settings of `args`, without the terminal's tracker and with a changed wandb_run_id."""
    settings = settings_of(args)
    changes: dict[str, Any] = {"with_": [name for name in settings.track.with_ if name != "stdout"]}
    if isinstance(args, FlatSettings) and "wandb_run_id" in vars(args):
        changes["run_id"] = args.wandb_run_id
    return settings.model_copy(update={"track": settings.track.model_copy(update=changes)})


def log(args: Any, metrics: Mapping[str, Any], step_key: str) -> None:
    """Send metrics to the trackers, at the step `metrics[step_key]`.

    Does nothing in a process without trackers. In a log or rollout function of a run, the metrics are logged to the run
    at its own step. Raises SettingsError if the step is missing, if a metric is not a number, and before init_tracking.
    """
    step = plain_number(metrics.get(step_key))
    if step is None:
        raise SettingsError(f"log: metrics has no number under {step_key!r}, the key of the step. Add it.")
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        number = plain_number(value)
        if number is None:
            raise SettingsError(f"log: the metric {name!r} is {value!r:.60}. Metrics are numbers.")
        numbers[name] = number
    if collect({name: number for name, number in numbers.items() if name != step_key}):
        return
    if _session.trackers is None:
        raise SettingsError("log: tracking has not started. Call init_tracking(args) first.")
    axes = {axis_of(name): step for name in numbers}
    for tracker in _session.trackers:
        tracker.log({**axes, **numbers}, step=int(step))


def finish_tracking() -> None:
    """Close the trackers after they have written everything. Also called when the program ends."""
    trackers, _session.trackers = _session.trackers or [], None
    for tracker in trackers:
        tracker.close()
    try:
        _session.joined.close()
    except Exception as error:
        logger.warning(f"track.mode: the wandb run could not be closed: {error}")
