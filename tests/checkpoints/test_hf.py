"""Hugging Face directories written from a stream whose end is not known."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch

from slimectl.checkpoints.hf import HFCheckpoint


def test_a_stream_is_written_shard_by_shard_and_reads_back(tmp_path: Path):
    buffer, seen_on_disk = torch.empty(64), []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(5):
            seen_on_disk.append(len(list(tmp_path.iterdir())))
            yield f"layer.{i}", buffer.fill_(i)

    HFCheckpoint(max_shard_bytes=512).write(tmp_path, stream())
    assert seen_on_disk == [0, 0, 1, 1, 2]  # 256 bytes a tensor: two fill a shard, which is written before the next
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 5 * 256}
    assert index["weight_map"]["layer.4"] == "model-00003-of-00003.safetensors"
    read = dict(HFCheckpoint().read(tmp_path))
    assert {name: tensor[0].item() for name, tensor in read.items()} == {f"layer.{i}": i for i in range(5)}


def test_a_small_model_is_one_file_without_an_index(tmp_path: Path):
    HFCheckpoint(dtype=torch.bfloat16).write(tmp_path, iter([("weight", torch.ones(2, 2))]))
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]
    assert dict(HFCheckpoint().read(tmp_path))["weight"].dtype == torch.bfloat16
