"""Token layout of a pack: input positions, attention spans, and which state predicts which token.

T input tokens · R response tokens, sample by sample · U states that predict · Q pairs of a state and its prediction.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from slimectl.algorithms.packing import Pack
from slimectl.types import TrainingSample


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

    def of_pairs(self, values_Q: Tensor) -> Tensor:
        """Expand values [Q] of the pairs to values [R] of all samples' tokens."""
        return values_Q if self.pair_R is None else _select(values_Q, self.pair_R)

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
    return F.embedding(index_R, values_X[:, None]).sum(1)


@dataclass(frozen=True)
class PackLayout:
    """One pack on the host. `rows` are the indices of its rows in the caller's batch, in the order of `targets_R`."""

    rows: list[int]
    tokens_T: np.ndarray
    positions_T: np.ndarray
    spans: list[AttentionSpan]
    row_R: np.ndarray
    sources_R: np.ndarray
    targets_R: np.ndarray
    paths: list[np.ndarray]
    """Input position of each token that a forward pass reads of a row."""

    def padded(self, multiple: int) -> PackLayout:
        """Return the layout with an extra sequence of unused tokens, so that its length is a multiple of `multiple`."""
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

    def predictions(self) -> Predictions:
        """Return what the language-model head has to compute."""
        return predicted_once(self.sources_R, self.targets_R)


def predicted_once(sources_R: np.ndarray, targets_R: np.ndarray) -> Predictions:
    """Return the predictions of tokens from states, with each state once and each of its tokens once."""
    if bool(np.all(np.diff(sources_R) > 0)):
        return Predictions(torch.from_numpy(sources_R), torch.from_numpy(targets_R))
    tokens = targets_R.max() + 1
    pairs_Q, pair_R = np.unique(sources_R * tokens + targets_R, return_inverse=True)
    sources_U, state_Q = np.unique(pairs_Q // tokens, return_inverse=True)
    return Predictions(*map(torch.from_numpy, (sources_U, pairs_Q % tokens, state_Q, pair_R)))


def lay_out(rows: Sequence[TrainingSample], pack: Pack) -> PackLayout:
    """Lay out the tries of `pack` one after the other. A pack without rows becomes one unused token."""
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
    targets = [token for i in members for token in rows[i].tokens[rows[i].prompt_length :]]
    responses = [rows[i].response_length for i in members]
    return PackLayout(
        members, np.array(tokens, dtype=np.int64), np.concatenate(positions), spans,
        np.repeat(np.arange(len(members)), responses), np.concatenate(sources), np.array(targets, dtype=np.int64),
        paths,
    )  # fmt: skip


def _append_span(spans: list[AttentionSpan], span: AttentionSpan) -> None:
    """Append a span, or lengthen the last one if it ends where `span` starts, without a fork between them."""
    if len(span.context) and span.context[-1] == span.start - 1:
        last = spans[-1]
        spans[-1] = AttentionSpan(last.start, last.length + span.length, last.context)
    else:
        spans.append(span)
