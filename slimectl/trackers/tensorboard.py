"""TensorBoard tracker."""

from __future__ import annotations

import html
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slimectl.data.metrics_catalogue import axis_of
from slimectl.errors import requiring
from slimectl.trackers.arguments import Accepted, parameters
from slimectl.trackers.base import TrackedRun, starting
from slimectl.types import TableRow


class TensorboardTracker:
    """Scalars in the run's folder `tensorboard` (TENSORBOARD_DIR in the environment overrides it).

    Each metric has its own axis: `rollout/*` and `perf/*` on `rollout/step`, `eval/*` on `eval/step`, the others on the
    train step. `run.one_axis` puts all on the train step. Metrics without the value of their axis use its last value.
    """

    def __init__(self, run: TrackedRun, **kwargs: Any) -> None:
        with requiring("tensorboard", extra="tensorboard", wanted_by="track.with"):
            from torch.utils.tensorboard import SummaryWriter
        folder = kwargs.pop("log_dir", None) or os.environ.get("TENSORBOARD_DIR") or str(run.folder / "tensorboard")
        self._one_axis = run.one_axis
        self._axes: dict[str, float] = {"rollout/step": float(run.rounds_done)} if run.rounds_done else {}
        with starting("tensorboard", way_out="Set TENSORBOARD_DIR to a folder that can be written"):
            # A resumed run has truncated the files in its own folder. In another folder, steps that it writes again are
            # hidden: all from purge_step on, the first step after the checkpoint.
            self.cut_back = Path(folder).resolve() == (run.folder / "tensorboard").resolve()
            purge = None if self.cut_back or run.resumed_at is None else run.resumed_at + 1
            self._writer = SummaryWriter(**{"log_dir": folder, "purge_step": purge, **kwargs})

    @staticmethod
    def accepted_arguments() -> Accepted:
        """Return the arguments of `SummaryWriter`."""
        from torch.utils.tensorboard import SummaryWriter

        return parameters(SummaryWriter)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        self._axes |= {name: value for name, value in metrics.items() if name.endswith("/step")}
        self._axes["train/step"] = step
        for name, value in metrics.items():
            at = step if self._one_axis else self._axes.get(axis_of(name), step)
            self._writer.add_scalar(name, value, global_step=int(at))
        self._writer.flush()

    def table(self, name: str, rows: Sequence[TableRow], *, step: int) -> None:
        """Write a Markdown table to the TEXT tab."""
        lines = [list(rows[0]), ["---"] * len(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]
        text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        self._writer.add_text(name, text, global_step=step)
        self._writer.flush()

    def histogram(self, name: str, values: Sequence[float], *, step: int) -> None:
        self._writer.add_histogram(name, np.array(values), global_step=step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _cell(value: str | float) -> str:
    """Escape a value so that a Markdown cell shows it verbatim."""
    return html.escape(str(value)).replace("|", "&#124;").replace("\n", "<br>")
