"""slimectl runs"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from slimectl.errors import SettingsError

COLUMNS = ("run", "state", "rounds", "reward", "evaluation", "loss", "changed")
UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))


def runs(
    folder: Annotated[Path, typer.Argument(help="Folder of runs, or one run")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per run")] = False,
) -> None:
    """List runs with their state and latest metrics, most recent first.

    Example:

        slimectl runs
    """
    from slimectl.cli.models import print_table
    from slimectl.cli.viewer.library import Library
    from slimectl.cli.viewer.run_table import summary

    if not folder.is_dir():
        raise SettingsError(f"{folder}: no such folder. Give the folder of your runs: slimectl runs DIR")
    summaries = sorted(map(summary, Library([folder]).runs.values()), key=lambda run: -run["changed"])
    if as_json:
        for run in summaries:
            print(json.dumps(run))
        return
    print_table([COLUMNS, *map(_row, summaries)])


def _row(run: dict[str, Any]) -> tuple[str, ...]:
    planned = run["planned"]
    rounds = str(run["rounds"]) if planned is None else f"{run['rounds']}/{planned}"
    evaluations = [
        f"{name.split('/')[1].removesuffix('_accuracy')} {value:.3f}" for name, value in run["evaluations"].items()
    ]
    age = _age(time.time() - run["changed"])
    return (
        run["run"],
        run["state"],
        rounds,
        _short(run["reward"]),
        " ".join(evaluations) or "-",
        _short(run["loss"]),
        age,
    )


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _age(seconds: float) -> str:
    """Return an age in its largest unit, such as "3 h ago"."""
    size, unit = next(((size, unit) for size, unit in UNITS if seconds >= size), (1.0, "s"))
    return f"{max(0, round(seconds / size))} {unit} ago"
