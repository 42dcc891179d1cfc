"""Adaptors keep laziness exact: what is not asked for is not made."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from slimectl.data.streams import batched, prefetch, tee


def counting(made: list[int], n: int = 100) -> Iterator[int]:
    for i in range(n):
        made.append(i)
        yield i


def test_batches_pull_nothing_beyond_themselves():
    made: list[int] = []
    batches = batched(counting(made), 3)
    assert next(batches) == [0, 1, 2]
    assert made == [0, 1, 2]
    assert list(batched(range(5), 2)) == [[0, 1], [2, 3], [4]]


def test_tee_shows_every_item_and_changes_none():
    seen: list[int] = []
    assert list(tee(range(3), seen.append)) == [0, 1, 2] == seen


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_prefetch_never_makes_more_than_ahead_items_before_they_are_asked_for(ahead: int):
    made: list[int] = []
    items = prefetch(lambda: counting(made), ahead=ahead)
    for i in range(10):
        assert next(items) == i
        # i is in hand; after a while exactly `ahead` further ones exist, and a moment later no more.
        deadline = time.monotonic() + 5
        while len(made) < i + 1 + ahead and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.005)
        assert len(made) == i + 1 + ahead
    items.close()


def test_prefetch_of_zero_is_the_iterator_itself():
    made: list[int] = []
    items = prefetch(lambda: counting(made), ahead=0)
    next(items)
    assert made == [0]


def test_prefetch_raises_the_producers_error_in_its_place():
    def failing() -> Iterator[int]:
        yield 1
        raise ValueError("second")

    items = prefetch(failing, ahead=2)
    assert next(items) == 1
    with pytest.raises(ValueError, match="second"):
        next(items)


def test_closing_prefetch_ends_its_thread():
    before = threading.active_count()
    items = prefetch(lambda: counting([], 10**9), ahead=3)
    next(items)
    items.close()
    assert threading.active_count() == before


def test_an_abandoned_prefetch_does_not_wait_for_the_item_of_its_thread():
    working, finish, abandoned = threading.Event(), threading.Event(), threading.Event()

    def slow() -> Iterator[int]:
        yield 1
        working.set()
        finish.wait()
        yield 2

    items = prefetch(slow, ahead=1, abandoned=abandoned)
    assert next(items) == 1
    working.wait()
    closing = threading.Thread(target=items.close)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive(), "a close waits for the item in the making"
    abandoned.set()
    closing.join(300)
    assert not closing.is_alive()
    finish.set()
