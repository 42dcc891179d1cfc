"""Balances loads over ranks, so that none waits for another: round robin, or Karmarkar-Karp differencing."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def round_robin(count: int, shares: int) -> list[list[int]]:
    """Assign positions 0, 1, … to shares in turn.

    >>> round_robin(5, 2)
    [[0, 2, 4], [1, 3]]
    """
    return [list(range(i, count, shares)) for i in range(shares)]


def karmarkar_karp(costs: Sequence[float], shares: int) -> list[list[int]]:
    """Partition the positions of `costs` into shares of equal number and nearly equal sum, the heaviest share first.

    >>> karmarkar_karp([8, 7, 6, 5], 2)
    [[0, 3], [1, 2]]

    Karmarkar & Karp 1982, "The differencing method of set partitioning", UC Berkeley report CSD-82-113, in the form
    that keeps numbers equal: every `shares` neighbours by size start as one partial division, and the two most uneven
    are joined, heaviest part with lightest, until one remains. Its heaviest share is never heavier than that of
    `round_robin`, which is returned if it is better. Deterministic: ties are broken by position.

    Raises ValueError if `shares` does not divide the number of costs.
    """
    if len(costs) % shares:
        raise ValueError(f"{len(costs)} loads for {shares} shares of equal number")
    by_size = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    divisions = [
        _sort_by_cost([[i] for i in by_size[start : start + shares]], costs) for start in range(0, len(costs), shares)
    ]
    # The most uneven first; the running number breaks ties, so that the lists are never compared.
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
