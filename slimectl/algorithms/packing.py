"""Packs rows into micro-batches and balances them over ranks: round robin, or Karmarkar-Karp differencing."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from slimectl.algorithms.prefix_trie import PrefixTrie, build_tries, first_fit
from slimectl.types import TrainingSample


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

    def cost(self, pack: Pack) -> float:
        """Return the compute cost of a pack, in tokens."""
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


def assign_to_ranks(packs: Sequence[Pack], *, ranks: int, batching: BatchingOptions = DYNAMIC) -> list[list[Pack]]:
    """Assign the same number of packs to every rank, heaviest first, with costs balanced over ranks.

    The heaviest pack is split until the number is a multiple of `ranks`. If no pack can be split, empty packs are
    added, so that every rank makes the same number of collective calls.
    """
    packs = list(packs)
    while len(packs) % ranks:
        heaviest = max(range(len(packs)), key=lambda i: (_can_split(packs[i]), batching.cost(packs[i]), -i))
        packs[heaviest : heaviest + 1] = (
            _split_pack(packs[heaviest]) if _can_split(packs[heaviest]) else [packs[heaviest], []]
        )
    costs = [batching.cost(pack) for pack in packs]
    shares = round_robin(len(packs), ranks) if batching.balance == "none" else karmarkar_karp(costs, ranks)
    return [[packs[i] for i in sorted(share, key=lambda i: (-costs[i], i))] for share in shares]


def _can_split(pack: Pack) -> bool:
    return len(pack) > 1 or (len(pack) == 1 and len(pack[0].rows) > 1)


def _split_pack(pack: Pack) -> list[Pack]:
    """Split a pack into two of nearly equal size. A single trie is split between rows, and shared tokens are copied."""
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
        packs = pack(build_tries(rows, max_tokens=max_tokens, share=share, marks=marks), max_tokens=max_tokens)
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
