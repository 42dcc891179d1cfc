"""Plans a pack once: its rows, input positions, attention spans, predictions and constants of the loss.

T input tokens · R response tokens, sample by sample · U states that predict · Q pairs of a state and its prediction ·
K likeliest tokens of a teacher.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from slimectl.algorithms.packing import Pack, plan_batches
from slimectl.data.checks import LARGEST_ID
from slimectl.data.routed_experts import routing_marks
from slimectl.errors import RecordError
from slimectl.policies.options import TrainerOptions
from slimectl.policies.routed_experts import RoutingShape
from slimectl.system.liveness import note_progress
from slimectl.types import TokenBatch, TopTokens, TrainingSample

Value = TypeVar("Value")

CONSTANTS = {
    "loss_weights": "weights_T", "advantages": "advantages_T", "old_log_probs": "old_logprobs_T",
    "ref_log_probs": "ref_logprobs_T", "rollout_log_probs": "rollout_logprobs_T",
    "values": "values_T", "returns": "returns_T",
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class AttentionSpan:
    """Input positions [start, start + length) that attend causally to themselves and to all of `context`."""

    start: int
    length: int
    context: np.ndarray
    """Input positions of the tokens before the span, on the path from the root of its trie. Empty for a root."""

    @property
    def area(self) -> int:
        return self.length * (len(self.context) + self.length)


@dataclass(frozen=True)
class Predictions:
    """Which state predicts which token. Samples may share a state, and a state may predict several tokens.

    If `state_Q` is None nothing is shared, so states, pairs and response tokens are the same.
    """

    sources_U: Tensor
    """Input position of each state. For the first response token it is the last prompt token."""
    targets_Q: Tensor
    state_Q: Tensor | None = None
    """State of each pair, ascending."""
    pair_R: Tensor | None = None
    pair_RK: Tensor | None = None
    """Pairs of the teacher's likeliest tokens. They are among the pairs because the loss compares them."""
    teacher_RK: Tensor | None = None
    """The teacher's log-probabilities of these tokens. -inf where there are fewer."""

    def of_pairs(self, values_Q: Tensor) -> Tensor:
        """Expand values [Q] of the pairs to values [R] of all samples' tokens."""
        return values_Q if self.pair_R is None else _select(values_Q, self.pair_R)

    def of_teacher_pairs(self, values_Q: Tensor) -> Tensor:
        """Expand values [Q] of the pairs to values [R, K] of the teacher's likeliest tokens."""
        assert self.pair_RK is not None
        return _select(values_Q, self.pair_RK)

    def of_states(self, values_U: Tensor) -> Tensor:
        """Expand values [U, ...] of the states to values [R, ...] of all samples' tokens."""
        if self.state_Q is None or self.pair_R is None:
            return values_U
        return _select(values_U, self.state_Q[self.pair_R])

    def to(self, device: torch.device) -> Predictions:
        moved = {name: None if part is None else part.to(device) for name, part in vars(self).items()}
        return Predictions(**moved)  # type: ignore[arg-type]


def _select(values_X: Tensor, index_R: Tensor) -> Tensor:
    """Select by embedding, whose backward adds in the same order on every device and with any number of threads."""
    if values_X.ndim > 1:
        return F.embedding(index_R, values_X)
    # The sum of one column makes a copy: FSDP2 warns about a root module that returns views.
    return F.embedding(index_R, values_X[:, None]).sum(-1)


@dataclass(frozen=True)
class TeacherTokens:
    """The teacher's likeliest tokens in place of each response token, and their log-probabilities.

    Where there are fewer, the token itself fills the list with a log-probability of -inf.
    """

    tokens_RK: np.ndarray
    logprobs_RK: np.ndarray

    def __getitem__(self, index: np.ndarray) -> TeacherTokens:
        return TeacherTokens(self.tokens_RK[index], self.logprobs_RK[index])


