"""Mixture of experts: mcore's router with correct padding, and its experts as grouped matrix products.

N rows, one for each expert choice of a token, sorted by expert · E experts of this rank · I input width · O output
width · F an expert's inner width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_utils import clear_aux_losses_tracker
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from slimectl.policies.megatron.batch import MicroBatch
from slimectl.types import TrainingSample


class Router(TopKRouter):
    """mcore's router. Its softmax and sigmoid routing equals the routing of the Hugging Face models."""

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Count the tokens of every expert, for the update of its bias.

        megatron-core (0.16.1) combines [tokens, experts] with a mask [tokens], which fails or miscounts, and
        compiles the function, which needs a C++ compiler. Delete when both are fixed.
        """
        if self.enable_expert_bias and torch.is_grad_enabled():
            real_map = routing_map if padding_mask is None else routing_map & ~padding_mask[:, None]
            self.local_tokens_per_expert += real_map.sum(dim=0)


class Experts(SequentialMLP):
    """mcore's experts, with the parameters of one MLP each and one grouped matrix product for all.

    Does not need TransformerEngine, unlike the grouped experts of mcore.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # mcore (0.16.1) reduces gradients over the experts' data-parallel ranks only with expert parallelism. With a
        # tensor size above the experts', ranks would keep partial gradients. It also allows saving optimizers at one
        # expert size and loading at another, so experts have a separate optimizer at every size.
        for parameter in self.parameters():
            parameter.allreduce = False
            # mcore marks the biases of the second matrices as replicated over tensor-parallel ranks. It would sum their
            # gradients over these, and leave out those of experts that only other ranks hold from the norm.
            parameter.sequence_parallel, parameter.tensor_model_parallel = False, True

    def forward(self, rows_NI: Tensor, tokens_per_expert_E: Tensor, weights_N: Tensor) -> tuple[Tensor, None]:
        """Apply each row's expert and multiply by the row's weight. Rows are sorted by expert."""
        ends_E = tokens_per_expert_E.to(rows_NI.device).cumsum(0).to(torch.int32)
        up = [expert.linear_fc1 for expert in self.local_experts]
        down = [expert.linear_fc2 for expert in self.local_experts]
        gate_NF, up_NF = _grouped_linear(rows_NI, ends_E, up).chunk(2, dim=-1)
        if (limit := self.config.activation_func_clamp_value) is not None:
            gate_NF, up_NF = gate_NF.clamp(max=limit), up_NF.clamp(-limit, limit)
        if self.config.glu_linear_offset:
            up_NF = up_NF + self.config.glu_linear_offset
        activated_NF = self.config.activation_func(gate_NF) * up_NF
        inner_NF = (activated_NF * weights_N[:, None]).to(rows_NI.dtype)
        return _grouped_linear(inner_NF, ends_E, down, weights_N), None


def _grouped_linear(rows_NI: Tensor, ends_E: Tensor, linears: Sequence[Any], weights_N: Tensor | None = None) -> Tensor:
    """Multiply rows by the matrix of their expert, and add its bias, and its adapter if there is one (lora.py).

    `weights_N` are factors that the rows already have, and biases need.
    """
    output_NO = _GroupedLinear.apply(rows_NI, ends_E, *(linear.weight for linear in linears))  # type: ignore[no-untyped-call]
    adapters = [linear.adapter for linear in linears if hasattr(linear, "adapter")]
    if adapters:
        inner_NK = _GroupedLinear.apply(rows_NI, ends_E, *(adapter.down() for adapter in adapters))  # type: ignore[no-untyped-call]
        added_NO = _GroupedLinear.apply(inner_NK, ends_E, *(adapter.up() for adapter in adapters))  # type: ignore[no-untyped-call]
        output_NO = output_NO + adapters[0].scale * added_NO
    if linears[0].bias is not None:
        places_N = torch.arange(len(rows_NI), device=ends_E.device, dtype=ends_E.dtype)
        # An embedding, because the backward pass of indexing adds up gradients in any order on a GPU.
        biases_EO = torch.stack([linear.bias for linear in linears])
        bias_NO = F.embedding(torch.searchsorted(ends_E, places_N, right=True), biases_EO)
        output_NO = output_NO + (bias_NO if weights_N is None else (bias_NO * weights_N[:, None]).to(bias_NO.dtype))
    return output_NO


