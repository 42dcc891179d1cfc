"""Resumes a run: locks it, and changes to the working folder of its relative paths."""

from __future__ import annotations

import os
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimectl.cli.options import CommonOptions
from slimectl.errors import SettingsError
from slimectl.system import stdio

if TYPE_CHECKING:
    from collections.abc import Iterator

    from slimectl.data.locks import Lock


@dataclass(frozen=True)
class Resumed:
    """A run to resume: its folder, relative if it was so at its first start, and its lock."""

    folder: Path
    lock: Lock | None = None


@contextmanager
def resumable(
    command: str, options: CommonOptions, flags: dict[str, Any], run: Path | None
) -> Iterator[Resumed | None]:
    """Lock the folder of a run, then make its settings the lowest layer of `options`.

    The process changes to the folder in which the run was started, so that relative paths mean the same files.
    """
    if run is None:
        yield None
        return
    from slimectl.data.run_dir import RunDir
    from slimectl.data.run_settings import RUN_TOML, run_path, working_folder

    if not (run / RUN_TOML).exists():
        raise SettingsError(f"{run}: no {RUN_TOML}. Give the folder of a run, such as runs/NAME")
    RunDir(run).check_command(command)
    started = working_folder(run)
    if started is not None and not started.samefile(Path.cwd()):
        run = Path(os.path.abspath(run))
        stdio.note(f"{run}: was started in {started}, so relative paths in settings start there")
        _change_folder(started, options)
    own = run_path(run)
    run = own if own.exists() and own.samefile(run) else run.resolve()
    options.config = [run / RUN_TOML, *(options.config or [])]
    flags |= {"run.name": run.name, "run.dir": str(run.parent)}
    with nullcontext() if options.dry_run else RunDir(run).lock(warn=stdio.say) as lock:
        yield Resumed(run, lock)


def _change_folder(folder: Path, options: CommonOptions) -> None:
    """Change to a folder. The files given on the command line stay the same."""
    options.config = [path.absolute() for path in options.config or []]
    options.eval_config = options.eval_config and options.eval_config.absolute()
    options.custom_config = options.custom_config and options.custom_config.absolute()
    options.samples = [str(Path(name).absolute()) if Path(name).exists() else name for name in options.samples or []]
    os.chdir(folder)
