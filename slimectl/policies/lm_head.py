"""Computes log-probabilities from hidden states in chunks, so that a pack's logits never exist all at once.

U states · Q pairs of a state and a token that it predicts, in ascending order of states · R response tokens (several
may be one pair) · C states of a chunk · V vocabulary, or a rank's rows of it · H hidden width · G the teacher's · K
likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from slimectl.algorithms.distillation import Divergence
from slimectl.errors import SettingsError
from slimectl.policies import onednn_linear
from slimectl.policies.onednn_linear import ROWS, is_faster
from slimectl.policies.pack_plan import Predictions

CHUNK_LOGITS = 2**23
"""Logits per chunk: 32 MiB in float32."""
KEPT_LOGITS = 2**25
"""Log-probabilities saved from forward for backward, first chunks first. Later chunks are recomputed."""


@dataclass(frozen=True)
class VocabularyShard:
    """This rank's `rows` rows of the vocabulary, starting at `start`. Further rows of its weight are padding."""

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

    def gather(self, tensor: Tensor) -> Tensor:
        """Concatenate the columns of all ranks."""
        parts = [torch.empty_like(tensor) for _ in range(self.group.size())]
        dist.all_gather(parts, tensor.contiguous(), group=self.group)
        return torch.cat(parts, dim=1)


@dataclass(frozen=True)
class HeadOptions:
    """What a head computes beside log-probabilities, and how."""

    temperature: float = 1.0
    entropy: bool = False
    shard: VocabularyShard | None = None
    divergence: Divergence | None = None
    """The divergence from the teacher whose likeliest tokens a pack has."""


