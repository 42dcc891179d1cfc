"""Reads and writes a model's Hugging Face tensors in torch_dist checkpoints."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor

from slimectl.architectures import torch_dist_keys as naming
from slimectl.architectures.config import read_config
from slimectl.architectures.mapping import Empty, ParamMapping
from slimectl.architectures.torch_dist_keys import KeyStyle, ShardKey
from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.checkpoints.safetensors_io import TensorMemory, TensorSpec
from slimectl.checkpoints.torch_dist.metadata import is_torch_dist, newest
from slimectl.checkpoints.torch_dist.reader import TorchDistReader
from slimectl.checkpoints.torch_dist.writer import Chunk
from slimectl.checkpoints.validate import EMBEDDING, StackedExperts, ValidatedModel, refuse_extra
from slimectl.errors import CheckpointError
from slimectl.protocols import Weights

CARRIED = "carried."
"""Prefix of tensors without a Megatron counterpart, stored under their Hugging Face names."""
TRAINING = re.compile(r"(chained_\d+\.)?optimizer\b|rng_state|rerun_state_machine|.*_extra_state")
"""Keys of a training checkpoint that do not belong to the model."""


class TorchDistWeights:
    """Weights of a torch_dist folder by Hugging Face name, written by this package or by Megatron.

    One Megatron parameter is in memory at a time. Raises CheckpointError for missing or extra tensors, and for wrong
    shapes.
    """

    def __init__(self, folder: Path, model: ValidatedModel, memory: TensorMemory | None = None) -> None:
        self._model = model
        self._reader = TorchDistReader(folder, memory)
        self._last: tuple[ParamMapping | None, dict[str, Tensor]] = (None, {})

    @cached_property
    def _prefix(self) -> str:
        """Return the prefix that a framework added to Megatron's names, which is usually empty."""
        ends = [key for key in self._reader.tensors if key.endswith(EMBEDDING) and not TRAINING.match(key)]
        return min(ends, key=len).removesuffix(EMBEDDING) if ends else ""

    @cached_property
    def _keys(self) -> dict[str, TensorSpec]:
        prefix_length = len(self._prefix)
        tensors = self._reader.tensors.items()
        model_keys = {
            key[prefix_length:]: form
            for key, form in tensors
            if key.startswith(self._prefix) and not TRAINING.match(key)
        }
        return model_keys | {key: form for key, form in tensors if key.startswith(CARRIED)}

    @cached_property
    def _naming(self) -> KeyStyle:
        keys = self._keys
        try:
            return naming.detect_key_style(keys, self._model.links, self._model.architecture)
        except CheckpointError as error:
            raise CheckpointError(f"{self._reader.folder}: {error}") from error

    @cached_property
    def _links(self) -> dict[str, tuple[ParamMapping, torch.dtype]]:
        """Return link and dtype by Hugging Face name."""
        links: dict[str, tuple[ParamMapping, torch.dtype]] = {}
        for link in self._model.links:
            for region in self._regions(link):
                self._check_shape(link, region)
                links |= dict.fromkeys(link.hf, (link, self._keys[region.key][1]))
        expected_keys = {key for style in _norm_styles(self._naming) for key in self._keys_of_style(style)}
        extra = [key for key in self._keys if key not in expected_keys and not key.startswith(CARRIED)]
        refuse_extra(extra, str(self._reader.folder), self._model.family.name)
        return links

    def _regions(self, link: ParamMapping) -> tuple[ShardKey, ...]:
        return naming.shard_key(link, self._model.architecture, self._naming)

    def _keys_of_style(self, style: KeyStyle) -> Collection[str]:
        return naming.tensors(self._model.links, self._model.architecture, style).keys()

    def _check_shape(self, link: ParamMapping, region: ShardKey) -> None:
        shape, expected = self._keys[region.key][0], (*region.counts, *region.shape)
        padded = link.padded and shape[1:] == expected[1:] and shape[0] >= expected[0]
        if shape != expected and not padded:
            raise CheckpointError(
                f"{self._reader.folder}: {region.key} has shape {list(shape)}, but {list(expected)} is expected from"
                " config.json. Give the config of this checkpoint with --config."
            )

    def forms(self) -> Mapping[str, TensorSpec]:
        forms: dict[str, TensorSpec] = {}
        for link in self._model.links:
            dtype = self._links[link.hf[0]][1]
            forms |= {name: (shape, dtype) for name, shape in zip(link.hf, link.shapes, strict=True)}
        carried = {key.removeprefix(CARRIED): form for key, form in self._keys.items() if key.startswith(CARRIED)}
        return forms | carried

    def get(self, name: str) -> Tensor:
        if name not in self._links:
            shape = self._keys[CARRIED + name][0]
            return self._reader.read(CARRIED + name, (0,) * len(shape), shape)
        link, _ = self._links[name]
        if self._last[0] is not link:
            self._last = link, dict(link.to_hf(self._read_parameter(link)))
        return self._last[1][name]

    def _read_parameter(self, link: ParamMapping) -> Tensor:
        parts = []
        for region in self._regions(link):
            offsets = (*region.offsets, *(0 for _ in region.shape))
            sizes = (*(1 for _ in region.counts), *region.shape)
            parts.append(self._reader.read(self._prefix + region.key, offsets, sizes).reshape(region.shape))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class ModelCheckpoint(HFCheckpoint):
    """Reads a model folder in Hugging Face or torch_dist layout, and writes Hugging Face layout.

    A torch_dist folder needs the config.json of its Hugging Face model. For Megatron-LM's own folders, put it next to
    the tracker file.
    """

    def open(self, path: Path, memory: TensorMemory | None = None) -> Weights:
        if not is_torch_dist(path):
            return super().open(path, memory)
        return StackedExperts(TorchDistWeights(newest(path), ValidatedModel(read_config(path))))


