"""A model's Hugging Face tensors in and out of a torch_dist folder."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor

from slimectl.checkpoints.accounts import EMBEDDING, Model, refuse_extra
from slimectl.checkpoints.safetensors_file import Form
from slimectl.checkpoints.torch_dist.reader import TorchDistReader
from slimectl.checkpoints.torch_dist.writer import Chunk
from slimectl.errors import CheckpointError
from slimectl.ports import Weights
from slimectl.weights import stored as naming
from slimectl.weights.links import Link
from slimectl.weights.stored import Naming, Stored

CARRIED = "carried."
"""Prefix of tensors that Megatron does not know, kept under their Hugging Face names."""
TRAINING = re.compile(r"(chained_\d+\.)?optimizer\b|rng_state|rerun_state_machine|.*_extra_state")
"""Keys that a training checkpoint has besides its model's."""


class TorchDistWeights:
    """A torch_dist folder's model by Hugging Face name: written by us or by Megatron, in training or before it.

    One Megatron parameter is in memory at a time. Raises CheckpointError for missing, extra and misshapen tensors.
    """

    def __init__(self, folder: Path, model: Model) -> None:
        self._model = model
        self._reader = TorchDistReader(folder)
        self._last: tuple[Link | None, dict[str, Tensor]] = (None, {})

    @cached_property
    def _prefix(self) -> str:
        """What a framework put before Megatron's own names; mostly nothing."""
        ends = [key for key in self._reader.tensors if key.endswith(EMBEDDING) and not TRAINING.match(key)]
        return min(ends, key=len).removesuffix(EMBEDDING) if ends else ""

    @cached_property
    def _keys(self) -> dict[str, Form]:
        cut = len(self._prefix)
        tensors = self._reader.tensors.items()
        kept = {key[cut:]: form for key, form in tensors if key.startswith(self._prefix) and not TRAINING.match(key)}
        return kept | {key: form for key, form in tensors if key.startswith(CARRIED)}

    @cached_property
    def _naming(self) -> Naming:
        keys = self._keys
        try:
            return naming.naming_of(keys, self._model.links, self._model.architecture)
        except CheckpointError as error:
            raise CheckpointError(f"{self._reader.folder}: {error}") from error

    @cached_property
    def _links(self) -> dict[str, tuple[Link, torch.dtype]]:
        """The parameter that holds each Hugging Face tensor."""
        found: dict[str, tuple[Link, torch.dtype]] = {}
        for link in self._model.links:
            for region in self._regions(link):
                self._check(link, region)
                found |= dict.fromkeys(link.hf, (link, self._keys[region.key][1]))
        known = {key for way in _namings(self._naming) for key in self._known(way)}
        extra = [key for key in self._keys if key not in known and not key.startswith(CARRIED)]
        refuse_extra(extra, str(self._reader.folder), self._model.family.name)
        return found

    def _regions(self, link: Link) -> tuple[Stored, ...]:
        return naming.stored(link, self._model.architecture, self._naming)

    def _known(self, way: Naming) -> Collection[str]:
        return naming.tensors(self._model.links, self._model.architecture, way).keys()

    def _check(self, link: Link, region: Stored) -> None:
        found, wanted = self._keys[region.key][0], (*region.counts, *region.shape)
        padded = link.padded and found[1:] == wanted[1:] and found[0] >= wanted[0]
        if found != wanted and not padded:
            raise CheckpointError(
                f"{self._reader.folder}: {region.key} has shape {list(found)}, config.json asks for {list(wanted)};"
                " give the config of this checkpoint with --config"
            )

    def forms(self) -> Mapping[str, Form]:
        forms: dict[str, Form] = {}
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
            self._last = link, dict(link.to_hf(self._whole(link)))
        return self._last[1][name]

    def _whole(self, link: Link) -> Tensor:
        parts = []
        for region in self._regions(link):
            offsets = (*region.offsets, *(0 for _ in region.shape))
            sizes = (*(1 for _ in region.counts), *region.shape)
            parts.append(self._reader.read(self._prefix + region.key, offsets, sizes).reshape(region.shape))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def chunks_of(weights: Weights, model: Model, carried: tuple[str, ...]) -> list[Chunk]:
    """All of a model's Megatron parameters as chunks of a torch_dist folder; `weights` holds what its links ask for.

    Norms get every name that mcore's local and its TransformerEngine modules look for, over the same bytes.
    Raises CheckpointError where tensors that Megatron stores as one have different dtypes.
    """
    forms, dtypes = weights.forms(), dict[str, tuple[torch.dtype, str]]()
    made = [chunk for link in model.links for chunk in _chunks(weights, model, link, _dtype(link, forms))]
    for chunk in made:
        dtype, _ = dtypes.setdefault(chunk.key, (chunk.dtype, chunk.key))
        if dtype != chunk.dtype:
            raise CheckpointError(f"{chunk.key}: {dtype} in one layer, {chunk.dtype} in another; add --dtype")
    for name in carried:
        shape, dtype = forms[name]
        made.append(Chunk(CARRIED + name, shape, (0,) * len(shape), shape, dtype, partial(weights.get, name)))
    return made


def extra_states(model: Model) -> list[str]:
    """Keys of the state that a module keeps besides its weights (TransformerEngine's for fp8): mcore asks for it.

    More keys than one kind of modules has; mcore passes over those that it does not know.
    """
    keys = []
    for link in model.links:
        for way in _namings(naming.naming(model.architecture)):
            for region in naming.stored(link, model.architecture, way):
                module, _, parameter = region.key.rpartition(".")
                if parameter == "weight" and module.startswith("decoder."):
                    keys.append(_object_key(module, region))
                    attention, inside, _ = module.partition(".self_attention.")
                    keys += [_object_key(f"{attention}{inside}core_attention", region)] if inside else []
    return list(dict.fromkeys(keys))


def _object_key(module: str, region: Stored) -> str:
    place, counts = (".".join(map(str, numbers)) for numbers in (region.offsets or (0,), region.counts or (1,)))
    return f"{module}._extra_state/shard_{place}_{counts}"


def _dtype(link: Link, forms: Mapping[str, Form]) -> torch.dtype:
    found = {forms[name][1] for name in link.hf}
    if len(found) > 1:
        raise CheckpointError(f"{' and '.join(link.hf)} differ in dtype, Megatron has them in one tensor; add --dtype")
    return found.pop()


def _chunks(weights: Weights, model: Model, link: Link, dtype: torch.dtype) -> Iterator[Chunk]:
    def load(rows: tuple[int, int]) -> Tensor:
        whole = link.to_megatron([weights.get(name) for name in link.hf])
        return whole[rows[0] : rows[1]] if rows != (0, link.shape[0]) else whole

    usual = naming.naming(model.architecture)
    ways = [naming.stored(link, model.architecture, way) for way in _namings(usual)]
    for region, *others in zip(*ways, strict=True):
        yield Chunk(
            region.key,
            (*region.counts, *region.shape),
            (*region.offsets, *(0 for _ in region.shape)),
            (*(1 for _ in region.counts), *region.shape),
            dtype,
            partial(load, region.rows),
            tuple(other.key for other in others if other.key != region.key),
        )


def _namings(way: Naming) -> list[Naming]:
    """The same stacking with both kinds of norm names, `way` first."""
    return [way, Naming(way.stacked, not way.fused)]
