"""The settings stored in a run's folder, and the working folder that their relative paths start from."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from slimectl.data.ownership import read_manifest
from slimectl.errors import SettingsError
from slimectl.settings import Settings
from slimectl.settings.keys import flat, toml_value, unused_interpreters
from slimectl.settings.layers import from_file
from slimectl.settings.loading import resolve
from slimectl.system.redaction import MASK, redact

RUN_TOML = "run.toml"


def run_path(run: Path) -> Path:
    """Return the path of a run's folder from its own settings, run.dir/run.name. It may be relative."""
    settings = {}
    with suppress(OSError, ValueError):
        settings = tomllib.loads((run / RUN_TOML).read_text(encoding="utf-8")).get("run", {})
    return Path(str(settings.get("dir", "runs"))) / str(settings.get("name") or "run")


def working_folder(run: Path) -> Path | None:
    """Return the folder in which a run was started, or None if it is unknown or no longer exists.

    The manifest records it. If the project was moved, or for a run of an earlier version, it is the folder from which
    run.dir/run.name leads to the run.
    """
    recorded, own = (read_manifest(run) or {}).get("folder"), run_path(run)
    started = Path(recorded) if isinstance(recorded, str) and Path(recorded).is_dir() else None
    if started is not None and (started / own).exists() and (started / own).samefile(run):
        return started
    absolute = Path(os.path.abspath(run))
    if not own.is_absolute() and absolute.parts[-len(own.parts) :] == own.parts:
        return Path(*absolute.parts[: -len(own.parts)])
    return started


def changed_settings(settings: Settings, run: Path) -> Iterator[str]:
    """Yield the settings that differ from the run's file, with both values. Secrets are left out."""
    try:
        before = dict(flat(resolve([from_file(run / RUN_TOML)]).settings))
    except SettingsError:  # a file of an older version may need settings from the command line
        return
    skipped = {"run.name", "run.dir", *unused_interpreters(settings.engine.backend)}
    for key, value in flat(settings):
        old, new = redact(before.get(key)), redact(value)
        # --resume determines the name and location of the folder.
        if old != new and MASK not in (old, new) and key not in skipped:
            yield f"{key} = {toml_value(new)} (was {toml_value(old)})"
