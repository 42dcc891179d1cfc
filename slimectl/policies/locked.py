"""Thread-safe wrapper around a policy: one call runs at a time, other threads wait."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from slimectl.protocols import Policy, Sleeper

if TYPE_CHECKING:
    from torch import Tensor


def _locked(name: str) -> Any:
    """Return a method that calls the policy's method of this name with the lock held."""

    def call(self: LockedPolicy, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            return getattr(self._policy, name)(*args, **kwargs)

    return call


class LockedPolicy:
    """protocols.Policy behind a lock: a restarted engine reads weights while training continues.

    `values`, `before_step` and `consume_adapter` need a policy that has them.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._lock = threading.RLock()

    @property
    def weight_version(self) -> str:
        return self._policy.weight_version

    log_probs = _locked("log_probs")
    values = _locked("values")
    forward_backward = _locked("forward_backward")
    before_step = _locked("before_step")
    optim_step = _locked("optim_step")
    consume_weights = _locked("consume_weights")
    consume_adapter = _locked("consume_adapter")
    save = _locked("save")
    load = _locked("load")
    close = _locked("close")

    def sleep(self, *, keep_weights: bool = False) -> None:
        """protocols.Sleeper.sleep, for a policy that implements it."""
        if isinstance(self._policy, Sleeper):
            with self._lock:
                self._policy.sleep(keep_weights=keep_weights)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Stream the weights; holds the lock until the iterator is exhausted or closed."""
        with self._lock:
            yield from self._policy.weights()
