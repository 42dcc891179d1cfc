"""Computes log-probabilities from hidden states in chunks, so that a pack's logits never exist all at once.

U states · Q pairs of a state and a token that it predicts, in ascending order of states · R response tokens (several
may be one pair) · C states of a chunk · V vocabulary, or a rank's rows of it · H hidden width · G the teacher's · K
likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
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
class TeacherStates:
    """A teacher's final states where the policy has its own, and its head.

    Its distributions are computed from them chunk by chunk, as the policy's are, and never exist all at once. The
    teacher shares the vocabulary, and its shards.
    """

    hidden_UG: Tensor
    weight_VG: Tensor
    temperature: float
    logits: Callable[[Tensor], Tensor] | None = None
    """The head itself, if it is more than a product with the weight."""

    def log_p(self, C: slice, shard: VocabularyShard | None = None) -> tuple[Tensor, Tensor]:
        """Return log-probabilities [C, V] of a chunk of states, and the normalizer [C] as `_log_p` does."""
        with torch.no_grad():
            if self.logits is None:
                return _log_p(self.hidden_UG[C], self.weight_VG, self.temperature, shard)
            logits_CV = scaled(self.logits(self.hidden_UG[C]), self.temperature)
            log_p_CV = torch.log_softmax(logits_CV, dim=1)
            return log_p_CV, logits_CV[:, 0] - log_p_CV[:, 0]

    def slab(self, S: slice, normalizer_U: Tensor) -> Tensor:
        """Return the log-probabilities [U, S] of a slab of the vocabulary."""
        logits_US = scaled(self.hidden_UG @ self.weight_VG[S].t(), self.temperature)
        return logits_US.sub_(normalizer_U[:, None])

    def padded(self, states: int) -> TeacherStates:
        """Return it with more states, as the policy's are padded."""
        return replace(self, hidden_UG=F.pad(self.hidden_UG, (0, 0, 0, states - len(self.hidden_UG))))


def check_same_vocabulary(teacher: int, policy: int) -> None:
    """Raise SettingsError if the heads have different numbers of tokens, so that distributions cannot be compared."""
    if teacher != policy:
        raise SettingsError(
            f"algorithm.opd_teacher_load: the head of the teacher has {teacher} tokens and that of the policy {policy}."
            " Set algorithm.opd_top_k, which compares the teacher's likeliest tokens."
        )


