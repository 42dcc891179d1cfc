"""Garbage collection around libraries, whose hundred thousands of objects live as long as the process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """Collect no garbage in the block: each import would have the objects of all earlier ones looked at again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def frozen_objects() -> Iterator[None]:
    """Collect no garbage in the block, and leave all objects that exist at its end out of later collections.

    A whole collection looks at every object of every module, 0.2 to 0.3 s, and comes several times a second where many
    small samples are made. For what lives as long as the process, or until `gc.unfreeze()`: garbage among it stays.
    """
    with collection_paused():
        try:
            yield
        finally:
            gc.freeze()
