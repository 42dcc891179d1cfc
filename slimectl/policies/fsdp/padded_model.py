"""The general path: a pack as one padded batch through a transformers model's own forward.

Any causal model can be trained this way. Rows do not share tokens, and padding is computed.

T input tokens · B rows · L tokens of the longest row · U states that predict · H hidden width.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slimectl.policies.fsdp.model import TrainedModel
from slimectl.policies.options import TrainerOptions
from slimectl.policies.pack_plan import PackPlan, Predictions
from slimectl.system.stdio import logger


@dataclass(frozen=True)
class PaddedBatch:
    """One pack as tensors. Rows are padded at their end."""

    plan: PackPlan
    tokens_BL: Tensor
    targets_R: Tensor
    predictions: Predictions
    """Its states are positions in the flattened batch [B · L]."""


class PaddedModel(TrainedModel):
    """Computes every pack by one forward of the model, so that all ranks make the same collectives.

    The padding comes after its row, where a causal model ignores it. Therefore no mask is needed.
    """

    def batch(self, plan: PackPlan, *, dtype: torch.dtype, device: torch.device, processor: Any = None) -> PaddedBatch:
        rows = plan.paths or [np.zeros(1, dtype=np.int64)]  # a pack without rows is one unused token
        tokens_BL = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
        place_T = np.zeros(len(plan.tokens_T), dtype=np.int64)
        for i, path in enumerate(rows):
            tokens_BL[i, : len(path)] = plan.tokens_T[path]
            place_T[path] = i * tokens_BL.shape[1] + np.arange(len(path))
        sources_U = torch.from_numpy(place_T)[plan.predictions.sources_U]
        predictions = dataclasses.replace(plan.predictions, sources_U=sources_U)
        targets_R = torch.from_numpy(plan.targets_R).to(device)
        return PaddedBatch(plan, torch.from_numpy(tokens_BL).to(device), targets_R, predictions.to(device))

    def hidden(self, batch: PaddedBatch) -> Tensor:
        hidden_BLH = self.causal.states(input_ids=batch.tokens_BL)
        hidden_UH: Tensor = hidden_BLH.flatten(0, 1).index_select(0, batch.predictions.sources_U)
        return hidden_UH


def padded_options(options: TrainerOptions) -> TrainerOptions:
    """Return the options with which packs are planned for a PaddedModel."""
    batching = dataclasses.replace(options.batching, padded=True)
    return dataclasses.replace(options, share_prefixes=False, batching=batching)


def path_of(model: TrainedModel) -> str:
    """Return how a model is computed.

    >>> path_of(TrainedModel(hf, obstacle="has layers of kind conv"))  # doctest: +SKIP
    'fsdp, padded rows because lfm2 has layers of kind conv'
    """
    if not model.obstacle:
        return "fsdp, packed rows"
    return f"fsdp, padded rows because {model.hf.config.model_type} {model.obstacle}"


def general_path(model_type: str, obstacle: str) -> str:
    """Return one line about the path of a model and its cost."""
    return (
        f"{model_type} takes the general path of fsdp ({obstacle}): rows are padded to the longest of a pack and do not"
        " share prefixes."
    )


@functools.cache
def report_general_path(model_type: str, obstacle: str) -> None:
    """Log the line of `general_path` once."""
    logger.info(general_path(model_type, obstacle))
