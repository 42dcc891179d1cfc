"""Checks a Hugging Face directory against the links of a model: no tensor missing, none extra, all shapes right."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch

from slimectl.errors import CheckpointError
from slimectl.ports import Weights
from slimectl.weights.links import Link

HEAD = "lm_head.weight"


def checked_names(weights: Weights, links: Sequence[Link], carried: Sequence[str], tie: str, path: Path) -> list[str]:
    """List the names of the model's tensors in the checkpoint's order; a head that repeats the embedding `tie` is one.

    Reads only headers, except for such a head. Raises CheckpointError.
    """
    expected = {name: shape for link in links for name, shape in zip(link.hf, link.shapes, strict=True)}
    shapes = expected if HEAD in expected else {**expected, HEAD: expected[tie]}
    names = []
    for name, (shape, _) in weights.forms().items():
        if name not in shapes:
            if any(re.search(pattern, name) for pattern in carried):
                continue
            raise CheckpointError(f"{path}: the model has no {name}; config.json and weights do not belong together")
        if tuple(shape) != shapes[name]:
            raise CheckpointError(
                f"{path}: {name} has shape {list(shape)}, config.json asks for {list(shapes[name])}; copy config and"
                " weights from the same checkpoint"
            )
        names.append(name)
    missing = sorted(expected.keys() - set(names))
    if missing:
        raise CheckpointError(f"{path}: no tensor for {missing[0]}; the checkpoint is incomplete, copy it again")
    if HEAD in names and HEAD not in expected and not torch.equal(weights.get(HEAD), weights.get(tie)):
        raise CheckpointError(
            f"{path}: {HEAD} differs from {tie}, but config.json ties them; set tie_word_embeddings to false"
        )
    return names
