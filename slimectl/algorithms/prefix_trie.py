"""Prefix tries, which let a trainer compute the tokens that several rows begin with only once.

With causal attention, the state of a token depends only on the tokens before it. Rows of a group share their prompt,
turns of an episode share their history, and forks of a session share everything before the fork.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from slimectl.errors import RecordError
from slimectl.types import TrainingSample

LEAST_SAVING = 1 / 32
"""Minimum saving of a fork, as a fraction of the tokens after it. Below this, its masks cost about what it saves."""


@dataclass(frozen=True, slots=True)
class PrefixTrie:
    """Rows, by their position in the batch, in depth-first order. Each begins with tokens of the row before it.

    `lengths` are the numbers of tokens that a forward pass reads of each row: all but the last token of a response,
    which predicts nothing. `shared` is how many of them are shared with the previous row.

    >>> PrefixTrie(rows=(0, 1), lengths=(12, 13), shared=(0, 10)).tokens
    15
    """

    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    shared: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Number of tokens that are computed."""
        return sum(self.lengths) - sum(self.shared)

    @property
    def pairs(self) -> int:
        """Number of attention pairs. A token attends to itself and to earlier tokens."""
        return sum(_triangle(n) - _triangle(m) for n, m in zip(self.lengths, self.shared, strict=True))

    def part(self, start: int, stop: int) -> PrefixTrie:
        """Return the trie of consecutive rows, with a copy of the tokens that they share with earlier rows."""
        return PrefixTrie(self.rows[start:stop], self.lengths[start:stop], (0, *self.shared[start + 1 : stop]))

    def halves(self) -> tuple[PrefixTrie, PrefixTrie]:
        """Split two or more rows where the larger half is smallest."""
        before, total, sizes = 0, self.tokens, []
        for length, shared, next_shared in zip(self.lengths, self.shared, self.shared[1:], strict=False):
            before += length - shared
            sizes.append(max(before, total - before + next_shared))
        cut = 1 + sizes.index(min(sizes))
        return self.part(0, cut), self.part(cut, len(self.rows))


def _triangle(length: int) -> int:
    return length * (length + 1) // 2


def build_tries(
    rows: Sequence[TrainingSample],
    *,
    max_tokens: int,
    share: bool = True,
    marks: Sequence[np.ndarray] | None = None,
) -> list[PrefixTrie]:
    """Divide the rows into tries of at most `max_tokens`. A longer row gets a trie of its own.

    A prefix is copied into several tries if one would be too large, and is not shared if that saves little. Without
    `share`, every row is a trie. `marks` are whole numbers for each row's input tokens: rows share a token only if its
    marks are also equal. Raises RecordError for a row without a prompt token, because nothing predicts its first
    response token.
    """
    for i, row in enumerate(rows):
        if row.prompt_length < 1:
            raise RecordError(
                f"row {i}: {len(row.tokens)} tokens with a response of {row.response_length}. A row needs at least one"
                " prompt token, which predicts the first response token."
            )
    tries = [PrefixTrie((i,), (row.input_length,), (0,)) for i, row in enumerate(rows)]
    if not share or len(rows) < 2:
        return tries
    inputs = [np.array(row.tokens[: row.input_length], dtype=">u4") for row in rows]
    if marks is not None:
        inputs = [_marked(*pair) for pair in zip(inputs, marks, strict=True)]
    width, head = 1 if marks is None else 3, 0
    if any(row.images for row in rows):
        # Tokens do not tell images apart, so rows share tokens only if all their images are the same.
        keys = [np.frombuffer(row.images_digest, dtype=">u4") for row in rows]
        inputs, head = [np.concatenate(pair) for pair in zip(keys, inputs, strict=True)], len(keys[0])
    order = sorted(range(len(rows)), key=lambda i: inputs[i].tobytes())
    shared = [max(0, _common_length(inputs[i], inputs[j]) - head) // width for i, j in pairwise(order)]
    return sorted(_joined([tries[i] for i in order], shared, max_tokens), key=lambda trie: min(trie.rows))


def _marked(tokens_I: np.ndarray, marks_I: np.ndarray) -> np.ndarray:
    """Interleave tokens with both halves of their marks, [3 I]."""
    halves_I2 = marks_I.astype(">u8").view(">u4").reshape(-1, 2)
    return np.concatenate([tokens_I[:, None], halves_I2], axis=1).astype(">u4").reshape(-1)


def _common_length(first: np.ndarray, second: np.ndarray) -> int:
    """Return the number of equal tokens at the beginning of both."""
    length = min(len(first), len(second))
    if not length:
        return 0
    differs = first[:length] != second[:length]
    position = int(differs.argmax())
    return position if differs[position] else length


def _joined(tries: Sequence[PrefixTrie], shared: Sequence[int], max_tokens: int) -> list[PrefixTrie]:
    """Join neighbors, `shared` tokens at a time, the deepest forks first.

    Forks are the intervals of equal longest common prefixes, which a stack finds in one pass (Abouelhoda et al. 2004,
    doi:10.1016/S1570-8667(03)00065-0).
    """
    stack: list[tuple[int, list[PrefixTrie]]] = [(0, [tries[0]])]
    for trie, depth in zip([*tries[1:], None], [*shared, 0], strict=True):
        while stack[-1][0] > depth:
            fork, members = stack.pop()
            joined = _join(members, fork, max_tokens)
            if stack[-1][0] < depth:
                stack.append((depth, joined))
            else:
                stack[-1][1].extend(joined)
        if trie is None:
            break
        if stack[-1][0] < depth:
            stack.append((depth, [stack[-1][1].pop()]))
        stack[-1][1].append(trie)
    return stack[0][1]


def _join(tries: list[PrefixTrie], depth: int, max_tokens: int) -> list[PrefixTrie]:
    """Join tries that share `depth` tokens, up to the token limit. Joins none if that saves too little."""
    costs = [trie.tokens - depth for trie in tries]
    if depth * (len(tries) - 1) < LEAST_SAVING * sum(costs):
        return tries
    return [_concatenate([tries[i] for i in members], depth) for members in first_fit(costs, max_tokens - depth)]


def _concatenate(tries: list[PrefixTrie], depth: int) -> PrefixTrie:
    return PrefixTrie(
        tuple(row for trie in tries for row in trie.rows),
        tuple(length for trie in tries for length in trie.lengths),
        (*tries[0].shared, *(count for trie in tries[1:] for count in (depth, *trie.shared[1:]))),
    )


def first_fit(costs: Sequence[int], room: int) -> list[list[int]]:
    """Return positions by bin. Each position goes into the first bin with room, an oversized one into its own bin.

    First fit of Johnson et al. 1974, doi:10.1137/0203025.
    """
    bins: list[list[int]] = []
    free_space: list[int] = []
    for i, cost in enumerate(costs):
        for j, space in enumerate(free_space):
            if cost <= space:
                bins[j].append(i)
                free_space[j] -= cost
                break
        else:
            bins.append([i])
            free_space.append(room - cost)
    return bins
