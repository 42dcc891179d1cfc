"""Named components of a reward: the numbers of an object except the one that is trained on."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
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


class ComponentValues:
    """Collects the components of many rewards.

    >>> values = ComponentValues()
    >>> values.add({"score": 1.0, "right": 1.0}, prompt=0); values.add({"score": 0.0, "right": 0.0}, prompt=1)
    >>> values.by_name()
    {'right': [1.0, 0.0]}
    """

    def __init__(self, total: str | None = None) -> None:
        self._total = total
        self._values: dict[str, list[float]] = {}
        self._prompts: dict[str, set[int]] = {}
        self._all_prompts: set[int] = set()

    def add(self, reward: Any, *, prompt: int) -> None:
        self._all_prompts.add(prompt)
        for name, value in components(reward, self._total).items():
            if value is not None:
                self._values.setdefault(name, []).append(value)
                self._prompts.setdefault(name, set()).add(prompt)

    def by_name(self) -> dict[str, list[float]]:
        """Return the values of each component that several prompts share, or all if there is only one prompt.

        A component of one prompt is a criterion of its own rubric, of which there may be any number.
        """
        min_prompts = min(2, len(self._all_prompts))
        return {name: self._values[name] for name in sorted(self._values) if len(self._prompts[name]) >= min_prompts}

    def means(self) -> dict[str, float]:
        """Return the mean of each of these components."""
        return {name: fmean(values) for name, values in self.by_name().items()}


def means_text(means: Mapping[str, float]) -> str:
    """Return the means of components as they follow the mean reward: ", right 0.5, brief -3", or "" without any."""
    return "".join(f", {name} {mean:.4g}" for name, mean in means.items())
