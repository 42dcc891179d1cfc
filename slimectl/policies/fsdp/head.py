"""Log-probabilities from hidden states in chunks: the logits of a whole pack never exist at once.

R response tokens · C tokens of a chunk · V vocabulary · H hidden width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK_LOGITS = 2**23
"""Logits per chunk: 32 MiB in float32."""
KEPT_LOGITS = 2**25
"""Log-probabilities kept from forward for backward, from the first chunks on; the rest are computed again."""


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_RH: Tensor, weight_VH: Tensor, targets_R: Tensor, temperature: float, entropy: bool
    ) -> tuple[Tensor, Tensor]:
        chunk = max(1, CHUNK_LOGITS // weight_VH.shape[0])
        keeps = any(ctx.needs_input_grad[:2])
        logprobs, entropies, kept = [], [], []
        for hidden_CH, targets_C in zip(hidden_RH.split(chunk), targets_R.split(chunk), strict=True):
            log_p_CV = _log_p(hidden_CH, weight_VH, temperature)
            logprobs.append(log_p_CV.gather(1, targets_C[:, None])[:, 0])
            if entropy:
                entropies.append(-torch.exp(log_p_CV).mul_(log_p_CV).sum(1))
            if keeps and (len(kept) + 1) * chunk * weight_VH.shape[0] <= KEPT_LOGITS:
                kept.append(log_p_CV)
        ctx.save_for_backward(hidden_RH, weight_VH, targets_R, *entropies, *kept)
        ctx.temperature, ctx.chunk, ctx.entropies = temperature, chunk, len(entropies)
        return torch.cat(logprobs), torch.cat(entropies) if entropy else hidden_RH.new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad_logprobs_R: Tensor, grad_entropy_R: Tensor) -> tuple[Tensor | None, ...]:
        hidden_RH, weight_VH, targets_R, *rest = ctx.saved_tensors
        entropies, kept = rest[: ctx.entropies], rest[ctx.entropies :]
        grad_hidden_RH = torch.empty_like(hidden_RH)
        grad_weight_VH = torch.zeros_like(weight_VH) if ctx.needs_input_grad[1] else None
        for i, start in enumerate(range(0, len(hidden_RH), ctx.chunk)):
            C = slice(start, start + ctx.chunk)
            log_p_CV = kept[i] if i < len(kept) else _log_p(hidden_RH[C], weight_VH, ctx.temperature)
            # In place from here on: kept ones are read once.
            if entropies:
                # dH/dz = -p (log p + H)
                slope_C1 = grad_entropy_R[C, None]
                scale_CV = (log_p_CV + entropies[i][:, None]).mul_(-slope_C1).sub_(grad_logprobs_R[C, None])
                grad_CV = log_p_CV.exp_().mul_(scale_CV)
            else:
                grad_CV = log_p_CV.exp_().mul_(-grad_logprobs_R[C, None])
            grad_CV.scatter_add_(1, targets_R[C, None], grad_logprobs_R[C, None])
            if ctx.temperature != 1.0:
                grad_CV.div_(ctx.temperature)
            grad_CV = grad_CV.to(hidden_RH.dtype)
            torch.mm(grad_CV, weight_VH, out=grad_hidden_RH[C])
            if grad_weight_VH is not None:
                grad_weight_VH.addmm_(grad_CV.t(), hidden_RH[C])
        return grad_hidden_RH, grad_weight_VH, None, None, None


def _log_p(hidden_CH: Tensor, weight_VH: Tensor, temperature: float) -> Tensor:
    """At least float32: log-probabilities in bfloat16 are worth two digits."""
    logits_CV = hidden_CH @ weight_VH.t()
    logits_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    return torch.log_softmax(logits_CV if temperature == 1.0 else logits_CV.div_(temperature), dim=1)


def linear_log_probs(
    hidden_RH: Tensor, weight_VH: Tensor, targets_R: Tensor, *, temperature: float, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """log_softmax(hidden · weightᵀ / temperature) at the targets, and the entropy of each distribution if asked for.

    Both carry gradients to `hidden_RH` and `weight_VH`. Float32 at least, whatever the inputs.
    """
    if not len(targets_R):
        # Still a function of its inputs, so that backward reaches every rank's collectives.
        empty_R = (hidden_RH.sum(1) + weight_VH[:0].sum()).float()
        return empty_R, empty_R if entropy else None
    logprobs_R, entropy_R = _LinearLogProbs.apply(hidden_RH, weight_VH, targets_R, temperature, entropy)
    return logprobs_R, entropy_R if entropy else None
