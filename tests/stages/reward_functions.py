"""Reward functions for worker processes, which import this file and with it neither torch nor transformers."""

from __future__ import annotations

import time

from slimectl.types import Sample


def slow_for_even_ones(sample: Sample) -> float:
    time.sleep(0.0 if sample.index % 2 else 0.1)
    return float(sample.index)


def hangs_on_stuck(sample: Sample) -> float:
    while sample.response == "stuck":
        pass
    return 1.0


def always_fails(sample: Sample) -> float:
    raise ValueError("broken")
