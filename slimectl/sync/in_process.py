"""New weights for an engine that lives in this process: tensor by tensor, no copy of the model in between."""

from __future__ import annotations

from slimectl.ports import Policy, WeightReceiver


class InProcessSync:
    """Pushes the policy's weights into the engine under the policy's version."""

    def __init__(self, policy: Policy, engine: WeightReceiver) -> None:
        self.policy = policy
        self.engine = engine

    def push(self) -> None:
        self.engine.load_weights(self.policy.weights(), version=self.policy.weight_version)
