"""Packs rows into micro-batches, in which common first tokens are computed once, and balances them over ranks.

With causal attention, the state of a token depends only on the tokens before it. Rows of a group share their prompt,
turns of an episode share their history, and forks of a session share everything before the fork. Packs are assigned to
ranks round robin or by Karmarkar-Karp differencing.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

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


def round_robin(count: int, shares: int) -> list[list[int]]:
    """Assign positions 0, 1, … to shares in round-robin order.

    >>> round_robin(5, 2)
    [[0, 2, 4], [1, 3]]
    """
    return [list(range(i, count, shares)) for i in range(shares)]


def karmarkar_karp(costs: Sequence[float], shares: int) -> list[list[int]]:
    """Partition the positions of `costs` into shares of equal size and nearly equal sum, the heaviest share first.

    >>> karmarkar_karp([8, 7, 6, 5], 2)
    [[0, 3], [1, 2]]

    Karmarkar & Karp 1982, "The differencing method of set partitioning", UC Berkeley report CSD-82-113, in the form
    that keeps sizes equal. Every `shares` neighbors by size start as one partial division. The two most uneven
    divisions are joined, heaviest part with lightest, until one remains. If `round_robin` has a lighter heaviest
    share, its result is returned instead. Deterministic: ties are broken by position.

    Raises ValueError if `shares` does not divide the number of costs.
    """
    if len(costs) % shares:
        raise ValueError(f"{len(costs)} costs cannot be divided into {shares} shares of equal size")
    by_size = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    divisions = [
        _sort_by_cost([[i] for i in by_size[start : start + shares]], costs) for start in range(0, len(costs), shares)
    ]
    # The most uneven first. The running number breaks ties, so that the lists are never compared.
    heap = [(-_cost_range(parts, costs), number, parts) for number, parts in enumerate(divisions)]
    heapq.heapify(heap)
    for number in range(len(divisions), 2 * len(divisions) - 1):
        (_, _, heavier), (_, _, lighter) = heapq.heappop(heap), heapq.heappop(heap)
        joined = _sort_by_cost([heavy + light for heavy, light in zip(heavier, reversed(lighter), strict=True)], costs)
        heapq.heappush(heap, (-_cost_range(joined, costs), number, joined))
    partition = heap[0][2] if heap else [[] for _ in range(shares)]
    turns = _sort_by_cost(round_robin(len(costs), shares), costs)
    return turns if _cost(turns[0], costs) < _cost(partition[0], costs) else partition


def _sort_by_cost(parts: list[list[int]], costs: Sequence[float]) -> list[list[int]]:
    """Sort the parts, the heaviest first."""
    return sorted(parts, key=lambda part: (-_cost(part, costs), part))


def _cost_range(parts: list[list[int]], costs: Sequence[float]) -> float:
    return _cost(parts[0], costs) - _cost(parts[-1], costs)


def _cost(part: Sequence[int], costs: Sequence[float]) -> float:
    return sum(costs[i] for i in part)


Pack = list[PrefixTrie]


@dataclass(frozen=True, slots=True)
class BatchingOptions:
    """Options of packing rows and balancing packs over ranks."""

    micro_batch_size: int | None = None
    """Rows per pack, in input order and of any length. None fills packs up to a number of tokens."""

    balance: Literal["tokens", "flops", "none"] = "tokens"
    """Quantity that is balanced over ranks. "none" assigns packs round robin."""

    pair_cost: float = 0.0
    """Cost of an attention pair, relative to the rest of a token's cost, which is 1. Used by balance "flops"."""

    padded: bool = False
    """Rows of a pack are padded to the longest one. Packs then have rows of similar length."""

    def cost(self, pack: Pack) -> float:
        """Return the compute cost of a pack, in tokens."""
        if self.padded and pack:
            longest = max(trie.tokens for trie in pack)
            pack = [PrefixTrie((0,), (longest,), (0,))] * len(pack)
        pairs = self.pair_cost * sum(trie.pairs for trie in pack) if self.balance == "flops" else 0.0
        return tokens_of(pack) + pairs


DYNAMIC = BatchingOptions()


def tokens_of(pack: Pack) -> int:
    """Return the number of tokens that a forward pass over the pack computes."""
    return sum(trie.tokens for trie in pack)


def pack(tries: Sequence[PrefixTrie], *, max_tokens: int) -> list[Pack]:
    """Pack tries first-fit by decreasing size. A trie larger than `max_tokens` gets its own pack.

    At most 11/9 times the minimum number of packs, plus 4: Johnson et al. 1974, doi:10.1137/0203025.
    """
    by_size = sorted(tries, key=lambda trie: -trie.tokens)
    return [[by_size[i] for i in members] for members in first_fit([trie.tokens for trie in by_size], max_tokens)]


