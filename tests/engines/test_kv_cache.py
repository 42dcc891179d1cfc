"""The cache of keys and values: capacity follows the sequences, and what runs keeps its numbers."""

from __future__ import annotations

import torch

from slimectl.engines.embedded.kv_cache import Cache


def cache() -> Cache:
    return Cache(2, 3, 4, dtype=torch.float32, device=torch.device("cpu"))


def reserve(cache: Cache, slots: int, tokens: int, used: int) -> None:
    cache.reserve(slots=slots, tokens=tokens, used=used, max_slots=8, max_tokens=100)


def filled(cache: Cache, slots: int, tokens: int) -> torch.Tensor:
    values = torch.randn(slots, 2, 2, 3, tokens, 4)
    for slot in range(slots):
        cache.put(slot, 1, values[slot], at=0)
    return values


def test_growing_and_shrinking_keep_the_tokens_of_used_slots():
    kv = cache()
    reserve(kv, 2, 16, 0)
    values = filled(kv, 2, 10)
    for slots, tokens, capacity in ((2, 17, 32), (5, 70, 80), (5, 12, 16), (8, 33, 48), (8, 100, 112)):
        reserve(kv, slots, tokens, 2)
        assert kv.tokens == capacity
        for slot in range(2):
            assert torch.equal(kv.copy(slot, 0, 10), values[slot])


def test_smaller_layouts_use_the_same_memory():
    kv = cache()
    reserve(kv, 8, 64, 0)
    address = kv.views(0, slots=1).data_ptr()
    for tokens in (10, 20, 64):
        reserve(kv, 8, tokens, 0)
        assert kv.views(0, slots=1).data_ptr() == address


def test_the_capacity_does_not_depend_on_what_came_before():
    old, new = cache(), cache()
    for tokens in (100, 17, 100, 90):
        reserve(old, 4, tokens, 0)
    reserve(new, 4, 90, 0)
    assert old.tokens == new.tokens == 96


def test_keys_and_values_that_attention_reads_are_each_in_one_piece():
    kv = cache()
    reserve(kv, 5, 30, 0)
    keys, values = kv.views(1, slots=3)
    assert keys.shape == (3, 3, 32, 4)
    assert keys.is_contiguous()
    assert values.is_contiguous()
