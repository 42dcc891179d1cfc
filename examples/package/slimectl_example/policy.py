"""A trainer of another package: FSDP's, which trains the last layer norm alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from slimectl.policies.options import TrainerOptions
from slimectl.protocols import CheckpointFormat
from slimectl.runtime.builders.trainers import FsdpBackend, Role
from slimectl.settings import Settings


class NormOnlyBackend(FsdpBackend):
    """train.backend = "norm_only"."""

    def build(
        self, settings: Settings, folder: Path, role: Role, options: TrainerOptions, checkpoint: CheckpointFormat
    ) -> Any:
        options = replace(options, train_only=[r"^model\.norm\."])
        return super().build(settings, folder, role, options, checkpoint)
