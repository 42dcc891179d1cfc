"""The MLP of a transformer block: dense and gated, or a mixture of experts.

N rows (one per token) · H hidden size · E experts · k experts per token · F width of an expert.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from slimectl.engines.embedded.linear import Linear


@dataclass(frozen=True, slots=True)
class Mlp:
    """A gated MLP. `gate_up` stacks its first two matrices."""

    gate_up: Linear
    down: Linear

    def added_to(self, stream_NH: Tensor, rows_NH: Tensor) -> Tensor:
        """Return stream + self(rows)."""
        return self.down.added_to(stream_NH, self.gate_up.gated(rows_NH))


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """An expert that every token uses, weighted by the sigmoid of `gate_1H` if there is one."""

    mlp: Mlp
    gate_1H: Tensor | None

    def added_to(self, stream_NH: Tensor, rows_NH: Tensor) -> Tensor:
        """Return stream + self(rows)."""
        if self.gate_1H is None:
            return self.mlp.added_to(stream_NH, rows_NH)
        output_NH = self.mlp.down(self.mlp.gate_up.gated(rows_NH))
        return stream_NH + F.linear(rows_NH, self.gate_1H).sigmoid() * output_NH


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts. A token's output is the weighted sum of the outputs of its k experts.

    `gate_EH` scores the experts. `gate_up_EIH` (I is 2 F) and `down_EHF` are their matrices. With `normalizes`, the
    weights of a token's experts sum to 1.
    """

    gate_EH: Tensor
    gate_up_EIH: Tensor
    down_EHF: Tensor
    choices: int
    normalizes: bool
    shared: SharedExpert | None = None

    def route(self, rows_NH: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights [N, k] and experts [N, k] of every row. The softmax is always in float32."""
        probs_NE = torch.softmax(F.linear(rows_NH, self.gate_EH), -1, dtype=torch.float32)
        weights_Nk, experts_Nk = probs_NE.topk(self.choices)
        if self.normalizes:
            weights_Nk = weights_Nk / weights_Nk.sum(-1, keepdim=True)
        return weights_Nk.to(rows_NH.dtype), experts_Nk

    def added_to(self, stream_NH: Tensor, rows_NH: Tensor) -> tuple[Tensor, Tensor]:
        """Return stream + self(rows) and the rows' experts [N, k]. Each expert computes all its rows at once."""
        weights_Nk, experts_Nk = self.route(rows_NH)
        order = experts_Nk.flatten().argsort(stable=True)
        counts = experts_Nk.flatten().bincount(minlength=len(self.gate_EH)).tolist()
        outputs = [
            self._expert(expert, part_MH)
            for expert, part_MH in enumerate(rows_NH[order // self.choices].split(counts))
            if len(part_MH)
        ]
        sorted_outputs = torch.cat(outputs)
        if self.shared is not None:
            stream_NH = self.shared.added_to(stream_NH, rows_NH)
        unsorted = torch.empty_like(sorted_outputs).index_copy_(0, order, sorted_outputs)
        return stream_NH + (unsorted.view(*experts_Nk.shape, -1) * weights_Nk[..., None]).sum(1), experts_Nk

    def _expert(self, expert: int, rows_MH: Tensor) -> Tensor:
        gate_MF, up_MF = F.linear(rows_MH, self.gate_up_EIH[expert]).chunk(2, dim=-1)
        return F.linear(F.silu(gate_MF) * up_MF, self.down_EHF[expert])
