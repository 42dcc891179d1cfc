"""Experts of each row, for a trainer that replays an engine's routing.

Ma et al. 2025, arXiv:2510.11370: router and experts are trained, but the engine's choice of experts is used. I inputs
of a row · L layers of the model · k experts of a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slimectl.data.routed_experts import decoded, no_experts, routed_tokens
from slimectl.errors import RecordError, SettingsError
from slimectl.types import TrainingSample

FREE = -1
"""Expert number of a token for which the trainer's router chooses."""

EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")
"""Keys of config.json for the number of experts."""


@dataclass(frozen=True)
class RoutingShape:
    """Size of a model's routing: layers, experts of a token, and experts of a layer."""

    layers: int
    choices: int
    experts: int

    @classmethod
    def of_config(cls, config: Mapping[str, Any], *, setting: str = "train.use_rollout_routing_replay") -> RoutingShape:
        """Read config.json. Raises SettingsError with the name of the `setting` for a model without experts."""
        experts = max(config.get(key) or 0 for key in EXPERT_COUNTS)
        if not experts or not config.get("num_experts_per_tok"):
            raise SettingsError(no_experts(setting))
        return cls(int(config["num_hidden_layers"]), int(config["num_experts_per_tok"]), int(experts))

    def check(self, rows: Sequence[TrainingSample]) -> None:
        """Check the experts of all rows. Every rank calls it with the same rows. Raises RecordError."""
        for row in rows:
            if row.routed_experts is None:
                raise RecordError(
                    f"sample {row.index}: no rollout_routed_experts, which train.use_rollout_routing_replay needs"
                )
            tokens, *size = row.routed_experts["shape"]
            if size != [self.layers, self.choices] or tokens > row.input_length:
                raise RecordError(
                    f"sample {row.index}: rollout_routed_experts has shape {[tokens, *size]}, expected at most "
                    f"{[row.input_length, self.layers, self.choices]}. It comes from another model."
                )
            highest = int(decoded(row.routed_experts).max(initial=0))
            if highest >= self.experts:
                raise RecordError(
                    f"sample {row.index}: rollout_routed_experts contains expert {highest}, but this model has "
                    f"{self.experts}. It comes from another model."
                )

    def of_row(self, row: TrainingSample) -> Tensor:
        """Return the experts [I, L, k] of a checked row's inputs, FREE for tokens that the engine did not read."""
        experts_ILk = torch.full((row.input_length, self.layers, self.choices), FREE)
        assert row.routed_experts is not None
        experts_ILk[: routed_tokens(row.routed_experts)] = torch.from_numpy(decoded(row.routed_experts).astype("int64"))
        return experts_ILk
