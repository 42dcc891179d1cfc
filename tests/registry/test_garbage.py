"""Garbage collection around libraries: nothing is collected while they are imported, nor looked at afterwards."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from slimectl.plugins.garbage import collection_paused, frozen_objects


class Node:
    """An object that refers to itself, which only a collection frees."""

    def __init__(self) -> None:
        self.myself = self


@pytest.fixture(autouse=True)
def collecting() -> Iterator[None]:
    gc.enable()
    yield
    gc.unfreeze()
    gc.enable()


def test_no_garbage_is_collected_in_the_block():
    with collection_paused():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_collection_stays_off_where_it_was_off_and_comes_back_after_an_error():
    gc.disable()
    with collection_paused():
        pass
    assert not gc.isenabled()
    gc.enable()
    with pytest.raises(ImportError), frozen_objects():
        raise ImportError
    assert gc.isenabled()


def test_frozen_objects_are_not_looked_at_until_they_are_unfrozen():
    with frozen_objects():
        before = Node()
    after = Node()
    assert not any(each is before for each in gc.get_objects())
    assert any(each is after for each in gc.get_objects())
    gone_before, gone_after = weakref.ref(before), weakref.ref(after)
    del before, after
    gc.collect()
    assert gone_before() is not None
    assert gone_after() is None
    gc.unfreeze()
    gc.collect()
    assert gone_before() is None
