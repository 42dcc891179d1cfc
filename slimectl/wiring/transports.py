"""Settings to how new weights reach the engines."""

from __future__ import annotations

from typing import Protocol

from slimectl.ports import Policy, WeightReceiver
from slimectl.settings import Settings
from slimectl.types import Metrics


class Transport(Protocol):
    """Carries the policy's weights to every engine, or to one that was restarted."""

    def push(self) -> Metrics: ...

    def push_to(self, url: str) -> Metrics: ...

    def close(self) -> None: ...


def transport(settings: Settings, policy: Policy, receiver: WeightReceiver) -> Transport:
    """For an engine that takes tensors itself."""
    from slimectl.sync.in_process import InProcessSync

    return InProcessSync(policy, receiver)
