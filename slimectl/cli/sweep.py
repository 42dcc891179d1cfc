"""slimectl sweep"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slimectl.cli.options import AsJson, CommonOptions, print_preflight, with_options
from slimectl.system import stdio

if TYPE_CHECKING:
    from slimectl.sweeps.plan import Plan
    from slimectl.sweeps.scheduler import Row, Sweeper

SWEEPS = Path("sweeps")


@with_options("file folder slots assign retry_failed dry_run as_json")
def sweep(
    options: CommonOptions,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Settings file with a section [sweep] (TOML or YAML)")],
    folder: Annotated[
        Path | None, typer.Option("--dir", metavar="DIR", help="Folder of the sweep. Default: sweeps/NAME of the file")
    ] = None,
    slots: Annotated[int | None, typer.Option("--slots", help="Runs at the same time", min=1)] = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Try failed runs again")] = False,
    as_json: AsJson = False,
) -> None:
    """Try settings and seeds in many runs, and find the best.

    FILE has the settings of a run, or names them (config = "run.toml", recipe = "quickstart"). Its section [sweep] has
    the method (grid, random, halving), the metric, the seeds, and the values to try. Every trial is a run of its own.
    Repeat the command to resume the sweep, also after kill -9. Ctrl-C finishes the rounds of the active runs and saves.

    Example:

        slimectl sweep sweep.toml
    """
    from slimectl.runtime import builders
    from slimectl.sweeps.folder import SweepFolder
    from slimectl.sweeps.plan import read_plan
    from slimectl.sweeps.scheduler import Sweeper

    assignments = [*(options.assign or []), *([f"sweep.slots={slots}"] if slots else [])]
    plan = read_plan(file, assignments)
    target = SweepFolder(folder or SWEEPS / file.stem, plan).adopt()
    if options.dry_run:
        _print_plan(target.plan, as_json=as_json)
        return
    from slimectl.cli.signals import ForwardedSignals
    from slimectl.cli.sweep_table import finished, shown

    with target.lock():
        target.write_trials()
        commands = builders.commands(plan.sweep, target.plan.trials[0].settings)
        try:
            with ForwardedSignals() as signals:
                sweeper = Sweeper(target, commands, signals.received, retry_failed=retry_failed)
                with shown(sweeper, commands.slots):
                    is_done = sweeper.execute()
        finally:
            commands.close()
        best = finished(sweeper, is_done=is_done, as_json=as_json)
        if as_json:
            for row in records(sweeper, best):
                stdio.emit(json.dumps(row))
        if not is_done:
            stdio.note(f"resume with: {_command(file, folder, slots, options)}")
            raise typer.Exit(signals.exit_code)
        if best is not None:
            path = target.write_best(best.trial, describe_best(best, target.plan))
            folder_text = shlex.quote(str(target.path))
            stdio.note(f"best settings: {path}")
            stdio.note(
                f"try next:\n  slimectl view {folder_text}\n  slimectl run -c {shlex.quote(str(path))} --name best"
            )


def _command(file: Path, folder: Path | None, slots: int | None, options: CommonOptions) -> str:
    """Return the command that resumes the sweep."""
    command = ["slimectl", "sweep", str(file), *(["--dir", str(folder)] if folder else [])]
    command += ["--slots", str(slots)] if slots else []
    return shlex.join([*command, *(word for assignment in options.assign or [] for word in ("-s", assignment))])


def _print_plan(plan: Plan, *, as_json: bool) -> None:
    """Print the trials and rungs, then the preflight checks of the first trial."""
    from slimectl.runtime.preflight import OF_RUN
    from slimectl.settings.keys import flat
    from slimectl.settings.loading import Resolved

    if as_json:
        for trial in plan.trials:
            stdio.emit(json.dumps({"trial": trial.name, "settings": trial.values, "seeds": plan.sweep.seeds}))
        return
    for trial in plan.trials:
        stdio.emit(str(trial))
    seeds = ", ".join(map(str, plan.sweep.seeds))
    runs = sum(rung.trials for rung in plan.rungs) * len(plan.sweep.seeds)
    stdio.emit(f"{stdio.quantity(runs, 'run')}: seeds {seeds}, {plan.sweep.method}")
    if len(plan.rungs) > 1:
        steps = ", ".join(f"{stdio.quantity(rung.trials, 'trial')} to round {rung.rounds}" for rung in plan.rungs)
        stdio.emit(f"rungs: {steps}")
    stdio.emit(f"\nChecks of {plan.trials[0].name}:")
    settings = plan.trials[0].settings
    origins = {name: plan.trials[0].name if name in plan.trials[0].values else "base" for name, _ in flat(settings)}
    print_preflight(Resolved(settings, origins), *OF_RUN)


def describe_best(row: Row, plan: Plan) -> str:
    """Return the score of the best trial as a comment: metric, mean, spread, seeds and rounds."""
    assert row.score is not None
    score = row.score
    spread = f" ± {score.spread:.4g} (standard deviation" if score.spread is not None else " ("
    seeds = stdio.quantity(len(score.values), "seed")
    over = f" over {seeds})" if score.spread is not None else f"{seeds})"
    rounds = f" after {row.rounds} rounds" if row.rounds else ""
    return f"{plan.sweep.score} {plan.sweep.metric}: {score.mean:.6g}{spread}{over}{rounds}"


def records(sweeper: Sweeper, best: Row | None) -> Iterator[dict[str, Any]]:
    """Yield the trials for --json, best first."""
    for rank, row in enumerate(sweeper.rows(), 1):
        score = row.score
        yield {
            "trial": row.trial.name, "rank": rank, "best": best is not None and row.trial is best.trial,
            "state": row.state, "settings": row.trial.values, "metric": sweeper.plan.sweep.metric,
            "rounds": row.rounds, "mean": score and score.mean, "std": score and score.spread,
            "n": len(score.values) if score else 0,
            "seeds": {
                str(seed): {"score": outcome.score} | ({"reason": outcome.reason} if outcome.reason else {})
                for seed, outcome in row.outcomes.items()
            },
            "folder": str(sweeper.folder.path / row.trial.name),
        }  # fmt: skip
