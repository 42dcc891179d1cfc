"""A policy in this process that two threads may call: one does what it does while the other waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimectl.ports import Loss, NamedTensors, Policy
from slimectl.types import Metrics, Row

if TYPE_CHECKING:
    from torch import Tensor


class ExclusivePolicy:
    """ports.Policy that takes turns: a restarted engine asks for weights while training goes on."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._turn = threading.RLock()

    @property
    def weight_version(self) -> str:
        return self._policy.weight_version

    def log_probs(self, rows: Sequence[Row]) -> list[list[float]]:
        with self._turn:
            return self._policy.log_probs(rows)

    def forward_backward(self, rows: Sequence[Row], loss: Loss) -> Metrics:
        with self._turn:
            return self._policy.forward_backward(rows, loss)

    def values(self, rows: Sequence[Row]) -> list[list[float]]:
        """ports.Critic's, where the policy is its own."""
        with self._turn:
            return self._policy.values(rows)  # type: ignore[attr-defined]

    def before_step(self, rollout_id: int, step_id: int) -> None:
        """ports.Stepped's, where the policy has it."""
        with self._turn:
            self._policy.before_step(rollout_id, step_id)  # type: ignore[attr-defined]

    def optim_step(self) -> Metrics:
        with self._turn:
            return self._policy.optim_step()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The policy stands still until the iterator is exhausted or closed."""
        with self._turn:
            yield from self._policy.weights()

    def hand_weights(self, to: Callable[[NamedTensors], Any]) -> Any:
        with self._turn:
            return self._policy.hand_weights(to)

    def save(self, path: Path) -> None:
        with self._turn:
            self._policy.save(path)

    def load(self, path: Path) -> None:
        with self._turn:
            self._policy.load(path)

    def close(self) -> None:
        with self._turn:
            self._policy.close()
