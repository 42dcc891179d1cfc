"""AdamW on float32 masters, with gradient clipping."""

from __future__ import annotations

import torch
from torch import Tensor

from slimectl.policies.optimizer import OptimizerOptions


def adamw(masters: list[Tensor], ranks_of: list[int], options: OptimizerOptions) -> torch.optim.AdamW:
    """AdamW over `masters`; `ranks_of` are the tensors' numbers of dimensions before any sharding."""
    matrices = [master for master, ndim in zip(masters, ranks_of, strict=True) if ndim > 1]
    vectors = [master for master, ndim in zip(masters, ranks_of, strict=True) if ndim <= 1]
    groups = [{"params": matrices, "weight_decay": options.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]] or groups[:1],
        lr=options.lr,
        betas=options.betas,
        eps=options.eps,
        fused=True,
    )


def squared_norm(gradients: list[Tensor]) -> Tensor:
    """The sum of all squares, in float64 across tensors."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64)
    norms = torch._foreach_norm(gradients)
    return torch.stack(norms).double().square().sum()


def clip(gradients: list[Tensor], norm: float, limit: float) -> None:
    """Scale all gradients so that their global norm `norm` is at most `limit`."""
    if limit and norm > limit:
        torch._foreach_mul_(gradients, limit / (norm + 1e-6))
