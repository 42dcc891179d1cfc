"""The Hugging Face layout: config.json, tokenizer files, safetensors with an index where there are several."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from slimectl.checkpoints.accounts import Apart
from slimectl.checkpoints.parts import HashedFile, file_bytes, grouped, one_ahead, write_parts
from slimectl.checkpoints.safetensors_file import Form, SafetensorsFile, nbytes, write_safetensors
from slimectl.errors import CheckpointError
from slimectl.model_files import check_file, copy_file, plain_name, read_json
from slimectl.ports import NamedTensors, Weights

EXACT = re.compile(r"e_score_correction_bias$")
"""A router's bias is small beside what it decides; every implementation keeps it in float32."""
INDEX = "model.safetensors.index.json"
STREAMED_BYTES = 1024**3
"""Size of a shard where the whole is not known beforehand: what writing holds in memory."""
COMPANIONS = ("config.json", "generation_config.json", "chat_template.jinja", "tokenizer*", "special_tokens_map.json",
              "vocab.*", "merges.txt", "added_tokens.json")  # fmt: skip


class HFWeights:
    """The tensors of a Hugging Face directory, read one at a time. Raises CheckpointError."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @cached_property
    def _files(self) -> dict[str, SafetensorsFile]:
        files: dict[str, SafetensorsFile] = {}
        for shard in shards(self._path):
            file = SafetensorsFile(shard)
            for name in file.forms():
                if name in files:
                    raise CheckpointError(
                        f"{self._path}: {name} comes twice, in {files[name].path.name} and {shard.name};"
                        " download or convert it again"
                    )
                files[name] = file
        return files

    def forms(self) -> Mapping[str, Form]:
        forms: dict[str, Form] = {}
        for file in dict.fromkeys(self._files.values()):
            forms |= file.forms()
        return forms

    def get(self, name: str) -> Tensor:
        return self._files[name].get(name)


class HeldWeights:
    """Tensors that are in memory already."""

    def __init__(self, tensors: NamedTensors) -> None:
        self._tensors = dict(tensors)

    def forms(self) -> Mapping[str, Form]:
        return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in self._tensors.items()}

    def get(self, name: str) -> Tensor:
        return self._tensors[name]


class Cast:
    """Floating tensors in another precision, besides fp8 (it means nothing without its scales) and those in EXACT."""

    def __init__(self, weights: Weights, dtype: torch.dtype) -> None:
        self._weights = weights
        self._dtype = dtype

    def forms(self) -> Mapping[str, Form]:
        return {name: (shape, self._kept(name, dtype)) for name, (shape, dtype) in self._weights.forms().items()}

    def get(self, name: str) -> Tensor:
        tensor = self._weights.get(name)
        return tensor.to(self._kept(name, tensor.dtype))

    def _kept(self, name: str, dtype: torch.dtype) -> torch.dtype:
        keeps = not dtype.is_floating_point or dtype.itemsize == 1 or EXACT.search(name)
        return dtype if keeps else self._dtype


class HFCheckpoint:
    """Reads and writes the weights of a Hugging Face directory as a stream.

    `dtype` casts floating tensors on the way out; None keeps each as it comes.
    """

    def __init__(self, *, dtype: torch.dtype | None = None, max_shard_bytes: int | None = None) -> None:
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

    def open(self, path: Path) -> Weights:
        """The tensors of the directory, none of them read yet, those of experts apart. Raises CheckpointError."""
        return Apart(HFWeights(path))

    def write(self, path: Path, tensors: NamedTensors) -> None:
        """Write the stream into the existing directory `path`, in the memory of one shard; the index comes last."""
        written: list[list[str]] = []
        total = 0
        for held in _held_shards(tensors, self.max_shard_bytes or STREAMED_BYTES):
            weights = Cast(held, self.dtype) if self.dtype else held
            forms = weights.forms()
            with (path / f".part-{len(written)}").open("wb") as file:
                write_safetensors(file, forms, map(weights.get, forms))
            written.append(list(forms))
            total += sum(map(nbytes, forms.values()))
            del held, weights  # before the next shard is collected
        names = _shard_names(len(written))
        for i, name in enumerate(names):
            (path / f".part-{i}").rename(path / name)
        _write_index(path, names, written, total)


def _held_shards(tensors: NamedTensors, most: int) -> Iterator[HeldWeights]:
    """The stream in parts of about `most` bytes; at least one. What is held is the stream's no more."""
    held: dict[str, Tensor] = {}
    size, count = 0, 0
    for name, tensor in tensors:
        # A copy: the stream may overwrite its buffer.
        held[name] = tensor.detach().to("cpu", copy=True).contiguous()
        size += held[name].nbytes
        if size >= most:
            yield HeldWeights(held.items())
            held, size, count = {}, 0, count + 1
    if held or not count:
        yield HeldWeights(held.items())


