"""Loads dealt to ranks so that none waits for another: by turns, or by differencing."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def round_robin(count: int, shares: int) -> list[list[int]]:
    """Positions 0, 1, … dealt in turns.

    >>> round_robin(5, 2)
    [[0, 2, 4], [1, 3]]
    """
    return [list(range(i, count, shares)) for i in range(shares)]


def karmarkar_karp(costs: Sequence[float], shares: int) -> list[list[int]]:
    """Positions of `costs` in shares of equal number and nearly equal sum, the heaviest share first.

    >>> karmarkar_karp([8, 7, 6, 5], 2)
    [[0, 3], [1, 2]]

    Karmarkar & Karp 1982, "The differencing method of set partitioning", UC Berkeley report CSD-82-113, in the form
    that keeps numbers equal: every `shares` neighbours by size begin as one partial division, and the two most uneven
    are joined, heaviest part with lightest, until one is left. Never heavier at its heaviest than `round_robin`, which
    is taken where it is the better one. Deterministic: ties go by position.

    Raises ValueError if `shares` does not divide the number of costs.
    """
    if len(costs) % shares:
        raise ValueError(f"{len(costs)} loads for {shares} shares of equal number")
    by_size = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    divisions = [_ordered([[i] for i in by_size[at : at + shares]], costs) for at in range(0, len(costs), shares)]
    # The most uneven first; the running number decides ties, and keeps the lists from being compared.
    heap = [(-_spread(parts, costs), number, parts) for number, parts in enumerate(divisions)]
    heapq.heapify(heap)
    for number in range(len(divisions), 2 * len(divisions) - 1):
        (_, _, one), (_, _, other) = heapq.heappop(heap), heapq.heappop(heap)
        joined = _ordered([heavy + light for heavy, light in zip(one, reversed(other), strict=True)], costs)
        heapq.heappush(heap, (-_spread(joined, costs), number, joined))
    found = heap[0][2] if heap else [[] for _ in range(shares)]
    turns = _ordered(round_robin(len(costs), shares), costs)
    return turns if _sum(turns[0], costs) < _sum(found[0], costs) else found


def _ordered(parts: list[list[int]], costs: Sequence[float]) -> list[list[int]]:
    """The heaviest first."""
    return sorted(parts, key=lambda part: (-_sum(part, costs), part))


def _spread(parts: list[list[int]], costs: Sequence[float]) -> float:
    return _sum(parts[0], costs) - _sum(parts[-1], costs)


def _sum(part: Sequence[int], costs: Sequence[float]) -> float:
    return sum(costs[i] for i in part)
