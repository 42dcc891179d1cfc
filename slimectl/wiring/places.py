"""Settings to where work runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from slimectl.settings import Settings

if TYPE_CHECKING:
    from slimectl.executors.local import LocalExecutor
    from slimectl.ports import Executor


def executor(settings: Settings, *, logs: Path | None = None) -> Executor:
    """This machine, or a Ray cluster; what ranks and actors say goes to files in `logs` where given."""
    if settings.cluster.executor == "ray":
        from slimectl.executors.ray import RayExecutor

        return RayExecutor(settings.cluster.ray_address, logs=logs)
    from slimectl.executors.local import LocalExecutor

    return LocalExecutor(logs=logs)


def graders() -> LocalExecutor:
    """Processes of this machine that grade what is sampled here."""
    from slimectl.executors.local import LocalExecutor

    return LocalExecutor()
