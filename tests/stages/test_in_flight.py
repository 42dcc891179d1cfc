"""Groups in flight end when they are closed, whatever has interrupted them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from slimectl.stages.in_flight import InFlightGroups
from slimectl.types import Sample


class InterruptedAttempts:
    """Attempts that never end, of a group that a Ctrl-C hits."""

    def __init__(self) -> None:
        self.engine = self
        self.cancelled = 0

    async def abort(self) -> None: ...

    async def complete(self, group: list[Sample]) -> list[Sample]:
        attempts = [asyncio.ensure_future(self._attempt()) for _ in group]
        await asyncio.sleep(0)
        assert len(attempts) == len(group)
        raise KeyboardInterrupt

    async def _attempt(self) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


def test_closing_ends_the_attempts_of_a_group_that_an_interrupt_hit():
    attempts: Any = InterruptedAttempts()
    groups = InFlightGroups(attempts)
    groups.start([Sample(), Sample()])
    with pytest.raises(KeyboardInterrupt):
        groups.wait_any()
    groups.close()
    assert attempts.cancelled == 2
