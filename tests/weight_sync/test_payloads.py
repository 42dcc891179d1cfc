"""Tensors on their way into another process: what is sent can be read there, and nothing stays behind."""

from __future__ import annotations

import io
import pickle
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest
import torch

from slimectl.engines.http import weight_client
from slimectl.engines.http.weight_client import SharedMemoryBlock
from slimectl.engines.sglang.payloads import flatten, pickled
from slimectl.engines.sglang.weight_client import SglangWorkers
from slimectl.errors import BackendError, StorageError

TENSORS = [
    ("gate", torch.tensor([1.5, -2.5], dtype=torch.bfloat16)),
    ("bias", torch.tensor([[0.25], [3.0]])),
    ("step", torch.tensor(7, dtype=torch.int64)),
    ("none", torch.empty(0, 4)),
]


def test_wide_numbers_come_first_so_that_each_can_be_viewed_in_place():
    flat, places = flatten(TENSORS)
    assert [(place.name, place.start_idx, place.end_idx) for place in places] == [
        ("step", 0, 8),
        ("bias", 8, 16),
        ("none", 16, 16),
        ("gate", 16, 20),
    ]
    for place in places:
        found = flat[place.start_idx : place.end_idx].view(place.dtype).reshape(place.shape)
        assert torch.equal(found, dict(TENSORS)[place.name])


def test_a_pickle_needs_nothing_of_ours_or_of_sglang_to_be_read():
    seen = set()

    class Reader(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> object:
            seen.add(f"{module}.{name}")
            return super().find_class(module, name)

    flat, places = flatten(TENSORS)
    found = Reader(io.BytesIO(pickled(flat, places))).load()
    assert torch.equal(found["flattened_tensor"], flat)
    assert [place.name for place in found["metadata"]] == ["step", "bias", "none", "gate"]
    assert {name.partition(".")[0] for name in seen} <= {"torch", "types", "collections", "_codecs"}


def test_a_block_takes_one_message_after_the_other_and_is_gone_with_its_owner():
    block = SharedMemoryBlock(64)
    first = block.hold(TENSORS)
    second = block.hold([("other", torch.full((4,), 9.0))])
    assert first["name"] == second["name"]
    assert second["tensors"] == [["other", "float32", [4], 0]]
    seen = SharedMemory(first["name"])
    assert bytes(seen.buf[:16]) == torch.full((4,), 9.0).numpy().tobytes()
    seen.close()
    del block
    assert not Path("/dev/shm", first["name"]).exists()


def test_what_does_not_fit_into_shared_memory_is_said_before_it_kills(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(StorageError, match=r"/dev/shm: \d+ MiB are free, a message of weights takes \d+"):
        SharedMemoryBlock(2**60)
    monkeypatch.setattr(
        weight_client, "SHARED_MEMORY", "/nowhere"
    )  # a system without it: memory is asked for as it is needed
    assert SharedMemoryBlock(8).size == 8


def test_a_pickled_copy_of_the_workers_goes_its_own_way():
    workers = SglangWorkers(["http://127.0.0.1:1/"], timeout_s=3)
    copy = pickle.loads(pickle.dumps(workers))
    workers.set_urls(["http://127.0.0.1:2"])
    assert (copy.urls, copy.timeout_s) == (("http://127.0.0.1:1",), 3)


def test_an_address_without_an_engine_is_named():
    with pytest.raises(BackendError, match=r"engine at http://127\.0\.0\.1:9 is not there"):
        SglangWorkers(["http://127.0.0.1:9"], timeout_s=3).begin(mode="abort")
