"""Reads and writes checkpoints in Hugging Face format: safetensors shards, their index, and companion files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from slimectl.checkpoints.hf_weights import INDEX, HFWeights, check_plain, check_weights
from slimectl.checkpoints.resumable_write import HashedFile, file_bytes, grouped, one_ahead, write_parts
from slimectl.checkpoints.safetensors_io import (
    MappedMemory,
    TensorMemory,
    TensorSpec,
    nbytes,
    write_safetensors,
)
from slimectl.checkpoints.validate import unfused
from slimectl.data.hashing import Digest
from slimectl.protocols import NamedTensors, Weights
from slimectl.system.model_files import copy_file

EXACT = re.compile(r"e_score_correction_bias$")
"""Tensors that stay in float32. A router's bias is small compared to its scores, and every implementation does so."""
STREAMED_BYTES = 1024**3
"""Shard size if the total is not known in advance. Writing needs this much memory."""
COMPANIONS = (
    "config.json", "generation_config.json", "preprocessor_config.json", "video_preprocessor_config.json",
    "processor_config.json", "chat_template.json", "*.jinja", "additional_chat_templates/*.jinja",
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "tekken.json", "*.model",
    "*.tiktoken",
)  # fmt: skip
"""Files of a checkpoint other than its weights: configuration, tokenizer and chat templates."""


class InMemoryWeights:
    """Weights in memory."""

    def __init__(self, tensors: NamedTensors) -> None:
        self._tensors = dict(tensors)

    def forms(self) -> Mapping[str, TensorSpec]:
        return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in self._tensors.items()}

    def get(self, name: str) -> Tensor:
        return self._tensors[name]


class CastWeights:
    """Casts floating-point tensors, except fp8 (meaningless without its scales) and the tensors in EXACT."""

    def __init__(self, weights: Weights, dtype: torch.dtype) -> None:
        self._weights = weights
        self._dtype = dtype

    def forms(self) -> Mapping[str, TensorSpec]:
        return {
            name: (shape, self._target_dtype(name, dtype)) for name, (shape, dtype) in self._weights.forms().items()
        }

    def get(self, name: str) -> Tensor:
        tensor = self._weights.get(name)
        return tensor.to(self._target_dtype(name, tensor.dtype))

    def _target_dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        is_exact = not dtype.is_floating_point or dtype.itemsize == 1 or EXACT.search(name)
        return dtype if is_exact else self._dtype


class HFCheckpoint:
    """Reads and writes the weights of a Hugging Face directory as a stream.

    `dtype` casts floating-point tensors on writing. None keeps their dtype.
    """

    def __init__(self, *, dtype: torch.dtype | None = None, max_shard_bytes: int | None = None) -> None:
        self.dtype = dtype
        self.max_shard_bytes = max_shard_bytes

    def read(self, path: Path) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor of the directory, of single experts as `unfused` does. Raises like `open`."""
        weights = self.open(path, MappedMemory())
        for name in weights.forms():
            yield name, weights.get(name)

    def open(self, path: Path, memory: TensorMemory | None = None) -> Weights:
        """Open the directory for lazy reading, with a tensor for each expert as `unfused` does.

        Raises CheckpointError, also for weights that `check_weights` and `check_plain` reject.
        """
        check_weights(path)
        check_plain(path)
        return unfused(HFWeights(path, memory), path)

    def write(self, path: Path, tensors: NamedTensors) -> None:
        """Write the stream to the existing directory `path`, with one shard in memory. The index is written last."""
        names_by_shard: list[list[str]] = []
        total = 0
        for shard in _collect_shards(tensors, self.max_shard_bytes or STREAMED_BYTES):
            weights = CastWeights(shard, self.dtype) if self.dtype else shard
            forms = weights.forms()
            with (path / f".part-{len(names_by_shard)}").open("wb") as file:
                write_safetensors(file, forms, map(weights.get, forms))
            names_by_shard.append(list(forms))
            total += sum(map(nbytes, forms.values()))
            del shard, weights  # free memory before the next shard is collected
        names = _shard_names(len(names_by_shard))
        for i, name in enumerate(names):
            (path / f".part-{i}").rename(path / name)
        _write_index(path, names, names_by_shard, total)


def _collect_shards(tensors: NamedTensors, max_bytes: int) -> Iterator[InMemoryWeights]:
    """Collect the stream into shards of about `max_bytes`, at least one. Shards hold copies of the tensors."""
    tensors_of_shard: dict[str, Tensor] = {}
    size, count = 0, 0
    for name, tensor in tensors:
        # A copy: the stream may overwrite its buffer.
        tensors_of_shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
        size += tensors_of_shard[name].nbytes
        if size >= max_bytes:
            yield InMemoryWeights(tensors_of_shard.items())
            tensors_of_shard, size, count = {}, 0, count + 1
    if tensors_of_shard or not count:
        yield InMemoryWeights(tensors_of_shard.items())


def _shard_names(count: int) -> list[str]:
    names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    return names if count > 1 else ["model.safetensors"]


def _write_index(path: Path, names: Sequence[str], members: Sequence[Iterable[str]], total_bytes: int) -> None:
    """Write the index of tensors and their shards, if there are several shards."""
    if len(names) > 1:
        weight_map = {member: name for name, group in zip(names, members, strict=True) for member in group}
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        (path / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def write_hf(path: Path, weights: Weights, *, max_shard_bytes: int | None = None) -> dict[str, Digest]:
    """Write the weights to the existing directory `path`, the index last. Return the digests of the shards.

    Two tensors are in memory at a time. Shards have at most `max_shard_bytes` (None: the result of `file_bytes`).
    Complete shards of an interrupted call are kept.
    """
    forms = weights.forms()
    total = sum(map(nbytes, forms.values()))
    groups = list(grouped(forms, lambda name: nbytes(forms[name]), max_shard_bytes or file_bytes(total)))
    names = _shard_names(len(groups))

    def write(i: int, file: HashedFile) -> None:
        # Wide dtypes first, so that each tensor is aligned to its element size.
        members = sorted(groups[i], key=lambda name: -forms[name][1].itemsize)
        tensors = one_ahead(partial(weights.get, name) for name in members)
        write_safetensors(file, {name: forms[name] for name in members}, tensors)

    _, hashes = write_parts(path, names, write)
    _write_index(path, names, groups, total)
    return hashes


def copy_companions(source: Path, target: Path) -> None:
    """Copy the files of a checkpoint other than its weights: config, tokenizer, chat template."""
    for file in (file for pattern in COMPANIONS for file in source.glob(pattern)):
        copy = target / file.relative_to(source)
        if not file.is_dir() and file.resolve() != copy.resolve():
            copy.parent.mkdir(exist_ok=True)
            copy_file(file, copy)


def write_model(source: Path, target: Path, tensors: NamedTensors) -> None:
    """Write a directory that an engine can load: these weights, and the companion files of the model in `source`."""
    copy_companions(source, target)
    HFCheckpoint().write(target, tensors)
