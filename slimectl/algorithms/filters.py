"""Filters groups that carry no training signal."""

from __future__ import annotations

from collections.abc import Sequence

SPREAD_EPSILON = 1e-6


def has_signal(rewards: Sequence[float]) -> tuple[bool, str]:
    """Return whether the rewards of one group differ, and if not the reason, which names their common value.

    >>> has_signal([1.0, 0.0]), has_signal([1.0, 1.0])
    ((True, ''), (False, 'zero_std_1.0'))

    DAPO's dynamic sampling, arXiv:2503.14476, eq. 11: a group without spread has no gradient. Differences up to 1e-6
    count as rounding. A group of one has no spread; an empty group is "empty".
    """
    if not rewards:
        return False, "empty"
    if max(rewards) - min(rewards) > SPREAD_EPSILON:
        return True, ""
    return False, f"zero_std_{round(rewards[0] + 0.0, 4)}"