def pack_by_length(tries: Sequence[PrefixTrie], *, max_tokens: int) -> list[Pack]:
    """Pack tries of one row, longest first, while rows x longest row is at most `max_tokens`.

    >>> rows = [PrefixTrie((i,), (length,), (0,)) for i, length in enumerate([3, 9, 4, 8])]
    >>> [[trie.tokens for trie in pack] for pack in pack_by_length(rows, max_tokens=18)]
    [[9, 8], [4, 3]]
    """
    packs: list[Pack] = []
    for trie in sorted(tries, key=lambda trie: -trie.tokens):
        if not packs or (len(packs[-1]) + 1) * packs[-1][0].tokens > max_tokens:
            packs.append([])
        packs[-1].append(trie)
    return packs


def assign_to_ranks(packs: Sequence[Pack], *, ranks: int, batching: BatchingOptions = DYNAMIC) -> list[list[Pack]]:
    """Assign the same number of packs to every rank, heaviest first, with costs balanced over ranks.

    The heaviest pack is split until the number is a multiple of `ranks`. If no pack can be split, empty packs are
    added, so that every rank makes the same number of collective calls.
    """
    packs = list(packs)
    while len(packs) % ranks:
        heaviest = max(range(len(packs)), key=lambda i: (_can_split(packs[i]), batching.cost(packs[i]), -i))
        largest = packs[heaviest]
        halves = _split_pack(largest, by_length=batching.padded) if _can_split(largest) else [largest, []]
        packs[heaviest : heaviest + 1] = halves
    costs = [batching.cost(pack) for pack in packs]
    shares = round_robin(len(packs), ranks) if batching.balance == "none" else karmarkar_karp(costs, ranks)
    return [[packs[i] for i in sorted(share, key=lambda i: (-costs[i], i))] for share in shares]


def _can_split(pack: Pack) -> bool:
    return len(pack) > 1 or (len(pack) == 1 and len(pack[0].rows) > 1)


def _split_pack(pack: Pack, *, by_length: bool) -> list[Pack]:
    """Split a pack into two of nearly equal size. A single trie is split between rows, and shared tokens are copied.

    With `by_length`, the longer rows stay together.
    """
    if by_length:
        by_size = sorted(pack, key=lambda trie: -trie.tokens)
        return [by_size[: len(pack) // 2], by_size[len(pack) // 2 :]]
    if len(pack) > 1:
        return [[pack[i] for i in half] for half in _split_evenly([trie.tokens for trie in pack])]
    return [[half] for half in pack[0].halves()]


def _split_evenly(costs: Sequence[int]) -> list[list[int]]:
    """Split positions into two halves: each, heaviest first, joins the lighter half. Order within a half is kept."""
    halves: list[list[int]] = [[], []]
    sums = [0, 0]
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        lighter = 0 if (sums[0], len(halves[0])) <= (sums[1], len(halves[1])) else 1
        halves[lighter].append(i)
        sums[lighter] += costs[i]
    return [sorted(half) for half in halves]


def plan_batches(
    rows: Sequence[TrainingSample],
    *,
    max_tokens: int,
    ranks: int = 1,
    share: bool = True,
    batching: BatchingOptions = DYNAMIC,
    marks: Sequence[np.ndarray] | None = None,
) -> list[list[Pack]]:
    """Return the packs of every rank. Each row is in exactly one pack. Raises RecordError.

    With `share`, tokens that rows of a pack begin with are computed once. `marks` are passed to build_tries.
    """
    size = batching.micro_batch_size
    if size is None:
        tries = build_tries(rows, max_tokens=max_tokens, share=share and not batching.padded, marks=marks)
        packs = (pack_by_length if batching.padded else pack)(tries, max_tokens=max_tokens)
    else:
        packs = [_micro_batch(rows, range(start, min(start + size, len(rows))), share, marks)
                 for start in range(0, len(rows), size)]  # fmt: skip
    return assign_to_ranks(packs, ranks=ranks, batching=batching)


def _micro_batch(
    rows: Sequence[TrainingSample], members: Sequence[int], share: bool, marks: Sequence[np.ndarray] | None
) -> Pack:
    """Return one pack of the rows `members`, however many tokens they have."""
    tokens = sum(len(rows[i].tokens) for i in members)
    marks = None if marks is None else [marks[i] for i in members]
    tries = build_tries([rows[i] for i in members], max_tokens=tokens, share=share, marks=marks)
    return [replace(trie, rows=tuple(members[i] for i in trie.rows)) for trie in tries]
