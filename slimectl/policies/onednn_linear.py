"""Computes float32 linear layers on a CPU with oneDNN, where torch's default, MKL, uses only half of the processor.

MKL (2024.2) computes with AVX2 on AMD processors with AVX-512: 105 GFLOP/s per thread on an EPYC of 2024, where
oneDNN reaches 240. Delete this module when torch chooses the faster library.

T rows · O outputs · I inputs.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROWS = 64
"""Pad row counts to multiples of this. oneDNN builds a kernel per count, which takes up to two products' time."""
SUM_ROWS = 2048
"""Rows of a sum per product. torch's oneDNN cannot add to a matrix, and a large product needs new memory."""


def is_faster(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether oneDNN's products are faster."""
    return device.type == "cpu" and dtype == torch.float32 and _has_unused_instructions()


@functools.cache
def _has_unused_instructions(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not torch.backends.mkldnn.is_available():
        return False
    try:
        return "AuthenticAMD" in cpuinfo.read_text()
    except OSError:
        return False


def product(left_TI: Tensor, right_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return left · rightᵀ + bias. Either side may be the transpose of a matrix in memory."""
    return torch.ops.mkldnn._linear_pointwise.default(left_TI, right_OI, bias_O, "none", [], "")  # type: ignore[no-any-return]


def add_product(sum_OI: Tensor, left_TO: Tensor, right_TI: Tensor) -> None:
    """Add leftᵀ · right to a matrix."""
    right_IT = right_TI.t()
    for rows_OI, columns_TO in zip(sum_OI.split(SUM_ROWS), left_TO.split(SUM_ROWS, dim=1), strict=True):
        rows_OI.add_(product(columns_TO.t(), right_IT))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows_TI, weight_OI)
        return product(rows_TI, weight_OI, bias_O)

    @staticmethod
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, ...]:
        rows_TI, weight_OI = ctx.saved_tensors
        needs_rows, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            product(grad_TO, weight_OI.t()) if needs_rows else None,
            product(rows_TI.t(), grad_TO.t()).t() if needs_weight else None,
            grad_TO.sum(0) if needs_bias else None,
        )


def linear(input: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Compute torch's `linear` with oneDNN, forward and backward."""
    rows_TI = input.reshape(-1, input.shape[-1])
    output_TO: Tensor = _Linear.apply(rows_TI, weight_OI, bias_O)  # type: ignore[no-untyped-call]
    return output_TO.view(*input.shape[:-1], -1)


class OneDnnLinear(nn.Linear):
    """A linear layer that is computed with oneDNN, forward and backward."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def use_onednn(model: nn.Module) -> None:
    """Compute the linear layers of a model with oneDNN."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = OneDnnLinear
