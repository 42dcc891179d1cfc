"""Handles the signals that end a command: Ctrl-C, SIGTERM of schedulers, SIGHUP of a closed terminal."""

from __future__ import annotations

import signal
import threading
from types import TracebackType
from typing import TYPE_CHECKING, Any

from slimectl.errors import EXIT_INTERRUPTED, Terminated
from slimectl.plugins.containment import ENDING, handle_here
from slimectl.system import stdio

if TYPE_CHECKING:
    from slimectl.runtime.grace import GracePeriod


def end_by_signals() -> None:
    """Make SIGTERM and SIGHUP interrupt this process like Ctrl-C, unless they are ignored (nohup)."""
    for number in _heeded():
        handle_here(number, _raise_terminated)


def end_at_once() -> None:
    """Ignore Ctrl-C while the interpreter cleans up, and let SIGTERM and SIGHUP end the process at once."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in _heeded():
        signal.signal(number, signal.SIG_DFL)


def _heeded() -> list[signal.Signals]:
    """Return the signals that are not ignored, or none outside of the main thread, which cannot handle signals."""
    if threading.current_thread() is not threading.main_thread():
        return []
    return [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]


def _raise_terminated(number: int, _: Any) -> None:
    raise Terminated(number)


class ForwardedSignals:
    """Collects the signals that end a sweep, for its runs: the first lets them save, the second stops them at once."""

    def __init__(self) -> None:
        self.received: list[int] = []

    @property
    def exit_code(self) -> int:
        """Exit code after the first signal."""
        return 128 + self.received[0] if self.received else EXIT_INTERRUPTED

    def __enter__(self) -> ForwardedSignals:
        for number in (signal.SIGINT, *_heeded()):
            handle_here(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        end_at_once()

    def _receive(self, number: int, _: Any) -> None:
        self.received.append(number)
        if len(self.received) == 1:
            again = "Press Ctrl-C" if number == signal.SIGINT else "Send it"
            stdio.say(f"finishing the rounds of the active runs, then saving. {again} again to stop now")


class RoundInterrupt:
    """Handles a run's signals: the first ends the run after its round, the second at once.

    After SIGTERM or SIGHUP, the round has `grace_s` seconds. Then `grace` abandons it.
    """

    def __init__(self, grace: GracePeriod, grace_s: float) -> None:
        self._grace, self._grace_s = grace, grace_s
        self._first: int | None = None
        self._timer: threading.Timer | None = None
        self._over = False
        self._before: dict[signal.Signals, Any] = {}

    def asked(self) -> bool:
        return self._first is not None

    @property
    def exit_code(self) -> int:
        """Exit code after the first signal."""
        return EXIT_INTERRUPTED if self._first in (None, signal.SIGINT) else 128 + int(self._first or 0)

    def __enter__(self) -> RoundInterrupt:
        self._before = {number: signal.getsignal(number) for number in (signal.SIGINT, *ENDING)}
        for number in (signal.SIGINT, *_heeded()):
            handle_here(number, self._receive)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        from slimectl.runtime.grace import RoundAbandoned

        if self._timer is not None:
            self._timer.cancel()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if isinstance(error, RoundAbandoned) and self._first is not None:  # raised where the run does not handle it
            raise Terminated(self._first) from error

    def _receive(self, number: int, _: Any) -> None:
        if self._over or self._grace.is_broken_off:
            self._over = False
            self._grace.end()
            return
        if self._first is not None:
            raise KeyboardInterrupt if number == signal.SIGINT else Terminated(number)
        self._first = number
        if number == signal.SIGINT:
            stdio.say("finishing this round, then saving. Press Ctrl-C again to stop now")
            return
        name = signal.Signals(number).name
        stdio.say(
            f"{name}: finishing this round (at most {self._grace_s:g} s, run.grace_s), then saving. "
            f"Send it again to stop now"
        )
        self._timer = threading.Timer(self._grace_s, self._end_grace, (threading.get_ident(), number))
        self._timer.daemon = True
        self._timer.start()

    def _end_grace(self, thread: int, number: int) -> None:
        """Send the signal to the main thread again, because only an exception there ends what it waits for."""
        self._over = True
        signal.pthread_kill(thread, number)
