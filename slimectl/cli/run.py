"""slimectl run"""

from __future__ import annotations

import signal
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slimectl import stdio
from slimectl.cli.options import CLUSTER, ENGINES, SETTINGS, CommonOptions, print_settings, with_options
from slimectl.errors import EXIT_INTERRUPTED, SettingsError

if TYPE_CHECKING:
    from slimectl.data.locks import Lock


@with_options("recipe model data backend name seed resume", CLUSTER, ENGINES, "eval_config", SETTINGS, "force dry_run")
def run(
    options: CommonOptions,
    recipe: Annotated[str | None, typer.Argument(metavar="RECIPE", help="A recipe's name or a TOML file")] = None,
    name: Annotated[str | None, typer.Option("--name", help="Folder of the run under run.dir")] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", help="Seed of new weights, of sampling and of shuffling")
    ] = None,
    resume: Annotated[Path | None, typer.Option("--resume", metavar="RUN", help="Continue a run's folder")] = None,
) -> None:
    """Train by reinforcement: rollout, score and train, round after round, evaluated before and after.

    Without a recipe, ./slimectl.toml is taken. Ctrl-C finishes the round and saves; a second one stops at once.

    Example:

        slimectl run quickstart
    """
    from slimectl import recipes

    has_input = bool(options.config or options.assign or options.model or options.data or resume)
    selected = recipes.find(recipe, instead=bool(options.config or resume), needed=not has_input)
    flags: dict[str, Any] = {"run.name": name, "run.seed": seed, "rollout.seed": seed}
    if resume:
        if not (resume / "run.toml").exists():
            raise SettingsError(f"{resume}: no run.toml; give the folder of a run, such as runs/NAME")
        options.config = [resume / "run.toml", *(options.config or [])]
        flags |= {"run.name": resume.resolve().name, "run.dir": str(resume.resolve().parent)}
    with nullcontext() if resume is None or options.dry_run else locked(resume) as lock:
        result = options.resolve(flags, recipe=selected.layer)
        if options.dry_run:
            print_settings(result)
            return
        from slimectl.cli.curve import closing_words
        from slimectl.runtime.run import TrainingRun
        from slimectl.settings.loading import settings_toml
        from slimectl.settings.secret import check_complete

        check_complete(result.settings.model_dump(by_alias=True))
        stop = Interrupt()
        job = TrainingRun(result.settings, interrupted=stop.asked)
        with stop:
            text = settings_toml(result.settings)
            finished = job.execute(text, resume=resume is not None, force=options.force, lock=lock)
    closing_words(job, selected)
    stdio.emit(str(job.folder.path))
    if not finished:
        raise typer.Exit(EXIT_INTERRUPTED)


def locked(run: Path) -> Lock:
    """Lock the folder of a run before reading any of its files. Raises SettingsError."""
    from slimectl.data.run_dir import RunDir

    return RunDir(run).lock(warn=stdio.say)


class Interrupt:
    """Handler of Ctrl-C: the first ends the run after its round, the second stops it immediately."""

    def __init__(self) -> None:
        self._count = 0
        self._before: Any = None

    def asked(self) -> bool:
        return self._count > 0

    def __enter__(self) -> Interrupt:
        self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _handle(self, *_: object) -> None:
        self._count += 1
        if self._count > 1:
            raise KeyboardInterrupt
        stdio.say("finishing this round, then saving; Ctrl-C again stops now")
