"""The Hugging Face layout: config.json, tokenizer files, safetensors with an index where there are several."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from slimectl.errors import CheckpointError
from slimectl.ports import NamedTensors

INDEX = "model.safetensors.index.json"
COMPANIONS = ("config.json", "generation_config.json", "chat_template.jinja", "tokenizer*", "special_tokens_map.json",
              "vocab.*", "merges.txt", "added_tokens.json")  # fmt: skip


class HFCheckpoint:
    """Reads and writes the weights of a Hugging Face directory, tensor by tensor.

    `dtype` casts floating tensors on the way out; None keeps each as it comes. A shard is closed as soon as it holds
    `max_shard_bytes`, so writing needs the memory of one shard, not of the model.
    """

    def __init__(self, *, dtype: torch.dtype | None = None, max_shard_bytes: int = 4 * 1024**3) -> None:
        self.dtype = dtype
        self.max_shard_bytes = max_shard_bytes

    def read(self, path: Path) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the directory, in the order of its shards. Raises CheckpointError."""
        for shard in shards(path):
            try:
                with safe_open(str(shard), framework="pt") as file:
                    for name in file.keys():
                        yield name, file.get_tensor(name)
            except Exception as error:
                raise CheckpointError(
                    f"{shard}: cannot be read as safetensors ({error}); download or convert it again"
                ) from error

    def write(self, path: Path, tensors: NamedTensors) -> None:
        """Write the stream into the existing directory `path`; the index comes last."""
        files: list[dict[str, Tensor]] = [{}]
        names: list[list[str]] = []
        size = total = 0

        def close_shard() -> None:
            save_file(files[-1], str(path / f"part-{len(names):05d}.safetensors"), metadata={"format": "pt"})
            names.append(list(files[-1]))
            files[-1] = {}

        for name, tensor in tensors:
            kept = tensor.detach().to("cpu", self.dtype if tensor.is_floating_point() else None)
            # A copy: tied tensors must not share storage in the file, and the stream may overwrite its buffer.
            files[-1][name] = kept.clone(memory_format=torch.contiguous_format)
            total += kept.nbytes
            size += kept.nbytes
            if size >= self.max_shard_bytes:
                close_shard()
                size = 0
        if files[-1] or not names:
            close_shard()
        _name_shards(path, names, total)


def _name_shards(path: Path, names: list[list[str]], total_bytes: int) -> None:
    """Give the parts their final names: `model.safetensors`, or `model-i-of-n` and an index."""
    if len(names) == 1:
        (path / "part-00000.safetensors").rename(path / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for i, members in enumerate(names):
        final = f"model-{i + 1:05d}-of-{len(names):05d}.safetensors"
        (path / f"part-{i:05d}.safetensors").rename(path / final)
        weight_map.update(dict.fromkeys(members, final))
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (path / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def shards(path: Path) -> list[Path]:
    """The safetensors files of a directory, checked against its index. Raises CheckpointError."""
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such model directory; give a Hugging Face checkpoint directory")
    if (path / INDEX).exists():
        listed = sorted(set(json.loads((path / INDEX).read_text())["weight_map"].values()))
        missing = [name for name in listed if not (path / name).exists()]
        if missing:
            raise CheckpointError(f"{path}: {INDEX} names {missing[0]}, which is not there; copy the directory again")
        return [path / name for name in listed]
    found = sorted(path.glob("*.safetensors"))
    found = [file for file in found if file.name.startswith(("model", "pytorch_model"))]
    if not found:
        kind = "a torch_dist checkpoint" if (path / ".metadata").exists() else "not a Hugging Face checkpoint"
        raise CheckpointError(
            f"{path}: no model*.safetensors; this is {kind}; convert it with `slimectl convert --to hf`"
        )
    return found


def copy_companions(source: Path, target: Path) -> None:
    """Copy what belongs to a checkpoint besides its weights: config, tokenizer, chat template."""
    for pattern in COMPANIONS:
        for file in source.glob(pattern):
            if file.resolve() != (target / file.name).resolve():
                shutil.copyfile(file, target / file.name)