class _GroupedLinear(torch.autograd.Function):
    """Rows times the transposed matrix [O, I] of their expert.

    The product needs the matrices in one tensor, so they are stacked in forward and backward, and not saved.
    """

    @staticmethod
    def forward(ctx: Any, rows_NI: Tensor, ends_E: Tensor, *matrices: Tensor) -> Tensor:
        ctx.save_for_backward(rows_NI, ends_E, *matrices)
        return _grouped(rows_NI, torch.stack(matrices).transpose(1, 2), ends_E)

    @staticmethod
    def backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor | None, ...]:
        rows_NI, ends_E, *matrices = ctx.saved_tensors
        grad_NO = grad_NO.contiguous()
        grad_NI = _grouped(grad_NO, torch.stack(matrices), ends_E) if ctx.needs_input_grad[0] else None
        if not any(ctx.needs_input_grad[2:]):
            return (grad_NI, None, *[None] * len(matrices))
        return (grad_NI, None, *_outer(grad_NO, rows_NI, ends_E))


def _grouped(rows_NI: Tensor, matrices_EIO: Tensor, ends_E: Tensor) -> Tensor:
    if _aligned(rows_NI, matrices_EIO):
        return F.grouped_mm(rows_NI, matrices_EIO, offs=ends_E)
    parts = rows_NI.split(ends_E.diff(prepend=ends_E.new_zeros(1)).tolist())
    return torch.cat([part @ matrix for part, matrix in zip(parts, matrices_EIO, strict=True)])


def _outer(grad_NO: Tensor, rows_NI: Tensor, ends_E: Tensor) -> tuple[Tensor, ...]:
    """Return the gradient of every matrix, [O, I] each. Zero where an expert has no rows."""
    if _aligned(grad_NO, rows_NI):
        return F.grouped_mm(grad_NO.T, rows_NI, offs=ends_E).unbind()
    sizes = ends_E.diff(prepend=ends_E.new_zeros(1)).tolist()
    return tuple(grad.T @ rows for grad, rows in zip(grad_NO.split(sizes), rows_NI.split(sizes), strict=True))


def _aligned(*operands: Tensor) -> bool:
    """Return whether grouped_mm supports the operands: no float64, and every row starts at a multiple of 16 bytes."""
    sizes = [
        size * operand.element_size()
        for operand in operands
        for size in operand.shape[-2 if operand.ndim > 2 else -1 :]
    ]
    return operands[0].dtype != torch.float64 and all(size % 16 == 0 for size in sizes)


class MoEAuxLossScaler:
    """Scales load-balancing and z losses to match a loss that is a weighted sum.

    mcore computes them once per micro-batch and layer, and expects a later division by the number of tokens, which is
    not done here. Instead each is averaged over the micro-batches of a call and multiplied by the sum of the call's
    row weights. If the weights sum to 1 over a step, `moe_aux_loss_coeff` means the same as in pretraining. A step may
    consist of several calls.
    """

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self.routers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, TopKRouter)]
        self.given = []
        for router in self.routers:
            router.calculate_per_token_loss = False
            self.given.append((router.config.moe_aux_loss_coeff, router.config.moe_z_loss_coeff))
        self.active = any(router.is_aux_loss_enabled() for router in self.routers) or any(z for _, z in self.given)
        self.weight = 0.0

    def begin(self, rows: Sequence[TrainingSample], packs: int) -> None:
        """Start a call over all `rows`, in `packs` micro-batches over all ranks."""
        clear_aux_losses_tracker()
        self.weight = sum(sum(row.loss_weights) for row in rows) / max(1, packs)

    def weigh(self, batch: MicroBatch) -> None:
        """Set the loss coefficients for a micro-batch. Call it before the forward."""
        if not self.active:
            if not batch.plan.rows:
                # The unused token of a rank without rows must not count for the routers' biases.
                batch.sequences.padding_T = batch.sequences.padding_T | True
            return
        weight = self.weight if batch.plan.rows else 0.0
        for router, (balance, z) in zip(self.routers, self.given, strict=True):
            scaled = (
                [coefficient * weight for coefficient in balance] if isinstance(balance, list) else balance * weight
            )
            router.config.moe_aux_loss_coeff = scaled
            router.config.moe_z_loss_coeff = None if z is None else z * weight