def _shard_names(count: int) -> list[str]:
    names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    return names if count > 1 else ["model.safetensors"]


def _write_index(path: Path, names: Sequence[str], members: Sequence[Iterable[str]], total_bytes: int) -> None:
    """Which tensor is in which shard, where there are several."""
    if len(names) > 1:
        weight_map = {member: name for name, group in zip(names, members, strict=True) for member in group}
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        (path / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def write_hf(path: Path, weights: Weights, *, max_shard_bytes: int | None = None) -> dict[str, str]:
    """Write the weights into the existing directory `path`, the index last; the SHA-256 of the shards.

    Two tensors are in memory at a time. Shards of at most `max_shard_bytes` (None: as `file_bytes` says); those that an
    interrupted call left whole stay.
    """
    forms = weights.forms()
    total = sum(map(nbytes, forms.values()))
    groups = list(grouped(forms, lambda name: nbytes(forms[name]), max_shard_bytes or file_bytes(total)))
    names = _shard_names(len(groups))

    def write(i: int, file: HashedFile) -> None:
        # Wide numbers first: each tensor then lies at a multiple of its own width.
        members = sorted(groups[i], key=lambda name: -forms[name][1].itemsize)
        tensors = one_ahead(partial(weights.get, name) for name in members)
        write_safetensors(file, {name: forms[name] for name in members}, tensors)

    _, hashes = write_parts(path, names, write)
    _write_index(path, names, groups, total)
    return hashes


def shards(path: Path) -> list[Path]:
    """The safetensors files of a directory, checked against its index. Raises CheckpointError."""
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such model directory; give a Hugging Face checkpoint directory")
    if (path / INDEX).exists():
        return _listed_shards(path)
    found = sorted(path.glob("*.safetensors"))
    found = [file for file in found if file.name.startswith(("model", "pytorch_model"))]
    if not found:
        kind = "a torch_dist checkpoint" if (path / ".metadata").exists() else "not a Hugging Face checkpoint"
        raise CheckpointError(
            f"{path}: no model*.safetensors; this is {kind}; convert it with `slimectl convert --to hf`"
        )
    for file in found:
        check_file(file)
    return found


def _listed_shards(path: Path) -> list[Path]:
    """The files that the index names: all there, and in the directory itself. Raises CheckpointError."""
    try:
        names = sorted(set(read_json(path / INDEX)["weight_map"].values()))
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path / INDEX}: cannot be read ({error}); copy the directory again") from error
    for name in names:
        if not plain_name(name):
            raise CheckpointError(f"{path / INDEX}: names {name!r:.80}, which is no file of {path}; copy it again")
        try:
            check_file(path / name)
        except FileNotFoundError:
            raise CheckpointError(f"{path}: {INDEX} names {name}, which is not there; copy it again") from None
    return [path / name for name in names]


def copy_companions(source: Path, target: Path) -> None:
    """Copy what belongs to a checkpoint besides its weights: config, tokenizer, chat template."""
    for pattern in COMPANIONS:
        for file in source.glob(pattern):
            if not file.is_dir() and file.resolve() != (target / file.name).resolve():
                copy_file(file, target / file.name)
