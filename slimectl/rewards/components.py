"""Named components of a reward: the numbers of an object besides the one that is trained on."""

from __future__ import annotations

from typing import Any

from slimectl.rewards.base import is_number

TOTAL = "score"
"""Key of the number to train on, unless score.reward_key names another."""


def components(reward: Any, total: str | None = None) -> dict[str, float | None]:
    """Return the numbers of a reward object by name, without the one under `total`. None is a part without an opinion.

    >>> components({"score": 0.9, "exact": True, "short": None, "pred": "4"}), components(0.5)
    ({'exact': 1.0, 'short': None}, {})
    """
    if not isinstance(reward, dict):
        return {}
    parts = {str(name): value for name, value in reward.items() if name != (total or TOTAL)}
    return {
        name: None if value is None else float(value)
        for name, value in parts.items()
        if value is None or is_number(value)
    }
