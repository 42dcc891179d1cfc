"""Memory of tensors that are read one after another: reused when no tensor, view or buffer needs it, never before."""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path

import pytest
import torch

from slimectl.architectures.mapping import ConcatRows, InterleaveGroups, ParamMapping
from slimectl.checkpoints.hf import InMemoryWeights, write_hf
from slimectl.checkpoints.hf_weights import HFWeights
from slimectl.checkpoints.safetensors_io import LEAST_BYTES, MAX_BLOCKS, MappedMemory, TensorMemory, buffer
from slimectl.checkpoints.torch_dist.reader import TorchDistReader
from slimectl.checkpoints.torch_dist.writer import Chunk, write_torch_dist
from slimectl.errors import CheckpointError

SHAPE, DTYPE = (LEAST_BYTES // 2,), torch.bfloat16


def test_block_is_reused_once_nothing_refers_to_it():
    memory = TensorMemory()
    tensor = memory.empty(SHAPE, DTYPE)
    place = tensor.data_ptr()
    assert tensor.untyped_storage().nbytes() == tensor.nbytes == LEAST_BYTES
    for view_of in (lambda whole: whole, lambda whole: whole[7:9], lambda whole: buffer(whole)):
        references = view_of(tensor)
        del tensor
        gc.collect()
        assert memory.empty(SHAPE, DTYPE).data_ptr() != place
        del references
        tensor = memory.empty(SHAPE, DTYPE)
        assert tensor.data_ptr() == place


def test_blocks_are_few_and_fit_their_tensors():
    memory = TensorMemory()
    tensors = [memory.empty(SHAPE, DTYPE) for _ in range(MAX_BLOCKS + 2)]
    assert len({tensor.data_ptr() for tensor in tensors}) == MAX_BLOCKS + 2
    assert len(memory._blocks) == MAX_BLOCKS
    del tensors
    large = memory.empty((8 * LEAST_BYTES,), torch.uint8)
    place = large.data_ptr()
    del large
    assert memory.empty((LEAST_BYTES,), torch.uint8).data_ptr() != place  # it would waste seven eighths
    assert memory.empty((2, LEAST_BYTES), torch.uint8).data_ptr() == place
    assert memory.empty((0, 3), DTYPE).shape == (0, 3)
    assert len(memory._blocks) == MAX_BLOCKS


def test_mapped_tensors_are_those_of_the_file_and_leave_no_memory_behind(tmp_path: Path):
    tensors = {"large": torch.arange(SHAPE[0]).to(DTYPE), "small": torch.arange(3.0)}
    write_hf(tmp_path, InMemoryWeights(tensors.items()))
    memory = MappedMemory()
    weights = HFWeights(tmp_path, memory)
    large = weights.get("large")
    assert torch.equal(large, tensors["large"])
    assert torch.equal(weights.get("small"), tensors["small"])
    large.zero_()  # in memory alone
    assert torch.equal(weights.get("large"), tensors["large"])
    assert memory._blocks == []


def test_tensors_that_are_held_keep_their_values_while_others_are_read(tmp_path: Path):
    tensors = {f"layer.{i}": torch.full(SHAPE, float(i), dtype=DTYPE) for i in range(8)}
    write_hf(tmp_path, InMemoryWeights(tensors.items()))
    weights = HFWeights(tmp_path, TensorMemory())
    references = {name: weights.get(name) for name in tensors}
    for _ in range(2):
        for name in tensors:
            assert torch.equal(weights.get(name), tensors[name])
    assert all(torch.equal(references[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("layout", ["hf", "torch_dist"])
def test_a_file_that_is_cut_short_while_it_is_read_is_an_error(layout: str, tmp_path: Path):
    """Its tensors were mapped once, and the process ended by SIGBUS."""
    tensors = {"carried.a": torch.full(SHAPE, 1.0, dtype=DTYPE), "carried.b": torch.full(SHAPE, 2.0, dtype=DTYPE)}
    if layout == "hf":
        write_hf(tmp_path, InMemoryWeights(tensors.items()))
        get = HFWeights(tmp_path, TensorMemory()).get
    else:
        chunks = [Chunk(name, SHAPE, (0,), SHAPE, DTYPE, partial(tensors.__getitem__, name)) for name in tensors]
        write_torch_dist(tmp_path, chunks)
        reader = TorchDistReader(tmp_path, TensorMemory())
        get = partial(reader.read, offsets=(0,), sizes=SHAPE)
    first = get("carried.a")
    (file,) = [file for file in tmp_path.iterdir() if file.stat().st_size > LEAST_BYTES]
    with file.open("rb+") as stream:
        stream.truncate(LEAST_BYTES // 2)
    assert torch.equal(first, tensors["carried.a"])
    with pytest.raises(
        CheckpointError, match=rf"^{file}: cannot be read .*\. (Download or convert|Copy or save) it again\.$"
    ):
        get("carried.b")


def test_merged_parameters_take_memory_that_is_reused():
    memory = TensorMemory()
    shape = (4 * 256, 2048)
    parts = [torch.full(shape, float(i)) for i in range(3)]
    for merge in (ConcatRows(), InterleaveGroups(4)):
        link = ParamMapping("linear", ("a", "b", "c"), (shape,) * 3, merge)
        merged = link.to_megatron(parts, memory.empty)
        assert torch.equal(merged, link.to_megatron(parts))
        assert merged.untyped_storage().nbytes() == merged.nbytes
        place = merged.data_ptr()
        del merged
        assert link.to_megatron(parts, memory.empty).data_ptr() == place
