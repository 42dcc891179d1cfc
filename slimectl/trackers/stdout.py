"""Shows a run on the terminal: figures next to its progress bar, or one line per step."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TextIO

from slimectl.chats.messages import content_text
from slimectl.data.metrics_catalogue import is_supervised
from slimectl.protocols import Progress, Tracker
from slimectl.system.stdio import FILES_ONLY, logger, quantity, say
from slimectl.trackers.base import TrackedRun
from slimectl.types import StepReport, TableRow

DECAY = 0.9
"""Decay of the exponential moving average of the reward, per round."""


def console_tracker(run: TrackedRun) -> Tracker:
    """Return the tracker for a progress bar, or one that logs a plain line per step if no bar is drawn."""
    return BarTracker(run.progress) if run.progress.is_drawn else StdoutTracker()


class BarTracker:
    """Shows the last round's figures next to the bar. Evaluations are printed above it and stay."""

    shown_rows = 2

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._reward: float | None = None
        self._files = StdoutTracker(files_only=True)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        self._files.log(metrics, step=step)
        for name, value in metrics.items():
            if is_result(name):
                say(f"step {step:>4}  {name.removeprefix('eval/')} {value:.3f}")
        if "rollout/step" not in metrics:
            return
        figures = shown_of(metrics)
        reward = metrics.get("rollout/raw_reward")
        if reward is not None:
            self._reward = reward if self._reward is None else DECAY * self._reward + (1 - DECAY) * reward
            figures[0] = f"reward {self._reward:.3f}"
        self._progress.show(figures)

    def table(self, name: str, rows: Sequence[TableRow], *, step: int) -> None:
        self._files.table(name, rows, step=step)
        for line in lines_of(rows, columns=shutil.get_terminal_size().columns):
            say(line)

    def close(self) -> None: ...


SHOWN = {
    "rollout/raw_reward": "reward",
    "train/grad_norm": "grad",
    "rollout/response_len/mean": "length",
    "rollout/truncation_rate": "cut",
    "train/lr": "lr",
    "rollout/staleness/max": "stale",
}
"""Metrics in the line of a step, and their short names. Not the loss, which is 0 by construction on-policy."""

SHOWN_SUPERVISED = {
    "train/loss": "loss",
    "train/pair_accuracy": "pairs right",
    "train/grad_norm": "grad",
    "train/lr": "lr",
}
"""The same for a step on demonstrations or preferences."""

WIDTH = 40
"""Number of characters of each string in a table."""


class StdoutTracker:
    """Logs a line for every step, or writes it to `stream`. stdout itself is for data.

    With `files_only` the terminal shows no line, because it has a progress bar.
    """

    shown_rows = 2

    def __init__(self, stream: TextIO | None = None, *, files_only: bool = False) -> None:
        self.stream = stream
        self._extra = FILES_ONLY if files_only else None

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        evaluated = [f"{name.removeprefix('eval/')} {value:.3f}" for name, value in metrics.items() if is_result(name)]
        shown = shown_of(metrics)
        if evaluated or shown:
            self._write(f"step {step:>4}  " + "  ".join(shown + evaluated))

    def table(self, name: str, rows: Sequence[TableRow], *, step: int) -> None:
        for line in lines_of(rows):
            self._write(line)

    def _write(self, line: str) -> None:
        if self.stream is None:
            logger.info(line, extra=self._extra)
        else:
            print(line, file=self.stream, flush=True)

    def close(self) -> None: ...


def lines_of(rows: Sequence[TableRow], *, columns: int | None = None) -> list[str]:
    """Return the rows of a table, one short line each. On terminals under 80 columns the lines are shorter."""
    is_narrow = columns is not None and columns < 80
    indent, width = ("  ", max(6, ((columns or 0) - 18) // 3)) if is_narrow else (" " * 11, WIDTH)
    return [indent + "  ".join(_short(value, width) for value in _with_last_message(row).values()) for row in rows]


def _with_last_message(row: TableRow) -> TableRow:
    """Return the row with the last message's text as the prompt, if the prompt is a chat in JSON."""
    prompt = row.get("prompt")
    if not isinstance(prompt, str) or not prompt.startswith("[{"):
        return row
    try:
        return row | {"prompt": content_text(json.loads(prompt)[-1]["content"])}
    except (ValueError, LookupError, TypeError):
        return row  # only looks like the beginning of a chat


def _short(value: str | float, width: int) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    return repr(value if len(value) <= width else f"{value[: width - 1]}…")


def shown_of(metrics: Mapping[str, float]) -> list[str]:
    """Return the parts of a step's line. Includes staleness only if above 0, and any `shortcomings` of the round."""
    labels = SHOWN_SUPERVISED if is_supervised(metrics) else SHOWN
    names = [name for name in labels if name in metrics and (labels[name] != "stale" or metrics[name] > 0)]
    return [f"{labels[name]} {metrics[name]:.3g}" for name in names] + shortcomings(metrics)


def shortcomings(metrics: Mapping[str, float]) -> list[str]:
    """Return "no signal" for a round without gradient, "no step" for one whose rollouts do not fill a step."""
    notes = ["no signal"] if metrics.get("rollout/no_signal") else []
    if "rollout/step" in metrics and "train/step" not in metrics:
        waiting = int(metrics.get("train/rollouts_left_over", 0))
        notes.append(f"no step, {quantity(waiting, 'rollout')} left over" if waiting else "no step")
    return notes


COLUMNS = {
    "rollout/raw_reward": "reward", "train/loss": "loss", "train/grad_norm": "grad", "train/entropy_loss": "entropy",
    "rollout/response_len/mean": "length", "train/lr": "lr",
}  # fmt: skip
"""Columns of the table that a terminal shows during training."""


def step_table() -> Callable[[StepReport], Iterator[str]]:
    """Return a function that formats reports as rows of a table, under a header before the first.

    A row has a dash for each missing metric.
    """
    headers = iter([f"{'step':>6}" + "".join(f"{name:>11}" for name in COLUMNS.values())])

    def lines(report: StepReport) -> Iterator[str]:
        yield from headers
        metrics = report.metrics
        cells = (f"{metrics[name]:.4g}" if name in metrics else "-" for name in COLUMNS)
        notes = "".join(f"  {note}" for note in shortcomings(metrics))
        yield f"{report.step:>6}" + "".join(f"{cell:>11}" for cell in cells) + notes

    return lines


def is_result(name: str) -> bool:
    """Return whether a metric is the result of an evaluation: an accuracy, or a loss on held-out data."""
    return name.startswith("eval/") and name.endswith(("_accuracy", "/loss"))
