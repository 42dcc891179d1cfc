"""An executor of another package: this machine's, which notes what it hosts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from slimectl.executors.local import LocalExecutor
from slimectl.runtime.builders.executors import ExecutorBackend
from slimectl.settings import Settings


class NotedExecutor(LocalExecutor):
    """Writes the name of everything that it hosts to hosted.txt beside the logs."""

    def __init__(self, logs: Path | None) -> None:
        super().__init__(logs=logs)
        self._notes = None if logs is None else logs.parent / "hosted.txt"

    def host(self, build: Callable[[], Any], *, name: str, gpus: float = 0.0) -> Any:
        if self._notes is not None:
            self._notes.write_text(f"{name}\n")
        return super().host(build, name=name, gpus=gpus)


class NotedBackend(ExecutorBackend):
    """cluster.executor = "noted"."""

    def build(self, settings: Settings, *, logs: Path | None, trains: bool) -> NotedExecutor:
        return NotedExecutor(logs)
