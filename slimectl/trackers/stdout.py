"""One plain line per step, for logs and pipes."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TextIO

from slimectl.types import TableRow

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
    """Writes lines to stderr: stdout is for data."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stderr

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        evaluated = [
            f"{name.removeprefix('eval/')} {value:.3f}" for name, value in metrics.items() if is_accuracy(name)
        ]
        shown = shown_of(metrics)
        if evaluated or shown:
            print(f"step {step:>4}  " + "  ".join(shown + evaluated), file=self.stream, flush=True)

    def table(self, name: str, rows: Sequence[TableRow], *, step: int) -> None:
        for line in lines_of(rows):
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
