"""Thread-safe wrapper around a policy: one call runs at a time, other threads wait."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimectl.protocols import Adapter, NamedTensors, Policy, Sleeper
from slimectl.types import Loss, Metrics, TrainingSample

if TYPE_CHECKING:
    from torch import Tensor


class LockedPolicy:
    """protocols.Policy behind a lock: a restarted engine reads weights while training continues."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._lock = threading.RLock()

    @property
    def weight_version(self) -> str:
        return self._policy.weight_version

    def log_probs(self, rows: Sequence[TrainingSample]) -> list[list[float]]:
        with self._lock:
            return self._policy.log_probs(rows)

    def forward_backward(self, rows: Sequence[TrainingSample], loss: Loss) -> Metrics:
        with self._lock:
            return self._policy.forward_backward(rows, loss)

    def values(self, rows: Sequence[TrainingSample]) -> list[list[float]]:
        """protocols.Critic.values, for a policy with a value head."""
        with self._lock:
            return self._policy.values(rows)  # type: ignore[attr-defined, no-any-return]

    def before_step(self, rollout_id: int, step_id: int) -> None:
        """protocols.PreStepHook.before_step, for a policy that implements it."""
        with self._lock:
            self._policy.before_step(rollout_id, step_id)  # type: ignore[attr-defined]

    def sleep(self, *, keep_weights: bool = False) -> None:
        """protocols.Sleeper.sleep, for a policy that implements it."""
        if isinstance(self._policy, Sleeper):
            with self._lock:
                self._policy.sleep(keep_weights=keep_weights)

    def optim_step(self) -> Metrics:
        with self._lock:
            return self._policy.optim_step()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Stream the weights; holds the lock until the iterator is exhausted or closed."""
        with self._lock:
            yield from self._policy.weights()

    def consume_weights(self, consumer: Callable[[NamedTensors], Any]) -> Any:
        with self._lock:
            return self._policy.consume_weights(consumer)

    def consume_adapter(self, consumer: Callable[[Adapter], Any]) -> Any:
        """protocols.AdapterPolicy.consume_adapter, for a policy that trains an adapter."""
        with self._lock:
            return self._policy.consume_adapter(consumer)  # type: ignore[attr-defined]

    def save(self, path: Path) -> None:
        with self._lock:
            self._policy.save(path)

    def load(self, path: Path) -> None:
        with self._lock:
            self._policy.load(path)

    def close(self) -> None:
        with self._lock:
            self._policy.close()