@dataclass(frozen=True)
class HeadOptions:
    """What a head computes in addition to log-probabilities, and how."""

    temperature: float = 1.0
    entropy: bool = False
    shard: VocabularyShard | None = None
    divergence: Divergence | None = None
    """The divergence from a teacher. Without `teacher`, it is over the likeliest tokens that a pack has."""
    teacher: TeacherStates | None = None
    """The teacher of a divergence over the full vocabulary."""


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
    ) -> tuple[Tensor, Tensor, Tensor]:
        entropy, shard, teacher = options.entropy, options.shard, options.teacher
        chunk = _chunk_states(hidden_UH, weight_VH)
        needs_grad = any(ctx.needs_input_grad[:2])
        index_Q, is_local_Q = _local_targets(targets_Q, shard)
        logprobs: list[Tensor] = []
        entropies: list[Tensor] = []
        divergences: list[Tensor] = []
        slopes: list[Tensor] = []
        saved: list[Tensor] = []
        normalizers: list[Tensor] = []
        of_teacher: list[Tensor] = []
        for C, pairs, row_Q in chunks(len(hidden_UH), chunk, state_Q, hidden_UH.device):
            log_p_CV, normalizer_C = _log_p(hidden_UH[C], weight_VH, options.temperature, shard)
            normalizers.append(normalizer_C)
            logprobs.append(log_p_CV[row_Q, index_Q[pairs]])
            if entropy:
                entropies.append(-torch.exp(log_p_CV).mul_(log_p_CV).sum(1))
            if teacher is not None and options.divergence is not None:
                teacher_CV, teacher_normalizer_C = teacher.log_p(C, shard)
                divergences.append(options.divergence.terms(log_p_CV, teacher_CV).sum(1))
                slopes.append(options.divergence.slopes(log_p_CV, teacher_CV).sum(1))
                of_teacher.append(teacher_normalizer_C)
            if needs_grad and (len(saved) + 1) * chunk * weight_VH.shape[0] <= KEPT_LOGITS:
                saved.append(log_p_CV)
        logprobs_Q = torch.cat(logprobs)
        entropy_U = torch.cat(entropies) if entropy else logprobs_Q.new_empty(0)
        divergence_U, slope_U, teacher_normalizer_U = (
            torch.cat(parts) if parts else logprobs_Q.new_empty(0) for parts in (divergences, slopes, of_teacher)
        )
        if shard is not None:
            logprobs_Q = shard.sum(logprobs_Q.mul_(is_local_Q))
            entropy_U, divergence_U, slope_U = (
                shard.sum(part_U) if len(part_U) else part_U for part_U in (entropy_U, divergence_U, slope_U)
            )
        ctx.save_for_backward(
            hidden_UH, weight_VH, targets_Q, state_Q, entropy_U, slope_U, teacher_normalizer_U,
            torch.cat(normalizers), *saved,
        )  # fmt: skip
        # If the entropy is only reported, it has no gradient and costs no backward pass.
        ctx.set_materialize_grads(False)
        ctx.options, ctx.chunk = options, chunk
        return logprobs_Q, entropy_U, divergence_U

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs_Q: Tensor | None, grad_entropy_U: Tensor | None, grad_divergence_U: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden_UH, weight_VH, targets_Q, state_Q, entropy_U, slope_U, teacher_U, normalizer_U, *saved = (
            ctx.saved_tensors
        )
        options: HeadOptions = ctx.options
        if grad_logprobs_Q is None:
            grad_logprobs_Q = entropy_U.new_zeros(len(targets_Q))
        index_Q, is_local_Q = _local_targets(targets_Q, options.shard)
        loss = _LossGradient(
            sum_U=_sum_by_state(grad_logprobs_Q, state_Q, len(hidden_UH)),
            local_Q=grad_logprobs_Q * is_local_Q,
            entropy_U=entropy_U,
            of_entropy_U=grad_entropy_U,
            slope_U=slope_U,
            teacher_normalizer_U=teacher_U,
            of_divergence_U=grad_divergence_U,
            options=options,
        )
        rows_VH = _rows(weight_VH, options.shard)
        grad_weight_VH = torch.zeros_like(weight_VH) if ctx.needs_input_grad[1] else None
        grad_rows_VH = None if grad_weight_VH is None else _rows(grad_weight_VH, options.shard)
        many_in_16_bits = weight_VH.dtype.itemsize < 4 and len(hidden_UH) > ctx.chunk
        if grad_rows_VH is not None and many_in_16_bits and loss.has_slabs:
            state_Q = torch.arange(len(hidden_UH), device=hidden_UH.device) if state_Q is None else state_Q
            pairs = (state_Q, index_Q)
            grad_hidden_UH = _backward_by_slabs(hidden_UH, rows_VH, normalizer_U, saved, pairs, loss, grad_rows_VH)
            return grad_hidden_UH, grad_weight_VH, None, None, None
        grad_hidden_UH = torch.empty_like(hidden_UH)
        for i, (C, pairs_C, row_Q) in enumerate(chunks(len(hidden_UH), ctx.chunk, state_Q, hidden_UH.device)):
            if i < len(saved):
                log_p_CV = saved[i]
            else:
                log_p_CV, _ = _log_p(hidden_UH[C], weight_VH, options.temperature, options.shard)
            teacher_CV = loss.teacher_chunk(C)
            grad_CV = loss.of_logits(log_p_CV, C, (row_Q, index_Q[pairs_C]), loss.local_Q[pairs_C], teacher_CV)
            grad_CV = grad_CV.to(hidden_UH.dtype)
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
    """Gradient of the loss by the outputs of the head, from which the gradient by logits is computed."""

    sum_U: Tensor
    """Gradients of the pairs, summed by state."""
    local_Q: Tensor
    """Gradients of the pairs whose token this rank holds, 0 for the others."""
    entropy_U: Tensor
    of_entropy_U: Tensor | None
    slope_U: Tensor
    """Derivatives of the divergence by the log-probabilities of a state, summed over the vocabulary."""
    teacher_normalizer_U: Tensor
    of_divergence_U: Tensor | None
    options: HeadOptions

    @property
    def has_slabs(self) -> bool:
        """Whether everything can be computed for a part of the vocabulary."""
        return self._teacher is None or self._teacher.logits is None

    @property
    def _teacher(self) -> TeacherStates | None:
        return None if self.of_divergence_U is None else self.options.teacher

    def teacher_chunk(self, C: slice) -> Tensor | None:
        """Return the teacher's log-probabilities [C, V] if the loss depends on them."""
        return None if self._teacher is None else self._teacher.log_p(C, self.options.shard)[0]

    def teacher_slab(self, S: slice) -> Tensor | None:
        """Return the teacher's log-probabilities [U, S] if the loss depends on them."""
        return None if self._teacher is None else self._teacher.slab(S, self.teacher_normalizer_U)

    def of_logits(
        self, log_p_CV: Tensor, C: slice, place_Q: tuple[Tensor, Tensor], grad_Q: Tensor, teacher_CV: Tensor | None
    ) -> Tensor:
        """Return the gradient by the logits of some states and tokens, computed in place of their log-probabilities.

        `grad_Q` has the gradient of each pair, and `place_Q` its row and column.
        """
        of_divergence_CV = None if teacher_CV is None else self._of_divergence(log_p_CV, C, teacher_CV)
        row_Q, column_Q = place_Q
        if self.of_entropy_U is not None:
            # dH/dz = -p (log p + H)
            slope_C1 = self.of_entropy_U[C, None]
            scale_CV = (log_p_CV + self.entropy_U[C, None]).mul_(-slope_C1).sub_(self.sum_U[C, None])
            grad_CV = log_p_CV.exp_().mul_(scale_CV)
        else:
            grad_CV = log_p_CV.exp_().mul_(-self.sum_U[C, None])
        # Pairs are distinct, so every element is added to once. Zeros change nothing.
        grad_CV.view(-1).scatter_add_(0, row_Q * grad_CV.shape[1] + column_Q, grad_Q)
        if of_divergence_CV is not None:
            grad_CV.add_(of_divergence_CV)
        return grad_CV if self.options.temperature == 1.0 else grad_CV.div_(self.options.temperature)

    def _of_divergence(self, log_p_CV: Tensor, C: slice, teacher_CV: Tensor) -> Tensor:
        """Return the gradient of the divergence: dD/dz = dD/dlog p - p times the sum of dD/dlog p."""
        assert self.options.divergence is not None
        assert self.of_divergence_U is not None
        grad_CV = self.options.divergence.slopes(log_p_CV, teacher_CV)
        return grad_CV.addcmul_(log_p_CV.exp(), self.slope_U[C, None], value=-1).mul_(self.of_divergence_U[C, None])


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
        log_p_US[known:].div_(loss.options.temperature).sub_(normalizer_U[known:, None])
        column_Q = index_Q - start
        is_inside_Q = (column_Q >= 0) & (column_Q < len(rows_SH))
        place_Q, grad_Q = (state_Q, column_Q * is_inside_Q), loss.local_Q * is_inside_Q
        grad_US = loss.of_logits(log_p_US, slice(None), place_Q, grad_Q, loss.teacher_slab(S)).to(hidden_UH.dtype)
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
) -> HeadOutputs:
    """Return log_softmax(hidden · weightᵀ / temperature) at the targets [Q], and if requested the entropies [U].

    With a teacher, also return the divergences [U] from its distributions. All carry gradients to `hidden_UH` and
    `weight_VH`, and are at least float32 for any input. `state_Q` has the states of the targets, ascending, with no
    pair twice. Without it every state has one target. With a shard, every rank of its group passes the same hidden
    states and its own rows of the weight, and gets the same values. Its gradient for `hidden_UH` covers only its own
    rows. The sum over the group is the full gradient.
    """
    if not len(targets_Q):
        # Still a function of its inputs, so that backward reaches every rank's collectives.
        empty_Q = (hidden_UH.sum(1) + weight_VH[:0].sum()).float()
        return HeadOutputs(empty_Q, empty_Q if options.entropy else None, None if options.teacher is None else empty_Q)
    states = len(hidden_UH)
    hidden_UH, state_Q = _padded(hidden_UH, weight_VH, state_Q)
    if options.teacher is not None:
        options = replace(options, teacher=options.teacher.padded(len(hidden_UH)))
    logprobs_Q, *parts = _LinearLogProbs.apply(  # type: ignore[no-untyped-call]
        hidden_UH, weight_VH, targets_Q, state_Q, options
    )
    # FSDP2 warns of a root module that returns views.
    entropy_U, divergence_U = (part_U[:states].clone() if len(part_U) > states else part_U for part_U in parts)
    return HeadOutputs(
        logprobs_Q, entropy_U if options.entropy else None, None if options.teacher is None else divergence_U
    )


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
    return expanded(outputs, predictions, options.divergence)


def expanded(outputs: HeadOutputs, predictions: Predictions, divergence: Divergence | None) -> HeadOutputs:
    """Return the outputs [R] for every sample's response tokens, from the outputs of pairs and states.

    Without the states of a teacher, the divergence is over its likeliest tokens. It is a function of the policy's
    log-probabilities of these tokens, so its gradient reaches all logits through them.
    """
    logprobs_Q, entropy_U, divergence_U = outputs
    divergence_R = None if divergence_U is None else predictions.of_states(divergence_U)
    if divergence is not None and divergence_U is None and len(predictions.sources_U):
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
    return scaled(hidden_RH @ weight_VH.t(), temperature)


def scaled(logits_CV: Tensor, temperature: float) -> Tensor:
    """Return logits / temperature, at least in float32."""
    return logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32)) / temperature
