"""Merges a trainer's LoRA adapters into a base model on disk, in the workers of SGLang and vLLM.

Must compute the same sums as slimectl.architectures.lora and the same fingerprint as slimectl.checkpoints.base_model.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

SAMPLED = 64
BLOCK = re.compile(r"(.*\blayers\.\d+\.[^.]+)\..*")
"""Part of a decoder layer. Servers fuse the matrices of a part, and load fused ones as a whole."""

Parts = dict[str, torch.Tensor]


class Merger:
    """Merges adapters, which arrive in messages, into the tensors of a base model.

    `own` is the folder with the server's initial weights.
    """

    def __init__(self, own: Path, *, whole: bool) -> None:
        self.own = own
        self.whole = whole
        """Whether all tensors of the server are equal to `base`, except in the blocks `changed`."""
        self.base = own
        self.changed: frozenset[str] = frozenset()
        self._parts: Parts = {}

    def forget(self) -> None:
        """Drop the parts of an incomplete adapter."""
        self._parts = {}

    def add(self, adapter: Mapping[str, Any], parts: Iterable[tuple[str, torch.Tensor]], *, last: bool) -> Tensors:
        """Add a message. With the last one, return the merged tensors to load. Raises ValueError if it does not fit.

        The caller must load all of them and then call `loaded`.
        """
        folder = Path(adapter["base"])
        base = BaseModel(folder if folder.is_dir() else self.own)
        if fingerprint(base.folder, base.stamps) != adapter["fingerprint"]:
            raise ValueError(f"{base.folder} is not the model that the adapter was trained on. Set sync.lora = merged.")
        for name, part in parts:
            self._parts[name] = part.to(dtype=torch.float32, device="cpu", copy=True)
            base.check(name, tuple(part.shape), adapter["rank"])
        if not last:
            return iter(())
        pairs = {name.removesuffix(".lora_A.weight") for name in self._parts if name.endswith(".lora_A.weight")}
        pairs = {layer for layer in pairs if f"{layer}.lora_B.weight" in self._parts}
        if not len(pairs) == len(self._parts) / 2 == adapter["layers"]:
            raise ValueError(f"{len(pairs)} of the adapter's {adapter['layers']} layers are complete. Push it again.")
        complete = self.whole and self.base == base.folder
        blocks = frozenset(block_of(f"{layer}.weight") for layer in pairs)
        needed = blocks | self.changed
        names = [name for name in base.names if not complete or block_of(name) in needed]
        parts_of_all, self._parts = self._parts, {}
        self.base, self.changed, self.whole = base.folder, blocks, False
        return base.merged(names, parts_of_all, adapter["alpha"] / adapter["rank"])

    def loaded(self) -> None:
        """Record that the last tensors of `add` have been loaded."""
        self.whole = True


class BaseModel:
    """The tensors of a Hugging Face folder, read through memory maps."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = folder / "model.safetensors.index.json"
        if index.exists():
            files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        else:
            files = sorted(file.name for file in folder.glob("*model*.safetensors"))
        if not files:
            raise ValueError(f"{folder}: no model*.safetensors to merge an adapter into. Set sync.lora = merged.")
        readers: list[Any] = [safe_open(str(folder / file), framework="pt") for file in files]
        self._reader_of = {name: reader for reader in readers for name in reader.keys()}
        self.stamps = tuple((file, (folder / file).stat().st_mtime_ns) for file in files)

    @property
    def names(self) -> Iterable[str]:
        return self._reader_of

    def get(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._reader_of[name].get_tensor(name)
        return tensor

    def check(self, name: str, shape: tuple[int, ...], rank: int) -> None:
        """Raise ValueError for a part that belongs to no layer or has the wrong shape."""
        layer, _, half = name.rpartition(".lora_")
        weight = f"{layer}.weight"
        if half not in ("A.weight", "B.weight") or weight not in self._reader_of:
            raise ValueError(f"{name} is not an adapter of a layer of {self.folder}. Set sync.lora = merged.")
        outputs, inputs = self._reader_of[weight].get_slice(weight).get_shape()
        expected = (rank, inputs) if half == "A.weight" else (outputs, rank)
        if shape != expected:
            raise ValueError(f"{name} has shape {list(shape)}, expected {list(expected)} for rank {rank}")

    def merged(self, names: Iterable[str], parts: Parts, scale: float) -> Tensors:
        for name in names:
            weight, layer = self.get(name), name.removesuffix(".weight")
            a, b = parts.get(f"{layer}.lora_A.weight"), parts.get(f"{layer}.lora_B.weight")
            yield name, weight if a is None or b is None else (b @ a).mul_(scale).add_(weight)


Tensors = Iterator[tuple[str, torch.Tensor]]


def block_of(name: str) -> str:
    """Return the part of a decoder layer that a tensor belongs to, or the tensor's own name.

    >>> block_of("model.layers.0.self_attn.q_proj.weight")
    'model.layers.0.self_attn'
    """
    match = BLOCK.fullmatch(name)
    return name if match is None else match[1]


@functools.cache
def fingerprint(folder: Path, stamps: tuple[tuple[str, int], ...]) -> str:
    """Return the BLAKE2b hash of 64 elements of every tensor. Cached by the files' modification times."""
    base, digest = BaseModel(folder), hashlib.blake2b(digest_size=16)
    for name in sorted(base.names):
        if name != "lm_head.weight" and not name.endswith("rotary_emb.inv_freq"):
            flat = base.get(name).reshape(-1)
            sample = flat[:: max(1, flat.numel() // SAMPLED)][:SAMPLED].float()
            digest.update(name.encode() + sample.numpy().tobytes())
    return digest.hexdigest()
