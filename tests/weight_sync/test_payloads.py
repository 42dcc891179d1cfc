"""Tensors on their way into another process: what is sent can be read there, and nothing stays behind."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from slimectl.chats.requests import RequestBody
from slimectl.engines.http.weight_client import SharedMemoryBlock
from slimectl.engines.server.weight_updates import shared_tensors
from slimectl.engines.sglang.weight_client import SglangWorkers, flatten, pickled
from slimectl.engines.weight_sync.memory import TensorSync
from slimectl.errors import BackendError, StorageError
from slimectl.system import shared_memory

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


def test_tensors_of_a_message_are_created_where_they_are_read():
    block = SharedMemoryBlock(64)
    bias = block.empty((2,), torch.float32).copy_(torch.tensor([0.25, 3.0], dtype=torch.float64))
    gate = block.empty((1,), torch.bfloat16).fill_(1.5)
    step = block.empty((), torch.int64).fill_(7)
    layout = block.hold([("bias", bias), ("gate", gate), ("step", step), ("none", torch.empty(0, 4))])
    assert [row[3] for row in layout["tensors"]] == [0, 8, 16, 0]  # each at a multiple of its numbers' width
    seen = SharedMemory(layout["name"])
    assert bytes(seen.buf[:8]) == torch.tensor([0.25, 3.0]).numpy().tobytes()
    assert bytes(seen.buf[8:10]) == b"\xc0\x3f"
    assert bytes(seen.buf[16:24]) == (7).to_bytes(8, "little")
    seen.close()


class Reader(SglangWorkers):
    """The engines' side of a push, which reads every message as an engine does."""

    shares_memory = True

    def __init__(self) -> None:
        super().__init__([])
        self.tensors: dict[str, torch.Tensor] = {}
        self.messages: list[tuple[str, list[str], str]] = []

    def begin(self, *, mode: str) -> None:
        self.tensors.clear()
        self.messages.clear()

    def end(self, *, within_s: float | None = None) -> None: ...

    def load_tensors(self, tensors: Sequence[tuple[str, torch.Tensor]], *, version: str) -> None:
        layout = self._shared_block(tensors)
        body = RequestBody({"name": layout["name"], "tensors": layout["tensors"]})
        with shared_tensors(body) as stored:
            for name, tensor in stored:
                self.tensors[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
                tensor.copy_to(self.tensors[name])
        self.messages.append((layout["name"], [name for name, _ in tensors], version))


class Held:
    """A policy that has these tensors."""

    weight_version = "7"

    def __init__(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        self.tensors = tensors

    def consume_weights(self, consumer: Callable[[list[tuple[str, torch.Tensor]]], Any]) -> Any:
        return consumer(self.tensors)


@pytest.mark.parametrize("buffer_bytes", [2, 11, 23, 50, 101, 1000])
def test_messages_of_any_size_bring_every_tensor(buffer_bytes: int):
    tensors = [(f"t{i}", torch.randn(size)) for i, size in enumerate([3, 6, 5, 0, 40, 6, 5, 7, 20, 3, 25, 24, 1, 1, 9])]
    tensors[2] = "t2", torch.arange(5)
    workers = Reader()
    TensorSync(cast(Any, Held(tensors)), cast(Any, workers), buffer_bytes=buffer_bytes, dtype=torch.bfloat16).push()
    assert list(workers.tensors) == [name for name, _ in tensors]
    for name, tensor in tensors:
        expected = tensor.bfloat16() if tensor.is_floating_point() else tensor
        assert torch.equal(workers.tensors[name], expected)


def test_a_push_writes_every_tensor_once_into_memory_that_the_next_push_uses_again():
    tensors = [(f"t{i}", torch.randn(size)) for i, size in enumerate([3, 6, 2, 0, 40, 1, 5, 7])]
    workers = Reader()
    sync = TensorSync(cast(Any, Held(tensors)), cast(Any, workers), buffer_bytes=20, dtype=torch.bfloat16)
    blocks = []
    for _ in range(2):
        assert sync.push()["bytes"] == 2 * sum(tensor.numel() for _, tensor in tensors)
        assert [names for _, names, _ in workers.messages] == [["t0", "t1"], ["t2", "t3"], ["t4"], ["t5", "t6"], ["t7"]]
        assert [version for _, _, version in workers.messages] == ["7-incomplete"] * 4 + ["7"]
        assert all(torch.equal(workers.tensors[name], tensor.bfloat16()) for name, tensor in tensors)
        blocks.append(workers.messages[0][0])
    assert blocks[0] == blocks[1]
    sync.close()
    assert not Path("/dev/shm", blocks[0]).exists()


def test_what_does_not_fit_into_shared_memory_is_said_before_it_kills(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(StorageError, match=r"/dev/shm: \d+ MiB free, but a weight message needs \d+"):
        SharedMemoryBlock(2**60)
    # A system without the folder: memory is asked for as it is needed.
    monkeypatch.setattr(shared_memory, "FOLDER", Path("/nowhere"))
    assert SharedMemoryBlock(8).size == 8


def test_a_pickled_copy_of_the_workers_goes_its_own_way():
    workers = SglangWorkers(["http://127.0.0.1:1/"], timeout_s=3)
    copy = pickle.loads(pickle.dumps(workers))
    workers.set_urls(["http://127.0.0.1:2"])
    assert (copy.urls, copy.timeout_s) == (("http://127.0.0.1:1",), 3)


def test_an_address_without_an_engine_is_named():
    with pytest.raises(BackendError, match=r"engine at http://127\.0\.0\.1:9 cannot be reached"):
        SglangWorkers(["http://127.0.0.1:9"], timeout_s=3).begin(mode="abort")


def test_an_engine_with_pipeline_stages_is_sent_no_broadcast():
    workers = SglangWorkers(["http://127.0.0.1:1"])
    workers._server_infos["http://127.0.0.1:1"] = {"tp_size": 2, "pp_size": 2}
    with pytest.raises(BackendError, match=r"pipeline stages the same ranks in a broadcast\. Set sync\.transport"):
        _ = workers.ranks


def test_sglang_takes_adapters_with_our_loader_in_one_pipeline_stage():
    workers = SglangWorkers(["http://127.0.0.1:1", "http://127.0.0.1:2"])
    ours = {"custom_weight_loader": ["adapter_loader.load"]}
    for info, transports in [
        ({"engine": "slimectl"}, ("tensor", "distributed")),
        (ours, ("tensor",)),
        (ours | {"pp_size": 2}, ()),
        ({"custom_weight_loader": None}, ()),
    ]:
        workers._server_infos = {"http://127.0.0.1:1": {"engine": "slimectl"}, "http://127.0.0.1:2": info}
        assert workers.adapter_transports == transports