class HeadOutputs(NamedTuple):
    """Log-probabilities of tokens, the entropy of their distributions, and their divergence from the teacher's."""

    logprobs: Tensor
    entropy: Tensor | None = None
    divergence: Tensor | None = None


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_UH: Tensor,
        weight_VH: Tensor,
        targets_Q: Tensor,
        state_Q: Tensor | None,
        options: HeadOptions,
    ) -> tuple[Tensor, Tensor]:
        temperature, entropy, shard = options.temperature, options.entropy, options.shard
        chunk = _chunk_states(hidden_UH, weight_VH)
        needs_grad = any(ctx.needs_input_grad[:2])
        index_Q, is_local_Q = _local_targets(targets_Q, shard)
        logprobs: list[Tensor] = []
        entropies: list[Tensor] = []
        saved: list[Tensor] = []
        normalizers: list[Tensor] = []
        for C, pairs, row_Q in chunks(len(hidden_UH), chunk, state_Q, hidden_UH.device):
            log_p_CV, normalizer_C = _log_p(hidden_UH[C], weight_VH, temperature, shard)
            normalizers.append(normalizer_C)
            logprobs.append(log_p_CV[row_Q, index_Q[pairs]])
            if entropy:
                entropies.append(-torch.exp(log_p_CV).mul_(log_p_CV).sum(1))
            if needs_grad and (len(saved) + 1) * chunk * weight_VH.shape[0] <= KEPT_LOGITS:
                saved.append(log_p_CV)
        logprobs_Q = torch.cat(logprobs)
        entropy_U = torch.cat(entropies) if entropy else logprobs_Q.new_empty(0)
        if shard is not None:
            logprobs_Q = shard.sum(logprobs_Q.mul_(is_local_Q))
            entropy_U = shard.sum(entropy_U) if entropy else entropy_U
        ctx.save_for_backward(hidden_UH, weight_VH, targets_Q, state_Q, entropy_U, torch.cat(normalizers), *saved)
        # If the entropy is only reported, it has no gradient and costs no backward pass.
        ctx.set_materialize_grads(False)
        ctx.temperature, ctx.chunk, ctx.shard = temperature, chunk, shard
        return logprobs_Q, entropy_U

    @staticmethod
    def backward(ctx: Any, grad_logprobs_Q: Tensor | None, grad_entropy_U: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_UH, weight_VH, targets_Q, state_Q, entropy_U, normalizer_U, *saved = ctx.saved_tensors
        if grad_logprobs_Q is None:
            grad_logprobs_Q = entropy_U.new_zeros(len(targets_Q))
        index_Q, is_local_Q = _local_targets(targets_Q, ctx.shard)
        loss = _LossGradient(
            sum_U=_sum_by_state(grad_logprobs_Q, state_Q, len(hidden_UH)),
            local_Q=grad_logprobs_Q * is_local_Q,
            entropy_U=entropy_U,
            of_entropy_U=grad_entropy_U,
            temperature=ctx.temperature,
        )
        rows_VH = _rows(weight_VH, ctx.shard)
        grad_weight_VH = torch.zeros_like(weight_VH) if ctx.needs_input_grad[1] else None
        grad_rows_VH = None if grad_weight_VH is None else _rows(grad_weight_VH, ctx.shard)
        if grad_rows_VH is not None and weight_VH.dtype.itemsize < 4 and len(hidden_UH) > ctx.chunk:
            state_Q = torch.arange(len(hidden_UH), device=hidden_UH.device) if state_Q is None else state_Q
            pairs = (state_Q, index_Q)
            grad_hidden_UH = _backward_by_slabs(hidden_UH, rows_VH, normalizer_U, saved, pairs, loss, grad_rows_VH)
            return grad_hidden_UH, grad_weight_VH, None, None, None
        grad_hidden_UH = torch.empty_like(hidden_UH)
        for i, (C, pairs_C, row_Q) in enumerate(chunks(len(hidden_UH), ctx.chunk, state_Q, hidden_UH.device)):
            log_p_CV = saved[i] if i < len(saved) else _log_p(hidden_UH[C], weight_VH, ctx.temperature, ctx.shard)[0]
            grad_CV = loss.of_logits(log_p_CV, C, row_Q, index_Q[pairs_C], loss.local_Q[pairs_C]).to(hidden_UH.dtype)
            if is_faster(grad_CV.device, grad_CV.dtype):
                grad_hidden_UH[C] = onednn_linear.product(grad_CV, rows_VH.t())
                if grad_rows_VH is not None:
                    onednn_linear.add_product(grad_rows_VH, grad_CV, hidden_UH[C])
                continue
            torch.mm(grad_CV, rows_VH, out=grad_hidden_UH[C])
            if grad_rows_VH is not None:
                grad_rows_VH.addmm_(grad_CV.t(), hidden_UH[C])
        return grad_hidden_UH, grad_weight_VH, None, None, None


@dataclass(frozen=True)
class _LossGradient:
    """Gradient of the loss by log-probabilities and entropies, from which the gradient by logits is computed."""

    sum_U: Tensor
    """Gradients of the pairs, summed by state."""
    local_Q: Tensor
    """Gradients of the pairs whose token this rank holds, 0 for the others."""
    entropy_U: Tensor
    of_entropy_U: Tensor | None
    temperature: float

    def of_logits(self, log_p_CV: Tensor, C: slice, row_Q: Tensor, column_Q: Tensor, grad_Q: Tensor) -> Tensor:
        """Return the gradient by the logits of some states and tokens, computed in place of their log-probabilities.

        `grad_Q` has the gradient of each pair. `row_Q` and `column_Q` are the pair's position.
        """
        if self.of_entropy_U is not None:
            # dH/dz = -p (log p + H)
            slope_C1 = self.of_entropy_U[C, None]
            scale_CV = (log_p_CV + self.entropy_U[C, None]).mul_(-slope_C1).sub_(self.sum_U[C, None])
            grad_CV = log_p_CV.exp_().mul_(scale_CV)
        else:
            grad_CV = log_p_CV.exp_().mul_(-self.sum_U[C, None])
        # Pairs are distinct, so every element is added to once. Zeros change nothing.
        grad_CV.view(-1).scatter_add_(0, row_Q * grad_CV.shape[1] + column_Q, grad_Q)
        return grad_CV if self.temperature == 1.0 else grad_CV.div_(self.temperature)


def _backward_by_slabs(
    hidden_UH: Tensor,
    rows_VH: Tensor,
    normalizer_U: Tensor,
    saved: list[Tensor],
    pairs: tuple[Tensor, Tensor],
    loss: _LossGradient,
    grad_rows_VH: Tensor,
) -> Tensor:
    """Write the weight's gradient and return the hidden states' gradient, one slab of the vocabulary at a time.

    In 16 bits, a weight's gradient that is summed over chunks of states is rounded once per chunk. A slab is one
    product. The hidden states' gradient is smaller and summed in float32. `saved` has the log-probabilities of the
    first states. `normalizer_U` is subtracted from the logits of the other states. `pairs` has their states and tokens.
    """
    states, (state_Q, index_Q) = len(hidden_UH), pairs
    known = sum(map(len, saved))
    width = max(1, CHUNK_LOGITS // states)
    grad_hidden_UH = torch.zeros_like(hidden_UH, dtype=torch.float32)
    for start in range(0, len(rows_VH), width):
        S = slice(start, start + width)
        rows_SH = rows_VH[S]
        log_p_US = torch.cat([*(log_p_CV[:, S] for log_p_CV in saved), (hidden_UH[known:] @ rows_SH.t()).float()])
        log_p_US[known:].div_(loss.temperature).sub_(normalizer_U[known:, None])
        column_Q = index_Q - start
        is_inside_Q = (column_Q >= 0) & (column_Q < len(rows_SH))
        grad_US = loss.of_logits(log_p_US, slice(None), state_Q, column_Q * is_inside_Q, loss.local_Q * is_inside_Q).to(
            hidden_UH.dtype
        )
        torch.mm(grad_US.t(), hidden_UH, out=grad_rows_VH[S])
        grad_hidden_UH += grad_US @ rows_SH
    return grad_hidden_UH.to(hidden_UH.dtype)


def _chunk_states(hidden_UH: Tensor, weight_VH: Tensor) -> int:
    """Return the number of states per chunk, from the padded number of rows, so that all ranks use the same chunks."""
    chunk = max(1, CHUNK_LOGITS // weight_VH.shape[0])
    if chunk < ROWS or not is_faster(hidden_UH.device, hidden_UH.dtype):
        return chunk
    return chunk // ROWS * ROWS


def chunks(
    states: int, chunk: int, state_Q: Tensor | None, device: torch.device
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield the states of every chunk, the pairs of these states, and each pair's row in the chunk."""
    starts = range(0, states, chunk)
    if state_Q is None:
        for start in starts:
            C = slice(start, min(start + chunk, states))
            yield C, C, torch.arange(C.stop - C.start, device=device)
        return
    ends = torch.searchsorted(state_Q, torch.tensor([*starts, states], device=device)).tolist()
    for start, first, end in zip(starts, ends, ends[1:], strict=False):
        pairs = slice(first, end)
        yield slice(start, start + chunk), pairs, state_Q[pairs] - start


def _sum_by_state(values_Q: Tensor, state_Q: Tensor | None, states: int) -> Tensor:
    """Sum the values of each state's pairs, in one order on every device."""
    if state_Q is None:
        return values_Q
    sum_U1: Tensor = torch.ops.aten.embedding_dense_backward(values_Q[:, None], state_Q, states, -1, False)
    return sum_U1[:, 0]


def _local_targets(targets_Q: Tensor, shard: VocabularyShard | None) -> tuple[Tensor, Tensor | float]:
    """Return the local row of each target (0 if another rank holds it), and a mask of the targets on this rank."""
    if shard is None:
        return targets_Q, 1.0
    index_Q = targets_Q - shard.start
    is_local_Q = (index_Q >= 0) & (index_Q < shard.rows)
    return index_Q * is_local_Q, is_local_Q


def _rows(weight_VH: Tensor, shard: VocabularyShard | None) -> Tensor:
    return weight_VH if shard is None else weight_VH[: shard.rows]


def _log_p(
    hidden_CH: Tensor, weight_VH: Tensor, temperature: float, shard: VocabularyShard | None
) -> tuple[Tensor, Tensor]:
    """Return log_softmax of a chunk [C, V], and the normalizer [C] that it subtracts from the logits.

    Computed at least in float32, because bfloat16 log-probabilities have two significant digits.
    """
    rows_VH = _rows(weight_VH, shard)
    fast = is_faster(hidden_CH.device, hidden_CH.dtype)
    logits_CV = onednn_linear.product(hidden_CH, rows_VH) if fast else hidden_CH @ rows_VH.t()
    logits_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    if temperature != 1.0:
        logits_CV = logits_CV.div_(temperature)
    first_C = logits_CV[:, 0].clone()
    if shard is None:
        log_p_CV = torch.log_softmax(logits_CV, dim=1)
    else:
        logits_CV.sub_(shard.max(logits_CV.amax(1, keepdim=True)))
        log_p_CV = logits_CV.sub_(shard.sum(logits_CV.exp().sum(1, keepdim=True)).log_())
    return log_p_CV, first_C - log_p_CV[:, 0]


def linear_log_probs(
    hidden_UH: Tensor,
    weight_VH: Tensor,
    targets_Q: Tensor,
    options: HeadOptions,
    *,
    state_Q: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return log_softmax(hidden · weightᵀ / temperature) at the targets [Q], and the entropies [U] if requested.

    Both carry gradients to `hidden_UH` and `weight_VH`, and are at least float32 for any input. `state_Q` has the
    states of the targets, ascending, with no pair twice. Without it every state has one target. With a shard, every
    rank of its group passes the same hidden states and its own rows of the weight, and gets the same values. Its
    gradient for `hidden_UH` covers only its own rows. The sum over the group is the full gradient.
    """
    if not len(targets_Q):
        # Still a function of its inputs, so that backward reaches every rank's collectives.
        empty_Q = (hidden_UH.sum(1) + weight_VH[:0].sum()).float()
        return empty_Q, empty_Q if options.entropy else None
    states = len(hidden_UH)
    hidden_UH, state_Q = _padded(hidden_UH, weight_VH, state_Q)
    logprobs_Q, entropy_U = _LinearLogProbs.apply(  # type: ignore[no-untyped-call]
        hidden_UH, weight_VH, targets_Q, state_Q, options
    )
    if len(entropy_U) > states:
        entropy_U = entropy_U[:states].clone()  # FSDP2 warns of a root module that returns views
    return logprobs_Q, entropy_U if options.entropy else None


def _padded(hidden_UH: Tensor, weight_VH: Tensor, state_Q: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Add states that predict nothing, so that oneDNN sees only a few chunk sizes."""
    states = len(hidden_UH)
    missing = -states % min(ROWS, _chunk_states(hidden_UH, weight_VH))
    if not missing or not is_faster(hidden_UH.device, hidden_UH.dtype):
        return hidden_UH, state_Q
    if state_Q is None:
        state_Q = torch.arange(states, device=hidden_UH.device)
    return F.pad(hidden_UH, (0, 0, 0, missing)), state_Q


def predicted_log_probs(
    hidden_UH: Tensor, weight_VH: Tensor, predictions: Predictions, options: HeadOptions
) -> HeadOutputs:
    """Return the outputs [R] for every sample's response tokens, by one `linear_log_probs`."""
    outputs = linear_log_probs(hidden_UH, weight_VH, predictions.targets_Q, options, state_Q=predictions.state_Q)
    return expanded(*outputs, predictions, options.divergence)


def expanded(
    logprobs_Q: Tensor, entropy_U: Tensor | None, predictions: Predictions, divergence: Divergence | None
) -> HeadOutputs:
    """Return the outputs [R] for every sample's response tokens, from those of pairs and states.

    The divergence over the teacher's likeliest tokens is a function of the policy's log-probabilities of these tokens,
    so its gradient reaches all logits through them.
    """
    divergence_R = None
    if divergence is not None and len(predictions.sources_U):
        if predictions.teacher_RK is None:
            raise SettingsError(
                "algorithm.opd_divergence needs teacher_top_log_probs, which these samples lack. Set opd_kl_coef to 0."
            )
        divergence_R = divergence.over_likeliest(predictions.of_teacher_pairs(logprobs_Q), predictions.teacher_RK)
    entropy_R = None if entropy_U is None else predictions.of_states(entropy_U)
    return HeadOutputs(predictions.of_pairs(logprobs_Q), entropy_R, divergence_R)


def linear_top_log_probs(hidden_UH: Tensor, weight_VH: Tensor, k: int, options: HeadOptions) -> tuple[Tensor, Tensor]:
    """Return the k likeliest tokens of every state and their log-probabilities, [U, K] each, without gradients."""
    states, shard = len(hidden_UH), options.shard
    hidden_UH, _ = _padded(hidden_UH, weight_VH, None)

    def log_p(hidden_CH: Tensor) -> Tensor:
        return _log_p(hidden_CH, weight_VH, options.temperature, shard)[0]

    parts = top_in_chunks(log_p, hidden_UH, k, _chunk_states(hidden_UH, weight_VH))
    tokens_UK, logprobs_UK = (part_UK[:states] for part_UK in parts)
    if shard is None:
        return tokens_UK, logprobs_UK
    missing = k - tokens_UK.shape[1]  # a rank may hold fewer tokens
    tokens_UX = shard.gather(F.pad(tokens_UK + shard.start, (0, missing)))
    logprobs_UX = shard.gather(F.pad(logprobs_UK, (0, missing), value=-torch.inf))
    logprobs_UK, place_UK = logprobs_UX.topk(min(k, int((logprobs_UX > -torch.inf).sum(1).min())), dim=1)
    return tokens_UX.gather(1, place_UK), logprobs_UK


def top_in_chunks(log_p: Callable[[Tensor], Tensor], hidden_UH: Tensor, k: int, chunk: int) -> tuple[Tensor, Tensor]:
    """Return the k likeliest tokens and their log-probabilities, [U, K], by `log_p` of `chunk` states at a time."""
    tops = []
    for hidden_CH in hidden_UH.split(chunk):
        log_p_CV = log_p(hidden_CH)
        tops.append(log_p_CV.topk(min(k, log_p_CV.shape[1]), dim=1))
    return torch.cat([top.indices for top in tops]), torch.cat([top.values for top in tops])


def of_logits(logits_RV: Tensor, targets_R: Tensor, *, entropy: bool) -> tuple[Tensor, Tensor | None]:
    """Return log-probabilities [R] and entropies as `linear_log_probs` does, from logits divided by the temperature.

    Use it for losses that need the logits themselves.
    """
    log_p_RV = torch.log_softmax(logits_RV, dim=1)
    entropy_R = -(log_p_RV.exp() * log_p_RV).sum(1) if entropy else None
    return log_p_RV.gather(1, targets_R[:, None])[:, 0], entropy_R


def linear_logits(hidden_RH: Tensor, weight_VH: Tensor, *, temperature: float) -> Tensor:
    """Return hidden · weightᵀ / temperature, [R, V], at least in float32."""
    logits_RV = hidden_RH @ weight_VH.t()
    return logits_RV.to(torch.promote_types(logits_RV.dtype, torch.float32)) / temperature
