"""Controls garbage collection around library imports, whose many objects live as long as the process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """Collect no garbage in the block. Otherwise every import would scan the objects of all earlier ones again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def frozen_objects() -> Iterator[None]:
    """Collect no garbage in the block, and exclude all objects that exist at its end from later collections.

    A full collection scans every object of every module in 0.2 to 0.3 s, several times per second if many small samples
    are created. Use this for objects that live as long as the process. Garbage among them stays until `gc.unfreeze()`.
    """
    with collection_paused():
        try:
            yield
        finally:
            gc.freeze()
