"""Memory of tensors that are read one after another: reused when no tensor, view or buffer needs it, never before."""

from __future__ import annotations

import gc
from pathlib import Path

import torch

from slimectl.checkpoints.hf import HFWeights, InMemoryWeights, write_hf
from slimectl.checkpoints.safetensors_io import LEAST_BYTES, MAX_BLOCKS, TensorMemory, buffer

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


def test_tensors_that_are_held_keep_their_values_while_others_are_read(tmp_path: Path):
    tensors = {f"layer.{i}": torch.full(SHAPE, float(i), dtype=DTYPE) for i in range(8)}
    write_hf(tmp_path, InMemoryWeights(tensors.items()))
    weights = HFWeights(tmp_path, TensorMemory())
    references = {name: weights.get(name) for name in tensors}
    for _ in range(2):
        for name in tensors:
            assert torch.equal(weights.get(name), tensors[name])
    assert all(torch.equal(references[name], tensors[name]) for name in tensors)
