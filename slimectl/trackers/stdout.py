"""Live progress bar on a terminal, with smoothed reward."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from slimectl.protocols import Tracker
from slimectl.stdio import logger
from slimectl.trackers.base import TrackedRun
from slimectl.types import TableRow

KEPT = 0.9
"""Decay of the exponential moving average of the reward, per round."""


def console_tracker(run: TrackedRun) -> Tracker:
    """Make a live progress bar on a terminal, a plain line per step elsewhere."""
    return ProgressTracker(total=run.rounds, done=run.rounds_done) if sys.stderr.isatty() else StdoutTracker()


class ProgressTracker:
    """One progress bar on stderr; evaluations are printed above it and stay."""

    def __init__(self, *, total: int | None, done: int = 0, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._bar = Progress(
            TextColumn("round"), MofNCompleteColumn(), BarColumn(bar_width=24), TextColumn("{task.description}"),
            TimeElapsedColumn(), TimeRemainingColumn(), console=self._console, transient=True,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=total, completed=done)
        self._smooth: float | None = None
        self._bar.start()

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        for name, value in metrics.items():
            if is_accuracy(name):
                self._console.print(f"step {step:>4}  {name.removeprefix('eval/')} {value:.3f}", highlight=False)
        if "rollout/step" not in metrics:
            return
        shown = shown_of(metrics)
        reward = metrics.get("rollout/raw_reward")
        if reward is not None:
            self._smooth = reward if self._smooth is None else KEPT * self._smooth + (1 - KEPT) * reward
            shown[0] = f"reward {self._smooth:.3f}"
        self._bar.update(self._task, completed=metrics["rollout/step"], description="  ".join(shown))

    def table(self, name: str, rows: Sequence[TableRow], *, step: int) -> None:
        for line in lines_of(rows):
            self._console.print(line, highlight=False, markup=False)

    def close(self) -> None:
        self._bar.stop()


SHOWN = {
    "rollout/raw_reward": "reward",
    "train/grad_norm": "grad",
    "rollout/response_len/mean": "length",
    "rollout/truncation_rate": "cut",
    "train/lr": "lr",
    "rollout/staleness/max": "stale",
}
"""Metrics in the line of a step, and their short names; not the loss, which is 0 by construction on-policy."""

ROWS, WIDTH = 2, 40
"""Rows of a table of texts that are shown, and characters of each text."""


class StdoutTracker:
    """Logs a line for every step, or writes it to `stream`; stdout itself is for data."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        evaluated = [
            f"{name.removeprefix('eval/')} {value:.3f}" for name, value in metrics.items() if is_accuracy(name)
        ]
        shown = shown_of(metrics)
        if evaluated or shown:
            self._write(f"step {step:>4}  " + "  ".join(shown + evaluated))

    def table(self, name: str, rows: Sequence[TableRow], *, step: int) -> None:
        for line in lines_of(rows):
            self._write(line)

    def _write(self, line: str) -> None:
        if self.stream is None:
            logger.info(line)
        else:
            print(line, file=self.stream, flush=True)

    def close(self) -> None: ...


def lines_of(rows: Sequence[TableRow]) -> list[str]:
    """The first rows of a table, one short line each."""
    return ["           " + "  ".join(_short(value) for value in row.values()) for row in rows[:ROWS]]


def _short(value: str | float) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    return repr(value if len(value) <= WIDTH else f"{value[: WIDTH - 1]}…")


def shown_of(metrics: Mapping[str, float]) -> list[str]:
    """Parts of the line of a step; staleness only if above 0."""
    names = [name for name in SHOWN if name in metrics and (SHOWN[name] != "stale" or metrics[name] > 0)]
    return [f"{SHOWN[name]} {metrics[name]:.3g}" for name in names]


def is_accuracy(name: str) -> bool:
    return name.startswith("eval/") and name.endswith("_accuracy")