@dataclass(frozen=True)
class PackPlan:
    """One pack on the host, as every later step reads it."""

    members: list[int]
    """Indices of its rows in the caller's batch, in the order of `targets_R`."""
    rows: list[TrainingSample]
    tokens_T: np.ndarray
    positions_T: np.ndarray
    spans: list[AttentionSpan]
    row_R: np.ndarray
    """Position in `rows` that each response token belongs to."""
    sources_R: np.ndarray
    targets_R: np.ndarray
    paths: list[np.ndarray]
    """Input position of each token that a forward pass reads of a row."""
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    """Constants of the loss for each response token, by their names in TokenBatch."""
    teacher: TeacherTokens | None = None

    def padded(self, multiple: int) -> PackPlan:
        """Return the plan with an extra sequence of unused tokens, so that its length is a multiple of `multiple`."""
        tokens = len(self.tokens_T)
        missing = -tokens % multiple
        if not missing:
            return self
        return dataclasses.replace(
            self,
            tokens_T=np.concatenate([self.tokens_T, np.zeros(missing, dtype=np.int64)]),
            positions_T=np.concatenate([self.positions_T, np.arange(missing)]),
            spans=[*self.spans, AttentionSpan(tokens, missing, np.zeros(0, dtype=np.int64))],
        )

    def computed_tokens(self, *, padded: bool) -> int:
        """Return the tokens that a forward pass computes of the rows. If `padded`, every row has the longest length."""
        lengths = [len(path) for path in self.paths]
        return max(lengths, default=0) * len(lengths) if padded else len(np.unique(np.concatenate([[], *self.paths])))

    @cached_property
    def predictions(self) -> Predictions:
        """What the language-model head has to compute."""
        return predicted_once(self.sources_R, self.targets_R, self.teacher)

    def by_row(self, values_R: Tensor) -> dict[int, list[float]]:
        """Return the values of each row's response tokens, by its index in the caller's batch."""
        return self._by_row(values_R.tolist())

    def top_by_row(self, tokens_RK: Tensor, logprobs_RK: Tensor) -> dict[int, list[TopTokens]]:
        """Return the likeliest tokens in place of each row's response tokens, by its index in the caller's batch."""
        pairs = zip(tokens_RK.tolist(), logprobs_RK.tolist(), strict=True)
        return self._by_row([list(zip(*pair, strict=True)) for pair in pairs])

    def _by_row(self, values: Iterable[Value]) -> dict[int, list[Value]]:
        remaining = iter(values)
        return {i: list(islice(remaining, row.response_length)) for i, row in zip(self.members, self.rows, strict=True)}

    def token_batch(
        self,
        logprobs_R: Tensor,
        entropy_R: Tensor | None,
        predicted_R: Tensor | None = None,
        logits_RV: Tensor | None = None,
        divergence_R: Tensor | None = None,
    ) -> TokenBatch:
        """Build what a loss reads, from the outputs of a model."""
        device = logprobs_R.device
        columns = {name: torch.from_numpy(values_R).to(device) for name, values_R in self.columns.items()}
        return TokenBatch(
            logprobs_R, entropy_R, torch.from_numpy(self.row_R).to(device), len(self.rows), **columns,
            total_lengths=[len(row.tokens) for row in self.rows], predicted_T=predicted_R,
            has_weight=any(any(row.loss_weights) for row in self.rows), samples=self.rows, logits_T=logits_RV,
            targets_T=torch.from_numpy(self.targets_R).to(device), divergence_T=divergence_R,
        )  # fmt: skip


