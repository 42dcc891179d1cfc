"""Shared parts of vision towers: rotary embedding of patches, attention within frames, and the tower's outputs.

P patches of images · C cells of merge by merge patches (one token each) · W values of a patch · H heads · D head
dimension · O width of the decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from slimectl.architectures.image_tokens import Grid
from slimectl.engines.embedded.linear import Linear

THETA = 10000.0
"""Base of the rotary embedding. It is not in config.json."""

NewTensor = Callable[..., Tensor]
NewLinear = Callable[..., Linear]


class Features(NamedTuple):
    """Outputs of a tower: embeddings [C, O], and features to add after each of the first decoder layers."""

    embeddings_CO: Tensor
    deepstack: tuple[Tensor, ...] = ()
    """One tensor [C, O] per layer (DeepStack, Meng et al. 2024, arXiv:2406.04334)."""

    def rows(self, cells: Tensor) -> Features:
        """Return the features of some cells."""
        return Features(self.embeddings_CO[cells], tuple(layer_CO[cells] for layer_CO in self.deepstack))


class VisionTower(Protocol):
    """Storage of the tower's weights and its forward pass."""

    def embed(self, pixels_PW: Tensor, grids: Sequence[Grid]) -> Features:
        """Return the features of every cell of all images, image by image, row by row."""
        ...


def patch_places(grids: Sequence[Grid], *, merge: int) -> list[np.ndarray]:
    """Return row and column [P, 2] of the patches of each image, cell by cell.

    >>> patch_places([(1, 2, 4)], merge=2)[0].tolist()
    [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3], [1, 2], [1, 3]]
    """
    places = []
    for frames, height, width in grids:
        image = np.indices((height, width)).transpose(1, 2, 0)
        cells = image.reshape(height // merge, merge, width // merge, merge, 2).transpose(0, 2, 1, 3, 4)
        places.append(np.tile(cells.reshape(-1, 2), (frames, 1)))
    return places


def rotary_angles(grids: Sequence[Grid], *, merge: int, head: int) -> np.ndarray:
    """Return rotary angles [P, head / 2] of patches, cell by cell: first for the row, then for the column."""
    inverse = (1.0 / THETA ** (np.arange(0, head // 2, 2, dtype=np.float32) / np.float32(head // 2))).astype(np.float32)
    places = np.concatenate(patch_places(grids, merge=merge))
    angles: np.ndarray = places[:, :, None].astype(np.float32) * inverse
    return angles.reshape(len(angles), -1)


def rotated(states_PHD: Tensor, cos_P1D: Tensor, sin_P1D: Tensor) -> Tensor:
    """Rotate the heads of queries or keys, in float32."""
    first, second = states_PHD.float().chunk(2, -1)
    return (states_PHD.float() * cos_P1D + torch.cat((-second, first), -1) * sin_P1D).to(states_PHD.dtype)


def attend(query_PHD: Tensor, key_PHD: Tensor, value_PHD: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return attention [P, H, D] within consecutive segments. Adjacent segments of equal length take one call."""
    outputs, start, index = [], 0, 0
    while index < len(lengths):
        count = 1
        while index + count < len(lengths) and lengths[index + count] == lengths[index]:
            count += 1
        end = start + count * lengths[index]
        query, key, value = (
            states[start:end].view(count, lengths[index], *states.shape[1:]).transpose(1, 2)
            for states in (query_PHD, key_PHD, value_PHD.contiguous())
        )
        outputs.append(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(0, 1))
        start, index = end, index + count
    return torch.cat(outputs)
