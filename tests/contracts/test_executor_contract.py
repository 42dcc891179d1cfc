"""The promises of every executor (protocols.Executor): laziness keeps sampling on-policy, order keeps it equal."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from executor_cases import (
    Counter,
    Source,
    broken,
    hangs_on_three,
    negated,
    obey,
    prepares_slowly,
    process_of,
    refuses_two_and_dies_on_five,
    spins_on_three,
    spins_the_first_time,
    ten,
    waits_for_a_core,
)

from slimectl.errors import DiedError
from slimectl.executors.local import LocalExecutor
from slimectl.plugins.callables import error_location
from slimectl.system.processes import look_at


def on_ray(logs: Path, request: pytest.FixtureRequest) -> Any:
    from slimectl.executors.ray import RayExecutor

    return RayExecutor(request.getfixturevalue("shared_cluster").address, logs=logs)


def here(logs: Path, _: pytest.FixtureRequest) -> Any:
    return LocalExecutor(logs=logs)


ADAPTERS: dict[str, Callable[[Path, pytest.FixtureRequest], Any]] = {"local": here, "ray": on_ray}
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="needs ray: pip install 'slimectl[ray]'")
ON_RAY = pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.slow, needs_ray])


@pytest.fixture(scope="module", params=["local", ON_RAY])
def executor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "3")
        made = ADAPTERS[request.param](tmp_path_factory.mktemp("logs"), request)
        yield made
        made.close()


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_a_stream_makes_at_most_so_many_items_before_they_are_asked_for(executor: Any, ahead: int, tmp_path: Path):
    source = Source(tmp_path)
    stream = executor.stream(source, ahead=ahead)
    got = []
    for _ in range(5):
        got.append(next(stream))
        assert source.settled(len(got) + ahead) == len(got) + ahead
    stream.close()
    assert got == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_stream_carries_everything_in_order_and_ends(executor: Any, ahead: int, tmp_path: Path):
    source = Source(tmp_path, length=7)
    assert list(executor.stream(source, ahead=ahead)) == [0, 1, 2, 3, 4, 5, 6]
    assert source.has_ended()


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_failing_source_raises_where_its_item_would_have_been(executor: Any, ahead: int, tmp_path: Path):
    stream = executor.stream(Source(tmp_path, fails_at=3), ahead=ahead)
    assert [next(stream) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ZeroDivisionError, match="item 3"):
        next(stream)


@pytest.mark.parametrize("ahead", [0, 2])
def test_nothing_is_made_before_the_first_item_is_asked_for_nor_after_closing(
    executor: Any, ahead: int, tmp_path: Path
):
    source = Source(tmp_path)
    stream = executor.stream(source, ahead=ahead)
    assert source.settled(0) == 0
    next(stream)
    stream.close()
    made = source.made
    assert made <= 1 + ahead
    assert source.settled(0) == made
    assert source.has_ended()


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


def test_a_worker_that_died_while_it_was_idle_is_replaced(executor: Any):
    processes = set(executor.map(process_of, range(8), workers=2))
    for process in processes:
        os.kill(process, signal.SIGKILL)
    while look_at(processes):
        time.sleep(0.01)
    assert list(executor.map(negated, range(5), workers=2)) == [0, -1, -2, -3, -4]
    assert not processes & set(executor.map(process_of, range(8), workers=2))


@pytest.mark.slow
def test_an_overrun_limit_is_the_result_of_its_item_alone(executor: Any):
    for hangs, limits, message in (
        (hangs_on_three, {"timeout_s": 1.0, "wall_timeout_s": 1.0}, "took longer than 1 s"),
        (spins_on_three, {"timeout_s": 0.3, "wall_timeout_s": 60.0}, "took more than 0.3 s of CPU time"),
    ):
        results = list(executor.map(hangs, range(6), workers=2, **limits))
        late = results.pop(3)
        assert isinstance(late, TimeoutError)
        assert str(late) == message
        assert results == [0, 1, 2, 4, 5]


@pytest.mark.slow
def test_neither_waiting_for_a_core_nor_preparing_the_worker_counts_as_time_of_an_item(executor: Any):
    results = executor.map(waits_for_a_core, range(3), workers=1, timeout_s=0.2, prepare=prepares_slowly)
    assert list(results) == [0, 1, 2]


@pytest.mark.slow
def test_an_item_that_overran_is_tried_once_more_alone(executor: Any, tmp_path: Path):
    items = [(n, tmp_path) for n in range(6)]
    results = list(executor.map(spins_the_first_time, items, workers=2, timeout_s=0.3))
    assert results == [(0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (5, 0)]  # nobody else was at work the second time


def test_an_exception_and_a_death_are_results_of_their_items_alone(executor: Any):
    results = list(executor.map(refuses_two_and_dies_on_five, range(8), workers=1))
    assert isinstance(results[2], ValueError)
    assert error_location(results[2], refuses_two_and_dies_on_five.__module__).startswith("executor_cases.py:")
    assert isinstance(results[5], Exception)
    assert [results[n] for n in (0, 1, 3, 4, 6, 7)] == [0, 1, 3, 4, 6, 7]


@pytest.fixture(scope="module")
def two(executor: Any) -> Iterator[Any]:
    group = executor.group(obey, ten, ranks=2)
    assert list(group.answers()) == [10]
    yield group
    group.end()


@pytest.mark.slow
def test_ranks_take_the_threads_of_the_driver_s_variable(two: Any):
    two.send("threads", None)
    assert list(two.answers()) == [3]


@pytest.mark.slow
def test_ranks_share_a_process_group(two: Any):
    two.send("sum", None)
    assert list(two.answers()) == [10 + 11]


@pytest.mark.slow
def test_the_parts_of_rank_0_come_before_its_result(two: Any):
    two.send("parts", 3)
    assert list(two.answers()) == [0, 1, 2, 10]


@pytest.mark.slow
def test_a_rank_that_fails_raises_here_and_the_group_goes_on(two: Any):
    two.send("fail", 1)
    with pytest.raises(ZeroDivisionError, match="rank 1") as caught:
        list(two.answers())
    assert "on rank 1" in caught.value.__notes__[0]
    assert "executor_cases.py" in caught.value.__notes__[0]
    two.send("sum", None)
    assert list(two.answers()) == [21]


@pytest.mark.slow
def test_a_killed_rank_is_named_with_its_last_words_and_ends_the_group(two: Any):
    """The last test of this group."""
    two.send("die", 1)
    with pytest.raises(DiedError, match=r"rank 1 of 2 died \(.*out of memory\?\)\. See .*rank-1.*\.log") as caught:
        list(two.answers())
    assert "last words" in caught.value.__notes__[0]
    with pytest.raises(DiedError, match="have ended"):
        two.send("sum", None)


def test_what_cannot_be_built_raises_what_building_raised(executor: Any):
    group = executor.group(obey, broken, ranks=1)
    with pytest.raises(LookupError, match="no such thing"):
        list(group.answers())
    group.end()


def test_a_hosted_object_keeps_its_state_and_raises_its_own_exceptions(executor: Any):
    counter = executor.host(partial(Counter, 5), name="counter")
    assert [counter.add(1), counter.add(2)] == [6, 8]
    with pytest.raises(ValueError, match="-1 is negative"):
        counter.add(-1)
    assert counter.add_all(iter([1, 2, 3])) == 14
    with pytest.raises(AttributeError):
        counter.subtract(1)


def test_what_cannot_be_hosted_raises_what_building_raised(executor: Any):
    with pytest.raises(LookupError, match="no such thing"):
        executor.host(broken, name="broken")


def test_hosted_objects_reach_each_other(executor: Any):
    asked, asking = executor.host(partial(Counter, 3), name="asked"), executor.host(partial(Counter, 0), name="asking")
    assert asking.of(asked) == 3


def test_a_hosted_generator_sees_what_is_called_in_its_midst(executor: Any):
    counter = executor.host(partial(Counter, 1), name="streaming")
    stream = executor.stream(partial(counter.values, 10, scale=10), ahead=0)
    assert next(stream) == 10
    counter.add(1)
    assert [next(stream), next(stream)] == [20, 20]
    stream.close()
    assert counter.add(0) == 2
    assert list(executor.stream(partial(counter.values, 2), ahead=1)) == [2, 2]


def test_ctrl_c_reaches_no_hosted_object(executor: Any):
    """The driving process alone decides what it means."""
    counter = executor.host(partial(Counter, 3), name="interrupted")
    if counter.process() != os.getpid():
        os.kill(counter.process(), signal.SIGINT)
    assert counter.add(0) == 3
