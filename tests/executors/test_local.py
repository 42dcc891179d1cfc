"""Work in parallel comes back in order, and a hanging item costs only itself."""

from __future__ import annotations

import itertools
import time

import pytest

from slimectl.executors.local import LocalExecutor


def slow_square(n: int) -> int:
    time.sleep(0.02 * (5 - n % 5))
    return n * n


def hangs_on_three(n: int) -> int:
    if n == 3:
        while True:
            pass
    return n


def fails_on_two(n: int) -> int:
    if n == 2:
        raise ValueError("two")
    return n


def test_results_are_in_order_with_and_without_workers():
    executor = LocalExecutor()
    assert list(executor.map(slow_square, range(6), workers=0)) == [0, 1, 4, 9, 16, 25]
    assert list(executor.map(slow_square, range(6), workers=2)) == [0, 1, 4, 9, 16, 25]
    executor.close()


@pytest.mark.slow
def test_an_overrun_limit_and_an_exception_are_results_of_their_items_alone():
    executor = LocalExecutor()
    results = list(executor.map(hangs_on_three, range(5), workers=2, timeout_s=1.0))
    assert results[:3] == [0, 1, 2]
    assert results[4] == 4
    assert isinstance(results[3], TimeoutError)
    results = list(executor.map(fails_on_two, range(4), workers=1))
    assert isinstance(results[2], ValueError)
    assert results[3] == 3
    executor.close()


def test_an_endless_input_is_taken_little_by_little():
    taken = itertools.count()
    executor = LocalExecutor()
    results = executor.map(slow_square, taken, workers=1)
    assert [next(results) for _ in range(3)] == [0, 1, 4]
    assert next(taken) < 20
    results.close()
    executor.close()
