"""Decoder layers that mcore does not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from slimectl.policies.megatron.norms import RMSNorm

AddResidual = Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]


class SandwichLayer(TransformerLayer):
    """A layer with further norms on the outputs of attention and MLP, before the residual addition (GLM-4)."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.post_self_attn_layernorm = RMSNorm(config, config.hidden_size, eps=config.layernorm_epsilon)
        self.post_mlp_layernorm = RMSNorm(config, config.hidden_size, eps=config.layernorm_epsilon)
        self.self_attn_bda = _add_normalized(self.self_attn_bda, self.post_self_attn_layernorm)
        self.mlp_bda = _add_normalized(self.mlp_bda, self.post_mlp_layernorm)


def _add_normalized(add: Callable[[bool, bool], AddResidual], norm: RMSNorm) -> Callable[[bool, bool], AddResidual]:
    """Wrap mcore's bias-dropout-add: normalise the output first."""

    def build(training: bool, fused: bool) -> AddResidual:
        def normed(output_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
            output, bias = output_with_bias
            biased = output if bias is None else output + bias
            return add(training, fused)((norm(biased), None), residual, dropout)

        return normed

    return build
