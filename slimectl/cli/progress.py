"""Shows the progress of a stage on stderr: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import os
import shutil
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from slimectl.system import stdio
from slimectl.system.stdio import logger

if TYPE_CHECKING:
    from slimectl.runtime.model_functions import Sampler

TICK_S = 0.25
LINE_S = 30.0
"""Seconds between redraws of the bar, and between plain lines."""
MAX_BAR, FULL_BAR, MIN_BAR = 30, 15, 5
"""Width of the bar in columns: maximum, reserved next to figures, and minimum."""
BOLD, DIM, PLAIN = "\x1b[36m", "\x1b[2m", "\x1b[0m"


class ProgressBar:
    """Counts units of work, which a thread shows during the `with` block. Implements protocols.Progress.

    The bar is drawn one row below the cursor, which stays visible. Lines of this process and its children appear above
    it, and the terminal stays usable however the process ends. `total` is None if unknown. With `each`, the noun for
    one unit, the median time per unit is shown instead of the rate. With `lines`, a plain line is logged now and then
    if no bar is drawn.
    """

    def __init__(
        self,
        unit: str,
        *,
        total: int | None = None,
        each: str = "",
        lines: bool = True,
        drawn: bool | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.done = 0
        self.is_drawn = is_drawn() if drawn is None else drawn
        self._unit, self._total, self._each, self._lines, self._clock = unit, total, each, lines, clock
        self._figures: tuple[str, ...] = ()
        self._tokens: Callable[[], int] | None = None
        self._tokens_before, self._tokens_since = 0, 0.0
        self._phases: list[tuple[str, str]] = []
        self._last = ("", "")
        """Phase that ended last. Its name is shown until the next one begins, so that the line does not jump."""
        self._before = 0
        self._durations: list[float] = []
        self._started = self._mark = clock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._show, name="progress", daemon=True)

    def expect(self, total: int | None, *, done: int = 0) -> None:
        """Start counting and timing `total` units (None if unknown), of which `done` are done."""
        self._total, self._before, self.done = total, done, done
        self._durations = []
        self._started = self._mark = self._clock()

    def advance(self, count: int = 1) -> None:
        """Count further units as done."""
        self.reach(self.done + count)

    def reach(self, done: int) -> None:
        """Set the number of units that are done."""
        count = done - self.done
        if self._each and count > 0:
            now = self._clock()
            self._durations += [(now - self._mark) / count] * count
            self._mark = now
        self.done = done

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show `name` as the current phase during the block. In nested blocks, the innermost name is shown."""
        self._phases.append((name, ""))
        try:
            yield
        finally:
            self._last = self._phases.pop()

    def part(self, done: int, total: int) -> None:
        """Set how much of the current phase is done."""
        if self._phases:
            self._phases[-1] = (self._phases[-1][0], f" {done}/{total}")

    def count_tokens(self, tokens: Callable[[], int]) -> None:
        """Show how much the count that `tokens` returns has grown from now on, and its rate."""
        self._tokens, self._tokens_before, self._tokens_since = tokens, tokens(), self._clock()

    def show(self, figures: Sequence[str]) -> None:
        """Show figures of the last unit, most important first, until the next call."""
        self._figures = tuple(figures)

    def __enter__(self) -> ProgressBar:
        self._started = self._mark = self._clock()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        if self.is_drawn:
            stdio.draw_below("")

    def _show(self) -> None:
        """Draw the bar, or log a plain line, until the work ends."""
        while not self._ended.wait(TICK_S if self.is_drawn else LINE_S):
            if self.is_drawn:
                stdio.draw_below(self.bar(columns() - 1) if in_foreground() else "")
            elif self._lines:
                logger.info(self.line())

    def line(self) -> str:
        """Return all figures in one line of any length."""
        return "  ".join(filter(None, self._parts()))

    def _parts(self) -> list[str]:
        """Return count, phase, rate, remaining or elapsed time, and figures. Unknown ones are empty."""
        now, durations = self._clock(), self._durations
        (phase,) = self._phases[-1:] or [self._last]
        seconds = max(now - self._started, 1e-9)
        done, rate = self.done - self._before, (self.done - self._before) / seconds
        total = "" if self._total is None else f"/{self._total}"
        speed = "" if not rate else f"{rate:.3g}/s" if rate < 100 else f"{rate:,.0f}/s"
        if self._each:
            speed = f"{seconds_text(statistics.median(durations))}/{self._each}" if durations else ""
        remaining = f"{duration(seconds)} so far"
        if self._total is not None and (durations if self._each else done):
            running_s = now - self._mark if self._each else 0.0
            mean = statistics.fmean(durations) if self._each else 1 / rate
            remaining = f"{duration(max((self._total - self.done) * mean - running_s, 0.0))} left"
        figures = [*self._token_figures(now), *self._figures]
        return [f"{self.done}{total} {self._unit}", "".join(phase), speed, remaining, *figures]

    def _token_figures(self, now: float) -> list[str]:
        if self._tokens is None:
            return []
        count = self._tokens() - self._tokens_before
        return [f"{count:,} tokens", f"{count / max(now - self._tokens_since, 1e-9):,.0f} tokens/s"] if count else []

    def bar(self, width: int) -> str:
        """Return the line for a terminal of `width` columns.

        Parts that do not fit are dropped in this order: figures from the last one on, the bar, the rate, the phase, the
        remaining time.
        """
        count, phase, speed, remaining, *figures = self._parts()
        ranked = [count, remaining, phase, speed, *figures]
        reserved = 0 if self._total is None else FULL_BAR + 2
        for room, most in ((width - reserved, len(ranked) - len(figures)), (width, 1)):
            while len("  ".join(filter(None, ranked))) > room and len(ranked) > most:
                ranked.pop()
        shown = [text for text in (phase, speed, remaining, *figures) if text and text in ranked]
        room = width - len("  ".join([count, *shown])) - 2
        if self._total is None or room < MIN_BAR:
            return "  ".join([count[:width], *shown])
        return "  ".join([count, self._drawing(min(MAX_BAR, room)), *shown])

    def _drawing(self, width: int) -> str:
        total = self._total or 0
        filled = width * min(self.done, total) // max(total, 1)
        if "NO_COLOR" in os.environ:
            return "━" * filled + " " * (width - filled)
        return f"{BOLD}{'━' * filled}{PLAIN}{DIM}{'━' * (width - filled)}{PLAIN}"


