"""Every tensor of a checkpoint accounted for: used, carried along, doubled, or refused by name."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from slimectl.checkpoints.safetensors_file import Form
from slimectl.errors import CheckpointError
from slimectl.ports import Weights
from slimectl.weights.architecture import Config
from slimectl.weights.families import family_of
from slimectl.weights.fused import views
from slimectl.weights.links import Link

HEAD = "lm_head.weight"
EMBEDDING = "embedding.word_embeddings.weight"


@dataclass(frozen=True)
class Account:
    """Which tensors are what; the names of those that the model itself uses are in its links."""

    carried: tuple[str, ...]
    doubled: tuple[str, ...]


class Model:
    """What a complete configuration says about a model's tensors. Raises CheckpointError if no family knows it."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.family = family_of(config)
        self.architecture = self.family.architecture(config)
        self.links: list[Link] = self.family.links(config)

    def is_carried(self, name: str) -> bool:
        """Whether checkpoints hold this tensor although training does not use it."""
        return any(re.search(pattern, name) for pattern in self.family.carried)

    def account(self, forms: Mapping[str, Form], where: str) -> Account:
        """Refuse missing, extra and misshapen tensors, by name. A head stored beside a tied embedding is `doubled`."""
        shapes = {name: shape for link in self.links for name, shape in zip(link.hf, link.shapes, strict=True)}
        refuse_missing(shapes.keys() - forms.keys(), where)
        carried = tuple(name for name in forms if name not in shapes and self.is_carried(name))
        others = [name for name in forms if name not in shapes and name not in carried]
        doubled = tuple(name for name in others if name == HEAD)
        refuse_extra([name for name in others if name not in doubled], where, self.family.name)
        for name, shape in shapes.items():
            if forms[name][0] != shape:
                raise CheckpointError(
                    f"{where}: {name} has shape {list(forms[name][0])}, config.json asks for {list(shape)}; copy config"
                    " and weights from the same checkpoint"
                )
        return Account(carried, doubled)

    @property
    def embedding(self) -> str:
        """The name of the embedding, which a tied model's head repeats."""
        return next(link.hf[0] for link in self.links if link.megatron == EMBEDDING)


def refuse_missing(names: Collection[str], where: str) -> None:
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise CheckpointError(f"{where}: no tensor for {min(names)}{more}; copy or download the checkpoint again")


def refuse_extra(names: Collection[str], where: str, family: str) -> None:
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise CheckpointError(
            f"{where}: {min(names)}{more}: a tensor that no {family} model has; check model_type in config.json"
        )


class Apart:
    """Weights whose experts have a tensor each, also where the checkpoint keeps all of a layer's in two."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._forms = weights.forms()
        self._views = views({name: shape for name, (shape, _) in self._forms.items()})
        self._last: dict[str, torch.Tensor] = {}

    def forms(self) -> Mapping[str, Form]:
        together = {view.source for view in self._views.values()}
        kept = {name: form for name, form in self._forms.items() if name not in together}
        return kept | {name: (view.shape, self._forms[view.source][1]) for name, view in self._views.items()}

    def get(self, name: str) -> torch.Tensor:
        view = self._views.get(name)
        if view is None:
            return self._weights.get(name)
        if view.source not in self._last:
            # Experts take turns between the two tensors of their layer.
            self._last = dict([*self._last.items()][-1:])
            self._last[view.source] = self._weights.get(view.source)
        return self._last[view.source][view.index]


class Accounted:
    """The tensors of `weights` that count, in the order of the model's links, then those that are carried along.

    Raises CheckpointError for missing, extra and misshapen tensors, and for a head that differs from the embedding it
    is tied to.
    """

    def __init__(self, weights: Weights, model: Model, where: str) -> None:
        weights = Apart(weights)
        account = model.account(weights.forms(), where)
        for name in account.doubled:
            if not torch.equal(weights.get(name), weights.get(model.embedding)):
                raise CheckpointError(
                    f"{where}: {name} differs from {model.embedding}, but config.json says that they are tied; set"
                    " tie_word_embeddings to false if the model was trained so"
                )
        self.carried, self.doubled = account.carried, account.doubled
        self._weights = weights
        self._names = [*(name for link in model.links for name in link.hf), *self.carried]

    def forms(self) -> Mapping[str, Form]:
        forms = self._weights.forms()
        return {name: forms[name] for name in self._names}

    def get(self, name: str) -> torch.Tensor:
        return self._weights.get(name)
