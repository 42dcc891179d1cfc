"""New weights for an engine that lives in this process: tensor by tensor, no copy of the model in between."""

from __future__ import annotations

import time
from collections.abc import Iterator

from torch import Tensor

from slimectl.ports import Policy, WeightReceiver
from slimectl.types import Metrics


class InProcessSync:
    """Pushes the policy's weights into the engine under the policy's version."""

    def __init__(self, policy: Policy, engine: WeightReceiver) -> None:
        self.policy = policy
        self.engine = engine

    def push(self) -> Metrics:
        """The bytes that the engine read; it samples nothing meanwhile."""
        sizes: list[int] = []

        def weighed() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in self.policy.weights():
                sizes.append(tensor.nbytes)
                yield name, tensor

        started = time.perf_counter()
        self.engine.load_weights(weighed(), version=self.policy.weight_version)
        return {"bytes": float(sum(sizes)), "pause_time": time.perf_counter() - started}

    def push_to(self, workers: object) -> Metrics:
        """There is one engine, and it cannot be restarted alone."""
        raise NotImplementedError("an engine in this process has no workers")

    def close(self) -> None:
        """Nothing outlives the process."""
