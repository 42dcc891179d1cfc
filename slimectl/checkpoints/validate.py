"""Validates the tensors of a checkpoint: each is used, carried along, a tied duplicate, or an error."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from slimectl.architectures.blocks import MLP_NAMES
from slimectl.architectures.config import Config, raw_config
from slimectl.architectures.config_checks import OTHER_MODEL
from slimectl.architectures.family import Family
from slimectl.architectures.mapping import ParamMapping, stack_views, stacked_shapes, views
from slimectl.architectures.registry import family_of, known_family
from slimectl.checkpoints.safetensors_io import TensorSpec
from slimectl.errors import CheckpointError
from slimectl.protocols import Weights

HEAD = "lm_head.weight"
EMBEDDING = "embedding.word_embeddings.weight"


@dataclass(frozen=True)
class TensorInventory:
    """Names of a checkpoint's tensors in file order: the ones that the model uses, and the others."""

    names: tuple[str, ...]
    carried: tuple[str, ...]


class ValidatedModel:
    """Family, architecture and tensors of a model, from its complete configuration.

    Raises CheckpointError for an unknown family.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.family = family_of(config)
        self.architecture = self.family.architecture(config)
        self.links: list[ParamMapping] = self.family.links(config)

    def account(self, forms: Mapping[str, TensorSpec], location: str) -> TensorInventory:
        """Sort the tensors. Raises CheckpointError for missing or extra tensors, and for wrong shapes."""
        return inventory(forms, self.links, self.family, location)


def inventory(
    forms: Mapping[str, TensorSpec], links: Sequence[ParamMapping], family: Family, location: str
) -> TensorInventory:
    """Sort the tensors of a checkpoint for a model with these links.

    The stored copy of a tied head belongs to the model. Raises CheckpointError for missing or extra tensors, and for
    wrong shapes.
    """
    shapes = {name: shape for link in links for name, shape in zip(link.hf, link.shapes, strict=True)}
    embedding = next(link.shapes[0] for link in links if link.megatron == EMBEDDING)
    stored_shapes = {HEAD: embedding} | shapes
    carried = tuple(name for name in forms if name not in stored_shapes and family.carries(name))
    extra = [name for name in forms if name not in stored_shapes and name not in carried]
    if names_without_tensor := shapes.keys() - forms.keys():
        remedy = f", but there is {min(extra)}. {OTHER_MODEL}" if extra else ". Copy or download the checkpoint again."
        raise CheckpointError(f"{location}: no tensor for {_first(names_without_tensor)}{remedy}")
    refuse_extra(extra, location, family.name)
    names = tuple(name for name in forms if name in stored_shapes)
    for name in names:
        if tuple(forms[name][0]) != stored_shapes[name]:
            raise CheckpointError(
                f"{location}: {name} has shape {list(forms[name][0])}, but {list(stored_shapes[name])} is"
                " expected from config.json. Copy config and weights from the same checkpoint."
            )
    return TensorInventory(names, carried)


def refuse_extra(names: Collection[str], location: str, family: str) -> None:
    if names:
        raise CheckpointError(f"{location}: {_first(names)}: {family} models have no such tensor. {OTHER_MODEL}")


def _first(names: Collection[str]) -> str:
    return f"{min(names)} and {len(names) - 1} more" if len(names) > 1 else min(names)


class UnfusedExperts:
    """Weights with separate tensors for each expert, even if the checkpoint stores a layer's experts in two tensors."""

    def __init__(self, weights: Weights, family: Family | None = None) -> None:
        """`family`: the family whose checkpoints have tensors of all experts in a form of its own, if it is one."""
        self._weights = weights
        self._forms = weights.forms()
        is_stacked = family is not None and family.experts is not None and family.experts.stacked
        find_views = stack_views if is_stacked else views
        self._views = find_views({name: shape for name, (shape, _) in self._forms.items()})
        self._last: dict[str, torch.Tensor] = {}

    def forms(self) -> Mapping[str, TensorSpec]:
        fused = {view.source for view in self._views.values()}
        separate = {name: form for name, form in self._forms.items() if name not in fused}
        return separate | {name: (view.shape, self._forms[view.source][1]) for name, view in self._views.items()}

    def get(self, name: str) -> torch.Tensor:
        view = self._views.get(name)
        if view is None:
            return self._weights.get(name)
        if view.source not in self._last:
            # Reads of experts alternate between the layer's two tensors.
            self._last = dict([*self._last.items()][-1:])
            self._last[view.source] = self._weights.get(view.source)
        return self._last[view.source][view.index]


def unfused(weights: Weights, folder: Path) -> Weights:
    """Return weights with separate tensors for each expert, if this is how checkpoints of the model's family are.

    Other families, such as gpt_oss, have another layout under the same names.
    """
    config = raw_config(folder) if (folder / "config.json").is_file() else {}
    family = known_family(config.get("model_type"))
    if not config or (family is not None and family.experts is not None and family.experts.names == MLP_NAMES):
        return UnfusedExperts(weights)
    return weights


class StackedExperts:
    """Weights under the names of published checkpoints, which may have tensors of all experts of a layer.

    The reverse of UnfusedExperts for families with `Experts.stacked`.
    """

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    @cached_property
    def _parts(self) -> Mapping[str, TensorSpec]:
        return self._weights.forms()

    def forms(self) -> Mapping[str, TensorSpec]:
        shapes = stacked_shapes({name: shape for name, (shape, _) in self._parts.items()})
        parts = self._parts
        return {name: (shape, parts[name if name in parts else f"{name}.0"][1]) for name, shape in shapes.items()}

    def get(self, name: str) -> torch.Tensor:
        if name in self._parts:
            return self._weights.get(name)
        parts = itertools.takewhile(self._parts.__contains__, (f"{name}.{e}" for e in itertools.count()))
        return torch.stack([self._weights.get(part) for part in parts])


class ValidatedWeights:
    """Validated tensors of `weights`: the model's in the order of its links, then the tensors carried along.

    A head that repeats the embedding is left out. Raises CheckpointError for missing or extra tensors, and for wrong
    shapes.
    """

    def __init__(self, weights: Weights, model: ValidatedModel, location: str) -> None:
        weights = UnfusedExperts(weights, model.family)
        self.carried = model.account(weights.forms(), location).carried
        self._weights = weights
        self._names = [*(name for link in model.links for name in link.hf), *self.carried]

    def forms(self) -> Mapping[str, TensorSpec]:
        forms = self._weights.forms()
        return {name: forms[name] for name in self._names}

    def get(self, name: str) -> torch.Tensor:
        return self._weights.get(name)
