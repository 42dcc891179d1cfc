"""One hash for what an input is."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import pytest
import torch

from slimectl.data.hashing import content_hash, tensor_checksum
from slimectl.errors import SettingsError


def test_file_counts_by_its_bytes(tmp_path: Path):
    (tmp_path / "a").write_bytes(b"abc")
    assert content_hash(tmp_path / "a") == hashlib.sha256(b"abc").hexdigest()
    with pytest.raises(SettingsError, match="no such file or directory"):
        content_hash(tmp_path / "b")


def test_model_counts_by_headers_and_sizes_or_in_full(tmp_path: Path, model_dir: Callable[[str], Path]):
    copy = copytree(model_dir("llama"), tmp_path / "copy")
    assert content_hash(copy) == content_hash(model_dir("llama"))
    (copy / ".tmp-partial").write_text("x")
    assert content_hash(copy) == content_hash(model_dir("llama"))
    assert content_hash(copy) != content_hash(model_dir("qwen2"))

    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    assert content_hash(copy) == content_hash(model_dir("llama"))
    assert content_hash(copy, full=True) != content_hash(model_dir("llama"), full=True)

    (copy / "config.json").write_text("{}")
    assert content_hash(copy) != content_hash(model_dir("llama"))


def test_a_tensor_counts_by_its_dtype_its_shape_and_its_bits():
    numbers = torch.tensor([[1.0, 2.0], [3.0, 0.0]])
    of_bytes = hashlib.blake2b(b"float32 [2, 2]\n" + numbers.numpy().tobytes(), digest_size=16).hexdigest()
    assert tensor_checksum(numbers) == of_bytes
    assert tensor_checksum(numbers.t().contiguous().t()) == of_bytes  # however it lies in memory
    others = [numbers.bfloat16(), numbers.view(4), numbers.view(torch.int32), numbers * torch.tensor([1.0, -1.0])]
    assert len({of_bytes, *map(tensor_checksum, others)}) == 5
    assert tensor_checksum(torch.tensor(2.5)) != tensor_checksum(torch.tensor([2.5]))
    assert tensor_checksum(torch.tensor([float("nan")])) == tensor_checksum(torch.tensor([float("nan")]))
    assert len(tensor_checksum(torch.empty(0, 3))) == 32


def test_a_link_out_of_a_directory_counts_by_where_it_leads_and_what_is_no_file_not_at_all(tmp_path: Path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a").write_text("a")
    before = content_hash(folder)
    os.mkfifo(folder / "pipe")
    (folder / "circle").symlink_to("circle")
    assert content_hash(folder) == before
    (folder / "endless").symlink_to("/proc/kcore")
    with_link = content_hash(folder)
    assert with_link != before
    (folder / "endless").unlink()
    (folder / "endless").symlink_to("/dev/zero")
    assert content_hash(folder) != with_link
    with (folder / "huge").open("wb") as file:
        file.truncate(10**13)
    assert len(content_hash(folder)) == 64
