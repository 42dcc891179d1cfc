"""Log-probabilities from hidden states in chunks: the logits of a whole pack never exist at once.

R response tokens · C tokens of a chunk · V vocabulary, or a rank's rows of it · H hidden width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_LOGITS = 2**23
"""Logits per chunk: 32 MiB in float32."""
KEPT_LOGITS = 2**25
"""Log-probabilities saved from forward for backward, first chunks first; those of later chunks are recomputed."""


@dataclass(frozen=True)
class VocabularyShard:
    """This rank's `rows` rows of the vocabulary from row `start`; further rows of its weight are padding."""

    start: int
    rows: int
    group: dist.ProcessGroup

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over all ranks of the group, in place."""
        dist.all_reduce(tensor, group=self.group)
        return tensor

    def max(self, tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group)
        return tensor


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_RH: Tensor,
        weight_VH: Tensor,
        targets_R: Tensor,
        temperature: float,
        entropy: bool,
        shard: VocabularyShard | None,
    ) -> tuple[Tensor, Tensor]:
        # From the padded number of rows: all ranks must cut the same chunks.
        chunk = max(1, CHUNK_LOGITS // weight_VH.shape[0])
        needs_grad = any(ctx.needs_input_grad[:2])
        index_R, is_local_R = _local_targets(targets_R, shard)
        logprobs: list[Tensor] = []
        entropies: list[Tensor] = []
        saved: list[Tensor] = []
        for start in range(0, len(hidden_RH), chunk):
            C = slice(start, start + chunk)
            log_p_CV = _log_p(hidden_RH[C], weight_VH, temperature, shard)
            logprobs.append(log_p_CV.gather(1, index_R[C, None])[:, 0])
            if entropy:
                entropies.append(-torch.exp(log_p_CV).mul_(log_p_CV).sum(1))
            if needs_grad and (len(saved) + 1) * chunk * weight_VH.shape[0] <= KEPT_LOGITS:
                saved.append(log_p_CV)
        logprobs_R = torch.cat(logprobs)
        entropy_R = torch.cat(entropies) if entropy else logprobs_R.new_empty(0)
        if shard is not None:
            logprobs_R = shard.sum(logprobs_R.mul_(is_local_R))
            entropy_R = shard.sum(entropy_R) if entropy else entropy_R
        ctx.save_for_backward(hidden_RH, weight_VH, targets_R, entropy_R, *saved)
        # An entropy that is only reported comes back without a gradient, and costs no backward pass.
        ctx.set_materialize_grads(False)
        ctx.temperature, ctx.chunk, ctx.shard = temperature, chunk, shard
        return logprobs_R, entropy_R

    @staticmethod
    def backward(ctx: Any, grad_logprobs_R: Tensor | None, grad_entropy_R: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_RH, weight_VH, targets_R, entropy_R, *saved = ctx.saved_tensors
        if grad_logprobs_R is None:
            grad_logprobs_R = torch.zeros_like(entropy_R)
        rows_VH = _rows(weight_VH, ctx.shard)
        index_R, is_local_R = _local_targets(targets_R, ctx.shard)
        grad_hidden_RH = torch.empty_like(hidden_RH)
        grad_weight_VH = torch.zeros_like(weight_VH) if ctx.needs_input_grad[1] else None
        for i, start in enumerate(range(0, len(hidden_RH), ctx.chunk)):
            C = slice(start, start + ctx.chunk)
            log_p_CV = saved[i] if i < len(saved) else _log_p(hidden_RH[C], weight_VH, ctx.temperature, ctx.shard)
            # In place from here on: saved tensors are read once.
            if grad_entropy_R is not None:
                # dH/dz = -p (log p + H)
                slope_C1 = grad_entropy_R[C, None]
                scale_CV = (log_p_CV + entropy_R[C, None]).mul_(-slope_C1).sub_(grad_logprobs_R[C, None])
                grad_CV = log_p_CV.exp_().mul_(scale_CV)
            else:
                grad_CV = log_p_CV.exp_().mul_(-grad_logprobs_R[C, None])
            grad_CV.scatter_add_(1, index_R[C, None], (grad_logprobs_R * is_local_R)[C, None])
            if ctx.temperature != 1.0:
                grad_CV.div_(ctx.temperature)
            grad_CV = grad_CV.to(hidden_RH.dtype)
            torch.mm(grad_CV, rows_VH, out=grad_hidden_RH[C])
            if grad_weight_VH is not None:
                _rows(grad_weight_VH, ctx.shard).addmm_(grad_CV.t(), hidden_RH[C])
        return grad_hidden_RH, grad_weight_VH, None, None, None, None


def _local_targets(targets_R: Tensor, shard: VocabularyShard | None) -> tuple[Tensor, Tensor | float]:
    """Local row of each target (0 if another rank holds it), and a mask of the targets that this rank holds."""
    if shard is None:
        return targets_R, 1.0
    index_R = targets_R - shard.start
    is_local_R = (index_R >= 0) & (index_R < shard.rows)
    return index_R * is_local_R, is_local_R


def _rows(weight_VH: Tensor, shard: VocabularyShard | None) -> Tensor:
    return weight_VH if shard is None else weight_VH[: shard.rows]


def _log_p(hidden_CH: Tensor, weight_VH: Tensor, temperature: float, shard: VocabularyShard | None) -> Tensor:
    """log_softmax of a chunk, in float32 at least: bfloat16 log-probabilities have two significant digits."""
    logits_CV = hidden_CH @ _rows(weight_VH, shard).t()
    logits_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    if temperature != 1.0:
        logits_CV = logits_CV.div_(temperature)
    if shard is None:
        return torch.log_softmax(logits_CV, dim=1)
    logits_CV.sub_(shard.max(logits_CV.amax(1, keepdim=True)))
    return logits_CV.sub_(shard.sum(logits_CV.exp().sum(1, keepdim=True)).log_())


def linear_log_probs(
    hidden_RH: Tensor,
    weight_VH: Tensor,
    targets_R: Tensor,
    *,
    temperature: float,
    entropy: bool,
    shard: VocabularyShard | None = None,
) -> tuple[Tensor, Tensor | None]:
    """log_softmax(hidden · weightᵀ / temperature) at the targets, and the entropy of each distribution if requested.

    Both carry gradients to `hidden_RH` and `weight_VH`. Float32 at least, whatever the inputs. With a `shard` every
    rank of its group passes the same hidden states and its own rows of the weight, and gets the same values; its
    gradient for `hidden_RH` is that of its rows only: the sum over the group is the full gradient.
    """
    if not len(targets_R):
        # Still a function of its inputs, so that backward reaches every rank's collectives.
        empty_R = (hidden_RH.sum(1) + weight_VH[:0].sum()).float()
        return empty_R, empty_R if entropy else None
    logprobs_R, entropy_R = _LinearLogProbs.apply(hidden_RH, weight_VH, targets_R, temperature, entropy, shard)  # type: ignore[no-untyped-call]
    return logprobs_R, entropy_R if entropy else None


def of_logits(logits_RV: Tensor, targets_R: Tensor, *, entropy: bool) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities [R] and entropies of `linear_log_probs`, from logits that are divided by the temperature.

    For losses that need the logits themselves.
    """
    log_p_RV = torch.log_softmax(logits_RV, dim=1)
    entropy_R = -(log_p_RV.exp() * log_p_RV).sum(1) if entropy else None
    return log_p_RV.gather(1, targets_R[:, None])[:, 0], entropy_R


def linear_logits(hidden_RH: Tensor, weight_VH: Tensor, *, temperature: float) -> Tensor:
    """hidden · weightᵀ / temperature, [R, V], in float32 at least."""
    logits_RV = hidden_RH @ weight_VH.t()
    return logits_RV.to(torch.promote_types(logits_RV.dtype, torch.float32)) / temperature
