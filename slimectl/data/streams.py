"""Iterator adapters: batching, tee, type checks and prefetching."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from queue import Queue
from typing import Any, TypeVar

from slimectl.errors import RecordError

Item = TypeVar("Item")
ABANDONED_POLL_S = 0.05
"""Seconds between checks whether a thread that is waited for has been abandoned."""


def batched(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Yield lists of `size` items, the last one possibly shorter. Nothing is read beyond a full list."""
    batch: list[Item] = []
    for item in items:
        batch.append(item)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def tee(items: Iterable[Item], sink: Callable[[Item], Any]) -> Iterator[Item]:
    """Yield every item unchanged, after calling `sink` with it."""
    for item in items:
        sink(item)
        yield item


def of_type(items: Iterable[Any], record_type: type[Item], remedy: str) -> Iterator[Item]:
    """Yield the items. Raises RecordError with the remedy for the first one of another type.

    >>> list(of_type([1, "2"], int, "convert it with int(…)"))
    Traceback (most recent call last):
    slimectl.errors.RecordError: item 1 is a str, not of type int; convert it with int(…)
    """
    for number, item in enumerate(items):
        if not isinstance(item, record_type):
            kind = type(item).__name__
            raise RecordError(f"item {number} is a {kind}, not of type {record_type.__name__}; {remedy}")
        yield item


def prefetch(
    make: Callable[[], Iterator[Item]], *, ahead: int, abandoned: threading.Event | None = None
) -> Iterator[Item]:
    """Run an iterator in a thread that produces at most `ahead` items before they are requested.

    With `ahead` 0 the iterator itself is returned. Closing or dropping the result ends the thread after the current
    item. An interrupt does not wait for that, nor does a close once `abandoned` is set. An exception of the producer is
    raised in place of its item.
    """
    if ahead == 0:
        yield from make()
        return
    # The slot is taken before producing. With only a bounded queue, one more item would be produced.
    slots = threading.Semaphore(ahead)
    ready: Queue[tuple[str, Any]] = Queue()
    closing = threading.Event()

    def produce() -> None:
        try:
            items = make()
            while True:
                slots.acquire()
                if closing.is_set():
                    break
                try:
                    item = next(items)
                except StopIteration:
                    break
                ready.put(("item", item))
            ready.put(("end", None))
        except BaseException as error:
            ready.put(("error", error))

    thread = threading.Thread(target=produce, name="prefetch", daemon=True)
    thread.start()
    interrupted = False
    try:
        while True:
            kind, value = ready.get()
            if kind == "end":
                return
            if kind == "error":
                raise value
            # Released on delivery, so that the producer may produce `ahead` more while the consumer works on this item.
            slots.release()
            yield value
    except KeyboardInterrupt:
        interrupted = True
        raise
    finally:
        closing.set()
        slots.release()
        if not interrupted:
            with suppress(KeyboardInterrupt):
                while thread.is_alive() and not (abandoned and abandoned.is_set()):
                    thread.join(ABANDONED_POLL_S)