def predicted_once(sources_R: np.ndarray, targets_R: np.ndarray, teacher: TeacherTokens | None = None) -> Predictions:
    """Return the predictions of tokens from states, with each state once and each of its tokens once."""
    if teacher is None and bool(np.all(np.diff(sources_R) > 0)):
        return Predictions(torch.from_numpy(sources_R), torch.from_numpy(targets_R))
    tokens_RX = (
        targets_R[:, None] if teacher is None else np.concatenate([targets_R[:, None], teacher.tokens_RK], axis=1)
    )
    tokens = tokens_RX.max(initial=0) + 1
    pairs_Q, pair_X = np.unique(sources_R[:, None] * tokens + tokens_RX, return_inverse=True)
    sources_U, state_Q = np.unique(pairs_Q // tokens, return_inverse=True)
    pair_RX = pair_X.reshape(tokens_RX.shape)
    parts = [sources_U, pairs_Q % tokens, state_Q, pair_RX[:, 0].copy()]
    if teacher is not None:
        parts += [pair_RX[:, 1:].copy(), teacher.logprobs_RK]
    return Predictions(*map(torch.from_numpy, parts))


def plan_packs(
    rows: Sequence[TrainingSample],
    options: TrainerOptions,
    *,
    rank: int,
    ranks: int,
    vocabulary: int,
    routing: RoutingShape | None,
    for_loss: bool,
) -> Iterator[PackPlan]:
    """Plan the packs of a rank, each when it is needed. Every rank calls it with the same rows. Raises RecordError.

    With `routing`, the rows have experts for a model of this shape, and share only tokens with equal experts.
    """
    names = available_columns(rows) if for_loss else None
    check_vocabulary(rows, vocabulary)
    marks = None
    if routing is not None:
        routing.check(rows)
        # A shared token has one routing, but the engine may have chosen a different one in every sample.
        marks = routing_marks(rows) if options.share_prefixes else None
    packs = plan_batches(
        rows, max_tokens=options.max_tokens_per_pack, ranks=ranks, share=options.share_prefixes,
        batching=options.batching, marks=marks,
    )  # fmt: skip
    return (plan_pack(rows, pack, names, vocabulary=vocabulary) for pack in packs[rank])


def plan_pack(
    rows: Sequence[TrainingSample], pack: Pack, names: Sequence[str] | None = None, *, vocabulary: int = LARGEST_ID
) -> PackPlan:
    """Lay out the tries of `pack` one after the other. A pack without rows becomes one unused token.

    `names` are the fields of rows that the loss reads, None for a pack without a loss. `vocabulary` is the number of
    tokens of the model.
    """
    note_progress()
    tokens: list[int] = []
    positions: list[np.ndarray] = [np.zeros(0, dtype=np.int64)]
    spans: list[AttentionSpan] = []
    sources: list[np.ndarray] = [np.zeros(0, dtype=np.int64)]
    members = [i for trie in pack for i in trie.rows]
    paths: list[np.ndarray] = []
    for trie in pack:
        path = np.zeros(0, dtype=np.int64)
        for i, length, shared in zip(trie.rows, trie.lengths, trie.shared, strict=True):
            context = path[:shared]
            start, count = len(tokens), length - shared
            path = np.concatenate([context, np.arange(start, start + count)])
            tokens += rows[i].tokens[shared:length]
            paths.append(path)
            positions.append(np.arange(shared, length))
            first = rows[i].prompt_length - 1
            sources.append(path[first : first + rows[i].response_length])
            if count:
                _append_span(spans, AttentionSpan(start, count, context))
    if not pack:
        tokens, positions, spans = (
            [0],
            [np.zeros(1, dtype=np.int64)],
            [AttentionSpan(0, 1, np.zeros(0, dtype=np.int64))],
        )
    pack_rows = [rows[i] for i in members]
    targets = [token for row in pack_rows for token in row.tokens[row.prompt_length :]]
    row_R = np.repeat(np.arange(len(members)), [row.response_length for row in pack_rows])
    return PackPlan(
        members, pack_rows, np.array(tokens, dtype=np.int64), np.concatenate(positions), spans, row_R,
        np.concatenate(sources), np.array(targets, dtype=np.int64), paths,
        {} if names is None else _columns(pack_rows, names, row_R),
        None if names is None else _teacher_tokens(pack_rows, vocabulary),
    )  # fmt: skip


def _columns(rows: Sequence[TrainingSample], names: Sequence[str], row_R: np.ndarray) -> dict[str, np.ndarray]:
    columns = {
        CONSTANTS[name]: np.array([value for row in rows for value in getattr(row, name)], dtype=np.float32)
        for name in names
    }
    rewards = [row.reward for row in rows]
    if None not in rewards:
        columns["rewards_T"] = np.array(rewards, dtype=np.float32)[row_R]
    weights = [row.teacher_weight for row in rows]
    if any(weight != 1.0 for weight in weights):
        columns["teacher_weights_T"] = np.array(weights, dtype=np.float32)[row_R]
    return columns


def _teacher_tokens(rows: Sequence[TrainingSample], vocabulary: int) -> TeacherTokens | None:
    """Return the teacher's likeliest tokens of the rows, or None if no row has any.

    A teacher may have more rows than the model in its embedding. Tokens there count as other tokens.
    """
    if all(row.teacher_top_log_probs is None for row in rows):
        return None
    targets_R1 = np.array([[token] for row in rows for token in row.tokens[row.prompt_length :]], dtype=np.int64)
    lists = [pairs for row in rows for pairs in row.teacher_top_log_probs or [[]] * row.response_length]
    lengths_R = np.array([len(pairs) for pairs in lists])
    is_used_RK = np.arange(lengths_R.max(initial=0)) < lengths_R[:, None]
    logprobs_RK = np.full(is_used_RK.shape, -np.inf, dtype=np.float32)
    ids_RK = np.zeros(is_used_RK.shape, dtype=np.int64)
    ids_RK[is_used_RK] = np.fromiter((token for pairs in lists for token, _ in pairs), np.int64, lengths_R.sum())
    logprobs_RK[is_used_RK] = np.fromiter((value for pairs in lists for _, value in pairs), np.float32, lengths_R.sum())
    is_known_RK = is_used_RK & (ids_RK < vocabulary)
    return TeacherTokens(np.where(is_known_RK, ids_RK, targets_R1), np.where(is_known_RK, logprobs_RK, -np.inf))


def _append_span(spans: list[AttentionSpan], span: AttentionSpan) -> None:
    """Append a span, or lengthen the last one if it ends where `span` starts, without a fork between them."""
    if len(span.context) and span.context[-1] == span.start - 1:
        last = spans[-1]
        spans[-1] = AttentionSpan(last.start, last.length + span.length, last.context)
    else:
        spans.append(span)


def available_columns(rows: Sequence[TrainingSample]) -> list[str]:
    """Return the names of the constant columns in the batch. A column is in all rows or in none. Raises RecordError."""
    names = []
    for name in (*CONSTANTS, "teacher_top_log_probs"):
        lengths = [len(getattr(row, name) or ()) for row in rows]
        if not any(lengths) and name != "loss_weights":
            continue
        for i, (length, row) in enumerate(zip(lengths, rows, strict=True)):
            if length != row.response_length:
                raise RecordError(f"row {i}: {name}: {length} values for {row.response_length} response tokens")
        if name in CONSTANTS:
            names.append(name)
    return names


def check_vocabulary(rows: Sequence[TrainingSample], vocabulary: int) -> None:
    """Raise RecordError for a token without an embedding in the model, which would end the process on a GPU."""
    for i, row in enumerate(rows):
        if max(row.tokens, default=0) >= vocabulary:
            raise RecordError(
                f"row {i}: token {max(row.tokens)} is not in the model's vocabulary of {vocabulary} tokens. "
                f"Use samples whose tokens come from this model's tokenizer."
            )
