"""The end of a run that a signal asked for: what may be abandoned, and what is finished first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class RoundAbandoned(KeyboardInterrupt):
    """The time that a round got to end is over. Raised in the middle of it, or of the run's start."""


class GracePeriod:
    """The time that a round gets to end after a signal. `end` is called when it is over, in the main thread.

    Records and checkpoints are finished first: then RoundAbandoned is raised after them.
    """

    def __init__(self) -> None:
        self._shields = 0
        self._over = False
        self._is_done = False
        self._callbacks: list[Callable[[], None]] = []

    def when_over(self, callback: Callable[[], None]) -> None:
        """Call `callback` as soon as the time is over, in a shielded block too."""
        self._callbacks.append(callback)

    def end(self) -> None:
        """Raise RoundAbandoned here, or where the shielded block ends."""
        self._over = True
        for callback in self._callbacks:
            callback()
        self._raise_if_over()

    def finish(self) -> None:
        """Raise nothing from here on: the last round has ended, and what follows closes the run's parts."""
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
            self._over = False  # raised once: what follows saves and closes
            raise RoundAbandoned
