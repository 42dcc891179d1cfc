"""Decoder layers that are not mcore's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from slimectl.policies.megatron.norms import RMSNorm

AddResidual = Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]


class SandwichLayer(TransformerLayer):
    """Norms behind attention and MLP too, before their outputs join the residual stream (GLM-4)."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.post_self_attn_layernorm = RMSNorm(config, config.hidden_size, eps=config.layernorm_epsilon)
        self.post_mlp_layernorm = RMSNorm(config, config.hidden_size, eps=config.layernorm_epsilon)
        self.self_attn_bda = _normed(self.self_attn_bda, self.post_self_attn_layernorm)
        self.mlp_bda = _normed(self.mlp_bda, self.post_mlp_layernorm)


def _normed(add: Callable[[bool, bool], AddResidual], norm: RMSNorm) -> Callable[[bool, bool], AddResidual]:
    """mcore's bias-dropout-add of an output that is normalised first."""

    def build(training: bool, fused: bool) -> AddResidual:
        def normed(output_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
            output, bias = output_with_bias
            whole = output if bias is None else output + bias
            return add(training, fused)((norm(whole), None), residual, dropout)

        return normed

    return build
