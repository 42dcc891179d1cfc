"""One plain line a step, for logs and pipes."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TextIO

SHOWN = {
    "rollout/raw_reward": "reward",
    "train/loss": "loss",
    "train/grad_norm": "grad",
    "rollout/response_len/mean": "length",
    "rollout/staleness/max": "stale",
}
"""What a line shows of a step's metrics, and under which short name."""


class StdoutTracker:
    """Writes lines to stderr: stdout is for data."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stderr

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        evaluated = [
            f"{name.removeprefix('eval/')} {value:.3f}" for name, value in metrics.items() if is_accuracy(name)
        ]
        shown = [f"{short} {metrics[name]:.4g}" for name, short in SHOWN.items() if name in metrics]
        if evaluated or shown:
            print(f"step {step:>4}  " + "  ".join(shown + evaluated), file=self.stream, flush=True)

    def close(self) -> None: ...


def is_accuracy(name: str) -> bool:
    return name.startswith("eval/") and name.endswith("_accuracy")
