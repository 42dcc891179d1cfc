"""A Hugging Face causal language model as a policy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from slimectl.policies.fsdp.model import PackedModel
from slimectl.policies.fsdp.trainer import FsdpTrainer
from slimectl.protocols import CheckpointFormat
from slimectl.types import TrainingSample


class FsdpPolicy(FsdpTrainer):
    """protocols.Policy on a Hugging Face model; `options` are those of FsdpTrainer."""

    def __init__(self, model_dir: Path, checkpoint: CheckpointFormat, *, temperature: float = 1.0, **options: Any):
        self.temperature = temperature
        super().__init__(model_dir, checkpoint, **options)

    def log_probs(self, rows: Sequence[TrainingSample]) -> list[list[float]]:
        return self.of_rows(rows)

    def _wrap_model(self, hf: nn.Module) -> PackedModel:
        return PackedModel(hf, temperature=self.temperature)
