"""RMSNorm for tensor and sequence parallelism.

T tokens · W normalized width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467). `layernorm_zero_centered_gamma` adds 1 to the weight.

    mcore's WrappedTorchNorm rejects sequence parallelism. Here an attribute of the weight makes mcore sum its gradient
    over the tensor-parallel ranks, each of which processes a part of the tokens (or of the heads).
    """

    zero_centered = True

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.offset = 1.0 if self.zero_centered and config.layernorm_zero_centered_gamma else 0.0
        self.weight = nn.Parameter(_full(hidden_size, 1.0 - self.offset, config))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, states_TW: Tensor) -> Tensor:
        width = (states_TW.shape[-1],)
        if self.offset:
            # As in the Hugging Face models. In bfloat16, the sum would round offsets to multiples of 1/128.
            weight = self.weight.float() + self.offset
            return F.rms_norm(states_TW.float(), width, weight, self.eps).to(states_TW.dtype)
        return F.rms_norm(states_TW, width, self.weight, self.eps)


class FullWidthRMSNorm(nn.Module):
    """RMSNorm over all heads of a token together. Each tensor-parallel rank holds its heads' part of the weight."""

    def __init__(self, config: Any, heads: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.group = parallel_state.get_tensor_model_parallel_group()
        self.width = heads * config.kv_channels
        self.weight = nn.Parameter(_full(self.width // self.group.size(), 1.0, config))
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, states: Tensor) -> Tensor:
        """Normalize [..., heads of this rank, head dimension] over the last two axes of all ranks."""
        flat = states.flatten(-2).float()
        squares = flat.square().sum(-1, keepdim=True)
        # Every rank's heads use the sum, so its gradient is the sum over ranks, and each rank's squares get all of it.
        total = copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(squares))
        normed = flat * torch.rsqrt(total / self.width + self.eps)
        return (self.weight * normed.to(states.dtype)).view_as(states)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Describe the weight for mcore's checkpoints: sharded along its only axis."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, {"weight": 0}, sharded_offsets,
            tp_group=self.group, dp_cp_group=metadata["dp_cp_group"],
        )  # fmt: skip


class WideQueryNorm(FullWidthRMSNorm):
    """RMSNorm over all query heads."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__(config, config.num_attention_heads, eps)


class WideKeyNorm(FullWidthRMSNorm):
    """RMSNorm over all key heads."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__(config, config.num_query_groups, eps)


def _full(width: int, value: float, config: Any) -> Tensor:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.full((width,), value, dtype=config.params_dtype, device=device)
