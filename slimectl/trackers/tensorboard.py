"""Metrics for TensorBoard, by its own writer."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slimectl.errors import MissingExtraError


class TensorboardTracker:
    """Scalars under `log_dir` (TENSORBOARD_DIR in the environment goes before it)."""

    def __init__(self, log_dir: Path, *, purge_step: int | None = None, **kwargs: Any) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingExtraError("tensorboard", extra="tensorboard", wanted_by="track.with") from error
        folder = os.environ.get("TENSORBOARD_DIR") or str(log_dir)
        # purge_step hides what a resumed run is about to write again.
        self._writer = SummaryWriter(log_dir=folder, purge_step=purge_step, **kwargs)  # type: ignore[no-untyped-call]

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, global_step=step)  # type: ignore[no-untyped-call]
        self._writer.flush()  # type: ignore[no-untyped-call]

    def close(self) -> None:
        self._writer.close()  # type: ignore[no-untyped-call]