def chunks_of(weights: Weights, model: ValidatedModel, carried: tuple[str, ...]) -> list[Chunk]:
    """Build the chunks of all Megatron parameters of a model. `weights` must hold the tensors of its links.

    Norms are stored once, under the names of both mcore's local modules and its TransformerEngine modules. Raises
    CheckpointError if tensors that Megatron fuses have different dtypes.
    """
    forms, dtypes = weights.forms(), dict[str, tuple[torch.dtype, str]]()
    empty = TensorMemory().empty
    chunks = [chunk for link in model.links for chunk in _chunks(weights, model, link, _dtype(link, forms), empty)]
    for chunk in chunks:
        dtype, _ = dtypes.setdefault(chunk.key, (chunk.dtype, chunk.key))
        if dtype != chunk.dtype:
            raise CheckpointError(f"{chunk.key}: {dtype} in one layer, but {chunk.dtype} in another. Add --dtype.")
    for name in carried:
        shape, dtype = forms[name]
        chunks.append(Chunk(CARRIED + name, shape, (0,) * len(shape), shape, dtype, partial(weights.get, name)))
    return chunks


def extra_states(model: ValidatedModel) -> list[str]:
    """Return the keys of the modules' extra state (TransformerEngine's for fp8), which mcore requires.

    They cover all module types. mcore ignores keys of modules that the model does not have.
    """
    keys = []
    for link in model.links:
        for style in _norm_styles(naming.key_style(model.architecture)):
            for region in naming.shard_key(link, model.architecture, style):
                module, _, parameter = region.key.rpartition(".")
                if parameter == "weight" and module.startswith("decoder."):
                    keys.append(_object_key(module, region))
                    attention, inside, _ = module.partition(".self_attention.")
                    keys += [_object_key(f"{attention}{inside}core_attention", region)] if inside else []
    return list(dict.fromkeys(keys))


def _object_key(module: str, region: ShardKey) -> str:
    offsets, counts = (".".join(map(str, numbers)) for numbers in (region.offsets or (0,), region.counts or (1,)))
    return f"{module}._extra_state/shard_{offsets}_{counts}"


def _dtype(link: ParamMapping, forms: Mapping[str, TensorSpec]) -> torch.dtype:
    dtypes = {forms[name][1] for name in link.hf}
    if len(dtypes) > 1:
        raise CheckpointError(
            f"{' and '.join(link.hf)} differ in dtype, but Megatron stores them in one tensor. Add --dtype."
        )
    return dtypes.pop()


def _chunks(
    weights: Weights, model: ValidatedModel, link: ParamMapping, dtype: torch.dtype, empty: Empty
) -> Iterator[Chunk]:
    def load(rows: tuple[int, int]) -> Tensor:
        parameter = link.to_megatron([weights.get(name) for name in link.hf], empty)
        return parameter[rows[0] : rows[1]] if rows != (0, link.shape[0]) else parameter

    default_style = naming.key_style(model.architecture)
    regions_by_style = [naming.shard_key(link, model.architecture, style) for style in _norm_styles(default_style)]
    for region, *alternatives in zip(*regions_by_style, strict=True):
        yield Chunk(
            region.key,
            (*region.counts, *region.shape),
            (*region.offsets, *(0 for _ in region.shape)),
            (*(1 for _ in region.counts), *region.shape),
            dtype,
            partial(load, region.rows),
            tuple(alternative.key for alternative in alternatives if alternative.key != region.key),
        )


def _norm_styles(style: KeyStyle) -> list[KeyStyle]:
    """Return the key styles of the same stacking with both kinds of norm names, `style` first."""
    return [style, KeyStyle(style.stacked, not style.fused)]
