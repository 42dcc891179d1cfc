"""How Hugging Face tensors become one Megatron parameter, and are taken out of it again.

R rows · a band is rows that stay together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Shape = tuple[int, ...]


class Join(Protocol):
    """How the Hugging Face tensors become one; exact and reversible: numbers move, none changes."""

    def whole(self, parts: Sequence[Tensor]) -> Tensor: ...

    def parts(self, whole: Tensor, shapes: Sequence[Shape]) -> tuple[Tensor, ...]: ...

    def shape(self, shapes: Sequence[Shape]) -> Shape: ...


@dataclass(frozen=True)
class Same:
    """One tensor, as it is."""

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        return parts[0]

    def parts(self, whole: Tensor, shapes: Sequence[Shape]) -> tuple[Tensor, ...]:
        return (whole,)

    def shape(self, shapes: Sequence[Shape]) -> Shape:
        return shapes[0]


@dataclass(frozen=True)
class Rows:
    """Tensors below each other, such as gate over up."""

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts))

    def parts(self, whole: Tensor, shapes: Sequence[Shape]) -> tuple[Tensor, ...]:
        return torch.split(whole, [shape[0] for shape in shapes])

    def shape(self, shapes: Sequence[Shape]) -> Shape:
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])


@dataclass(frozen=True)
class GroupedRows:
    """Row bands dealt out to groups: for each group its band of every tensor, in order.

    With query, key and value projections and one group per key-value head this is Megatron's fused QKV,
    [q of group 0 | k 0 | v 0 | q of group 1 | …]. Works on matrices and on biases.
    """

    groups: int

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        banded = [part.reshape(self.groups, part.shape[0] // self.groups, *part.shape[1:]) for part in parts]
        return torch.cat(banded, dim=1).flatten(0, 1)

    def parts(self, whole: Tensor, shapes: Sequence[Shape]) -> tuple[Tensor, ...]:
        bands = whole.reshape(self.groups, whole.shape[0] // self.groups, *whole.shape[1:])
        sizes = [shape[0] // self.groups for shape in shapes]
        return tuple(band.flatten(0, 1) for band in torch.split(bands, sizes, dim=1))

    def shape(self, shapes: Sequence[Shape]) -> Shape:
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])


@dataclass(frozen=True)
class GatedGroupedRows:
    """GroupedRows of query, gate, key and value, where query and gate come as one tensor: [q | gate] of each head.

    `dim` is the width of a head. Megatron's fused QKV with an output gate is, for each group,
    [q of its heads | gate of its heads | k | v].
    """

    groups: int
    dim: int

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        both, *others = parts
        pairs = both.reshape(-1, 2, self.dim, *both.shape[1:])
        return GroupedRows(self.groups).whole([pairs[:, 0].flatten(0, 1), pairs[:, 1].flatten(0, 1), *others])

    def parts(self, whole: Tensor, shapes: Sequence[Shape]) -> tuple[Tensor, ...]:
        both, *others = shapes
        half = (both[0] // 2, *both[1:])
        query, gate, *rest = GroupedRows(self.groups).parts(whole, [half, half, *others])
        pairs = torch.stack([part.reshape(-1, self.dim, *part.shape[1:]) for part in (query, gate)], dim=1)
        return (pairs.flatten(0, 2), *rest)

    def shape(self, shapes: Sequence[Shape]) -> Shape:
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])


@dataclass(frozen=True)
class Ungrouped:
    """Tensors dealt out to groups, each undone: all groups' first bands, then all second ones, and so on.

    `bands` are the rows of every band of one group, tensor by tensor. Qwen3-Next keeps [q | k | v | z] of each key
    head in one tensor and [b | a] in another; Megatron's gated delta net has all q, all k, … below each other.
    """

    groups: int
    bands: tuple[tuple[int, ...], ...]

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        cut = []
        for part, rows in zip(parts, self.bands, strict=True):
            dealt = part.reshape(self.groups, part.shape[0] // self.groups, *part.shape[1:])
            cut += [band.flatten(0, 1) for band in torch.split(dealt, list(rows), dim=1)]
        return torch.cat(cut)

    def parts(self, whole: Tensor, shapes: Sequence[Shape]) -> tuple[Tensor, ...]:
        cut = iter(torch.split(whole, [self.groups * rows for bands in self.bands for rows in bands]))
        return tuple(GroupedRows(self.groups).whole([next(cut) for _ in bands]) for bands in self.bands)

    def shape(self, shapes: Sequence[Shape]) -> Shape:
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])