@contextmanager
def loaded(make: Callable[[], Sampler], progress: ProgressBar, total: int | None) -> Iterator[Sampler]:
    """Create a sampler while the bar shows that it is loading, then count `total` units and the engine's tokens."""
    with progress.phase("loading"):
        sampler = make()
    with sampler, progress.phase("generating"):
        progress.expect(total)
        progress.count_tokens(lambda: getattr(sampler.engine, "generated_tokens", 0))
        yield sampler


def is_drawn(*, of_pipe: bool = True) -> bool:
    """Return whether stderr is a terminal that can draw a bar, and messages of level info are shown.

    In a pipe, only the last stage draws a bar, because several bars would overwrite one another. A command that is not
    a stage (`of_pipe` false) draws even if its stdout is a pipe.
    """
    return (
        stdio.shows_notes()
        and os.isatty(2)
        and os.environ.get("TERM", "dumb") != "dumb"
        and os.environ.get("CI", "false").lower() in ("", "0", "false")  # the terminal of a CI job is a log file
        and not (of_pipe and stdio.writes_to_pipe())
    )


def columns() -> int:
    """Return $COLUMNS if it is set, else the width of stderr's terminal."""
    with suppress(OSError):
        if not os.environ.get("COLUMNS"):
            return os.get_terminal_size(2).columns or 80
    return shutil.get_terminal_size().columns


def in_foreground() -> bool:
    """Return whether this process may draw on the terminal, which it may not in the background of a shell."""
    try:
        return os.tcgetpgrp(2) == os.getpgrp()
    except OSError:  # not the controlling terminal
        return True


def seconds_text(seconds: float) -> str:
    """Return a time with two digits if it is below a minute, else as `duration`.

    >>> seconds_text(0.1234), seconds_text(12.34), seconds_text(75)
    ('0.12 s', '12 s', '1:15')
    """
    return f"{seconds:.2g} s" if seconds < 59.5 else duration(seconds)


def duration(seconds: float) -> str:
    """Return minutes and seconds, preceded by hours if there are any.

    >>> duration(62.4), duration(3723)
    ('1:02', '1:02:03')
    """
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def line_count(paths: Iterable[str]) -> int | None:
    """Return the number of lines of plain JSON Lines files, or None if a source is anything else."""
    count = 0
    for path in map(Path, paths):
        if path.suffix != ".jsonl" or not path.is_file():
            return None
        with path.open("rb") as file:
            last = b"\n"
            while block := file.read(1 << 20):
                count += block.count(b"\n")
                last = block[-1:]
            count += last != b"\n"
    return count
