"""What every executor promises (ports.Executor): its laziness keeps sampling on-policy, its order keeps it equal."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from slimectl.executors.local import LocalExecutor

ADAPTERS: dict[str, Callable[[], Any]] = {"local": LocalExecutor}


@pytest.fixture(params=ADAPTERS)
def executor(request: pytest.FixtureRequest) -> Iterator[Any]:
    made = ADAPTERS[request.param]()
    yield made
    made.close()


class Source:
    """Counts what has been made of it."""

    def __init__(self, length: int = 20, fails_at: int | None = None) -> None:
        self.length, self.fails_at = length, fails_at
        self.made = 0
        self.ended = False

    def __call__(self) -> Iterator[int]:
        try:
            for i in range(self.length):
                if i == self.fails_at:
                    raise ZeroDivisionError(f"item {i}")
                self.made += 1
                yield i
        finally:
            self.ended = True

    def settled(self, expected: int) -> int:
        """How many there are, once there are as many as expected and a carrier had the time to make more."""
        deadline = time.monotonic() + 10
        while self.made < expected and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(0.05)
        return self.made


def negated(n: int) -> int:
    time.sleep(0.05 if n % 3 == 0 else 0.0)
    return -n


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_a_stream_makes_at_most_so_many_items_before_they_are_asked_for(executor: Any, ahead: int):
    source = Source()
    stream = executor.stream(source, ahead=ahead)
    got = []
    for _ in range(5):
        got.append(next(stream))
        assert source.settled(len(got) + ahead) == len(got) + ahead
    stream.close()
    assert got == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_stream_carries_everything_in_order_and_ends(executor: Any, ahead: int):
    source = Source(length=7)
    assert list(executor.stream(source, ahead=ahead)) == [0, 1, 2, 3, 4, 5, 6]
    assert source.ended


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_failing_source_raises_where_its_item_would_have_been(executor: Any, ahead: int):
    stream = executor.stream(Source(fails_at=3), ahead=ahead)
    assert [next(stream) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ZeroDivisionError, match="item 3"):
        next(stream)


@pytest.mark.parametrize("ahead", [0, 2])
def test_nothing_is_made_before_the_first_item_is_asked_for_nor_after_closing(executor: Any, ahead: int):
    source = Source()
    stream = executor.stream(source, ahead=ahead)
    assert source.settled(0) == 0
    next(stream)
    stream.close()
    made = source.made
    assert made <= 1 + ahead
    assert source.settled(0) == made


@pytest.mark.parametrize("workers", [0, 2])
def test_results_have_the_order_of_the_items_whatever_each_takes(executor: Any, workers: int):
    assert list(executor.map(negated, range(13), workers=workers)) == [-n for n in range(13)]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_map_pulls_no_further_than_it_must(executor: Any, workers: int):
    taken = itertools.count()
    results = executor.map(negated, taken, workers=workers)
    assert next(results) == 0
    assert next(taken) == (1 if workers == 0 else 4)  # four in hand for each worker
    results.close()
