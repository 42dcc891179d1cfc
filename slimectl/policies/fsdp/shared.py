"""A policy with a shared critic: a value head on its backbone, trained with it by one optimizer.

R response tokens · H hidden width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slimectl.policies.fsdp.layout import PackLayout
from slimectl.policies.fsdp.model import PackedModel
from slimectl.policies.fsdp.policy import FsdpPolicy
from slimectl.policies.fsdp.value import HEAD, add_head, values_of
from slimectl.policies.state import VALUE_HEAD, check_value_head, read_tensors, write_float32
from slimectl.policies.tokens import ResponseTokens
from slimectl.types import Row

WEIGHT = f"{HEAD}.weight"


class PackedBoth(PackedModel):
    """The root module: log-probability of each response token of the pack, and the value before it, [R, 2]."""

    def forward(self, layout: PackLayout, *, entropy: bool) -> tuple[Tensor, Tensor | None]:
        hidden_RH = self.hidden(layout)
        logprobs_R, entropy_R = self.log_probs(hidden_RH, layout, entropy=entropy)
        return torch.stack([logprobs_R, values_of(hidden_RH, self.hf)], dim=1), entropy_R


class FsdpPolicyWithValues(FsdpPolicy):
    """ports.Policy with the `values` of ports.Critic; losses read the current values as `predicted_T`.

    The head starts at zero unless the checkpoint has one.
    """

    def log_probs(self, rows: Sequence[Row]) -> list[list[float]]:
        return [[log_prob for log_prob, _ in pairs] for pairs in self.of_rows(rows)]

    def values(self, rows: Sequence[Row]) -> list[list[float]]:
        return [[value for _, value in pairs] for pairs in self.of_rows(rows)]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Stream the weights without the value head, which engines do not load."""
        return (item for item in super().weights() if item[0] != WEIGHT)

    def save(self, path: Path) -> None:
        super().save(path)
        head = self._full_tensor(WEIGHT)
        if self.rank == 0:
            write_float32(path / VALUE_HEAD, {WEIGHT: head.shape}, iter([(WEIGHT, head)]))
        if self.ranks > 1:
            dist.barrier()

    def load(self, path: Path) -> None:
        check_value_head(path)
        super().load(path)
        for _, head in read_tensors(path / VALUE_HEAD, {WEIGHT: self.masters.shapes[WEIGHT]}):
            self.masters.put(head, self.masters.tensors[WEIGHT])
        self.masters.publish()

    def _add_modules(self, hf: nn.Module) -> dict[str, Tensor]:
        return super()._add_modules(hf) | add_head(hf)

    def _wrap_model(self, hf: nn.Module) -> PackedModel:
        return PackedBoth(hf, temperature=self.temperature)

    def _token_batch(
        self,
        rows: Sequence[Row],
        names: Sequence[str],
        layout: PackLayout,
        outputs_R2: Tensor,
        entropy_R: Tensor | None,
    ) -> ResponseTokens:
        tokens = super()._token_batch(rows, names, layout, outputs_R2[:, 0], entropy_R)
        return dataclasses.replace(tokens, predicted_T=outputs_R2[:, 1])
