"""Run identity shared by hosted trackers (wandb, SwanLab)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Identity:
    """Identity of a run at wandb and SwanLab; None leaves a field to the library and its environment variables.

    `run_id` stays the same when a run is resumed, so that its curves continue. `config` is shown beside them.
    """

    run_id: str
    name: str | None = None
    project: str = "slimectl"
    entity: str | None = None
    group: str | None = None
    mode: str | None = None
    host: str | None = None
    config: dict[str, Any] | None = None
