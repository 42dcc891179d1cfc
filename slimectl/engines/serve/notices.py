"""Notices of a server on stderr: one line per episode of repeated trouble."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress

from aiohttp import web

QUIET_S = 30.0
"""Seconds without trouble of a kind after which its episode is over."""


def say(text: str) -> None:
    with suppress(OSError, ValueError):  # nobody reads it any more
        print(text, file=sys.stderr, flush=True)


class Notices:
    """Prints the first notice of each kind, and again when the kind returns after `QUIET_S` without it."""

    def __init__(self, write: Callable[[str], None] = say) -> None:
        self._write = write
        self._last: dict[str, float] = {}

    def tell(self, kind: str, text: str) -> None:
        now, last = time.monotonic(), self._last.get(kind)
        self._last[kind] = now
        if last is None or now - last > QUIET_S:
            self._write(f"slimectl serve: {text}")


NOTICES: web.AppKey[Notices] = web.AppKey("notices", Notices)
