"""Validates the tensors of a checkpoint: used, carried along, a tied duplicate, or refused by name."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from slimectl.architectures.config import Config
from slimectl.architectures.fused_experts import views
from slimectl.architectures.mapping import ParamMapping
from slimectl.architectures.registry import family_of
from slimectl.checkpoints.safetensors_io import TensorSpec
from slimectl.errors import CheckpointError
from slimectl.protocols import Weights

HEAD = "lm_head.weight"
EMBEDDING = "embedding.word_embeddings.weight"


@dataclass(frozen=True)
class TensorInventory:
    """Names of the tensors that the model does not use: carried along, or a duplicate of a tied one."""

    carried: tuple[str, ...]
    doubled: tuple[str, ...]


class Model:
    """Family, architecture and tensors of a model, from its complete configuration.

    Raises CheckpointError for an unknown family.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.family = family_of(config)
        self.architecture = self.family.architecture(config)
        self.links: list[ParamMapping] = self.family.links(config)

    def is_carried(self, name: str) -> bool:
        """Whether checkpoints hold this tensor but training does not use it."""
        return any(re.search(pattern, name) for pattern in self.family.carried)

    def account(self, forms: Mapping[str, TensorSpec], location: str) -> TensorInventory:
        """Refuse missing, extra and misshapen tensors, by name. A head stored beside a tied embedding is `doubled`."""
        shapes = {name: shape for link in self.links for name, shape in zip(link.hf, link.shapes, strict=True)}
        refuse_missing(shapes.keys() - forms.keys(), location)
        carried = tuple(name for name in forms if name not in shapes and self.is_carried(name))
        unexpected = [name for name in forms if name not in shapes and name not in carried]
        doubled = tuple(name for name in unexpected if name == HEAD)
        refuse_extra([name for name in unexpected if name not in doubled], location, self.family.name)
        for name, shape in shapes.items():
            if forms[name][0] != shape:
                raise CheckpointError(
                    f"{location}: {name} has shape {list(forms[name][0])}, config.json asks for {list(shape)};"
                    " copy config and weights from the same checkpoint"
                )
        return TensorInventory(carried, doubled)

    @property
    def embedding(self) -> str:
        """Name of the embedding, which equals the head of a tied model."""
        return next(link.hf[0] for link in self.links if link.megatron == EMBEDDING)


def refuse_missing(names: Collection[str], location: str) -> None:
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise CheckpointError(f"{location}: no tensor for {min(names)}{more}; copy or download the checkpoint again")


def refuse_extra(names: Collection[str], location: str, family: str) -> None:
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise CheckpointError(
            f"{location}: {min(names)}{more}: a tensor that no {family} model has; check model_type in config.json"
        )


class UnfusedExperts:
    """Weights with separate tensors for each expert, also if the checkpoint stores those of a layer in two."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._forms = weights.forms()
        self._views = views({name: shape for name, (shape, _) in self._forms.items()})
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
            # Reads of experts alternate between the two tensors of their layer.
            self._last = dict([*self._last.items()][-1:])
            self._last[view.source] = self._weights.get(view.source)
        return self._last[view.source][view.index]


class ValidatedWeights:
    """Validated tensors of `weights`: those of the model, in the order of its links, then those carried along.

    Raises CheckpointError for missing, extra and misshapen tensors, and for a head that differs from the embedding it
    is tied to.
    """

    def __init__(self, weights: Weights, model: Model, location: str) -> None:
        weights = UnfusedExperts(weights)
        account = model.account(weights.forms(), location)
        for name in account.doubled:
            if not torch.equal(weights.get(name), weights.get(model.embedding)):
                raise CheckpointError(
                    f"{location}: {name} differs from {model.embedding}, but config.json says that they are tied; set"
                    " tie_word_embeddings to false if the model was trained so"
                )
        self.carried, self.doubled = account.carried, account.doubled
        self._weights = weights
        self._names = [*(name for link in model.links for name in link.hf), *self.carried]

    def forms(self) -> Mapping[str, TensorSpec]:
        forms = self._weights.forms()
        return {name: forms[name] for name in self._names}

    def get(self, name: str) -> torch.Tensor:
        return self._weights.get(name)
