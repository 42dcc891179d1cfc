"""Adaptors over iterators: batches, groups, a tap, and working ahead."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from queue import Queue
from typing import Any, TypeVar

Item = TypeVar("Item")


def batched(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Lists of `size`, the last one shorter; nothing is pulled beyond a full list."""
    batch: list[Item] = []
    for item in items:
        batch.append(item)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def tee(items: Iterable[Item], sink: Callable[[Item], Any]) -> Iterator[Item]:
    """Every item passes through unchanged, after `sink` has seen it."""
    for item in items:
        sink(item)
        yield item


def prefetch(make: Callable[[], Iterator[Item]], *, ahead: int) -> Iterator[Item]:
    """Carry an iterator on a thread that works at most `ahead` items before they are asked for.

    `ahead` 0 is the iterator itself. Closing the result (or dropping it) ends the thread after the item in hand; an
    exception of the producer is raised where its item would have been.
    """
    if ahead == 0:
        yield from make()
        return
    # The slot is taken before producing: a bounded queue alone lets one more item be made than was allowed.
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
    try:
        while True:
            kind, value = ready.get()
            if kind == "end":
                return
            if kind == "error":
                raise value
            # Freed on delivery: while the consumer works on this item, the producer may make `ahead` more.
            slots.release()
            yield value
    finally:
        closing.set()
        slots.release()
        thread.join()
