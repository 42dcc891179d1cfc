"""Weight sync to an engine in this process: tensor by tensor, without a copy of the model."""

from __future__ import annotations

import time
from collections.abc import Iterator

from torch import Tensor

from slimectl.protocols import Policy, WeightReceiver, WeightUpdateClient
from slimectl.types import Metrics


class InProcessSync:
    """protocols.WeightSync into one engine, under the policy's version."""

    def __init__(self, policy: Policy, engine: WeightReceiver) -> None:
        self.policy = policy
        self.engine = engine

    def push(self) -> Metrics:
        """Load the weights into the engine; reports the bytes that it read. It samples nothing meanwhile."""
        sizes: list[int] = []

        def counted_weights() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in self.policy.weights():
                sizes.append(tensor.nbytes)
                yield name, tensor

        started = time.perf_counter()
        self.engine.load_weights(counted_weights(), version=self.policy.weight_version)
        return {"bytes": float(sum(sizes)), "pause_time": time.perf_counter() - started}

    def push_to(self, workers: WeightUpdateClient) -> Metrics:
        """Restore nothing: the engine starts and ends with its process."""
        return {"bytes": 0.0, "pause_time": 0.0}

    def sleep(self) -> None:
        """Do nothing: the engine keeps its memory."""

    def wake(self) -> None:
        """Do nothing: the engine has kept its memory."""

    def close(self) -> None:
        """Do nothing: no resource outlives the process."""
