"""Settings to where work runs, and how weights get there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slimectl.executors.local import LocalExecutor
    from slimectl.ports import Policy
    from slimectl.sync.in_process import InProcessSync


def executor() -> LocalExecutor:
    from slimectl.executors.local import LocalExecutor

    return LocalExecutor()


def sync(policy: Policy, engine: Any) -> InProcessSync:
    from slimectl.sync.in_process import InProcessSync

    return InProcessSync(policy, engine)
