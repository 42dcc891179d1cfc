"""Ends a run after a signal: gives the round time to finish, and protects records and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class RoundAbandoned(KeyboardInterrupt):
    """The grace period is over. Raised in the middle of a round, or while the run starts."""


class GracePeriod:
    """Time that a round gets to finish after a signal. `end` is called when it is over, in the main thread.

    Records and checkpoints are finished first. RoundAbandoned is raised after them.
    """

    def __init__(self) -> None:
        self._shields = 0
        self._over = False
        self._is_done = False
        self.is_broken_off = False
        """Whether the next SIGINT is not from the user, but abandons the round. See `break_off`."""
        self._callbacks: list[Callable[[], None]] = []

    def when_over(self, callback: Callable[[], None]) -> None:
        """Call `callback` as soon as the time is over, even in a shielded block."""
        self._callbacks.append(callback)

    def break_off(self) -> None:
        """Let `end` raise RoundAbandoned even in a shielded block or after `finish`, because a part is stuck there."""
        self.is_broken_off = True

    def end(self) -> None:
        """Raise RoundAbandoned now, or at the end of the shielded block."""
        self._over = True
        for callback in self._callbacks:
            callback()
        if self.is_broken_off:
            self.is_broken_off = self._over = False
            raise RoundAbandoned
        self._raise_if_over()

    def finish(self) -> None:
        """Raise nothing from now on. The last round has ended, and the rest only closes the run's parts."""
        self._is_done = True

    @contextmanager
    def shielded(self) -> Iterator[None]:
        """Finish the block before the round is abandoned."""
        self._shields += 1
        try:
            yield
        finally:
            self._shields -= 1
        self._raise_if_over()

    def _raise_if_over(self) -> None:
        if self._over and not self._shields and not self._is_done:
            self._over = False  # raised only once, because saving and closing follow
            raise RoundAbandoned
