"""A trainer of another package: FSDP's, which trains the last layer norm alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slimectl.runtime.builders.trainers import FsdpBackend, Role
from slimectl.settings import Settings


class NormOnlyBackend(FsdpBackend):
    """train.backend = "norm_only"."""

    def build(self, settings: Settings, folder: Path, *, role: Role, store_prefix: str, **options: Any) -> Any:
        options["train_only"] = [r"^model\.norm\."]
        return super().build(settings, folder, role=role, store_prefix=store_prefix, **options)
