"""As what a run is known to the services that draw its curves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Identity:
    """What wandb and SwanLab are told of a run; None leaves it to the library and its environment variables.

    `run_id` stays the same when a run is resumed, so that its curves go on. `config` is shown beside them.
    """

    run_id: str
    name: str | None = None
    project: str = "slimectl"
    entity: str | None = None
    group: str | None = None
    mode: str | None = None
    host: str | None = None
    config: dict[str, Any] | None = None
