"""Live progress bar on a terminal, with smoothed reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from slimectl.trackers.stdout import is_accuracy, lines_of, shown_of
from slimectl.types import TableRow

KEPT = 0.9
"""Decay of the exponential moving average of the reward, per round."""


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
