"""Merges Hugging Face tensors into one Megatron parameter, and splits it again.

R rows · a band is a block of rows that stay together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Shape = tuple[int, ...]


class Join(Protocol):
    """Merge of Hugging Face tensors into one; exact and reversible: values are moved, none changes."""

    def whole(self, parts: Sequence[Tensor]) -> Tensor: ...

    def parts(self, merged: Tensor, shapes: Sequence[Shape]) -> tuple[Tensor, ...]: ...

    def shape(self, shapes: Sequence[Shape]) -> Shape: ...


@dataclass(frozen=True)
class Same:
    """A single tensor, unchanged."""

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        return parts[0]

    def parts(self, merged: Tensor, shapes: Sequence[Shape]) -> tuple[Tensor, ...]:
        return (merged,)

    def shape(self, shapes: Sequence[Shape]) -> Shape:
        return shapes[0]


@dataclass(frozen=True)
class Rows:
    """Tensors concatenated by rows, such as gate over up."""

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts))

    def parts(self, merged: Tensor, shapes: Sequence[Shape]) -> tuple[Tensor, ...]:
        return torch.split(merged, [shape[0] for shape in shapes])

    def shape(self, shapes: Sequence[Shape]) -> Shape:
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])


@dataclass(frozen=True)
class GroupedRows:
    """Row bands interleaved by groups: for each group its band of every tensor, in order.

    With query, key and value projections and one group per key-value head this is Megatron's fused QKV,
    [q of group 0 | k 0 | v 0 | q of group 1 | …]. Works on matrices and on biases.
    """

    groups: int

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        banded = [part.reshape(self.groups, part.shape[0] // self.groups, *part.shape[1:]) for part in parts]
        return torch.cat(banded, dim=1).flatten(0, 1)

    def parts(self, merged: Tensor, shapes: Sequence[Shape]) -> tuple[Tensor, ...]:
        bands = merged.reshape(self.groups, merged.shape[0] // self.groups, *merged.shape[1:])
        sizes = [shape[0] // self.groups for shape in shapes]
        return tuple(band.flatten(0, 1) for band in torch.split(bands, sizes, dim=1))

    def shape(self, shapes: Sequence[Shape]) -> Shape:
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])


@dataclass(frozen=True)
class GatedGroupedRows:
    """GroupedRows of query, gate, key and value, where query and gate are one tensor: [q | gate] of each head.

    `dim` is the width of a head. Megatron's fused QKV with an output gate is, for each group,
    [q of its heads | gate of its heads | k | v].
    """

    groups: int
    dim: int

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        query_and_gate, *key_and_value = parts
        pairs = query_and_gate.reshape(-1, 2, self.dim, *query_and_gate.shape[1:])
        return GroupedRows(self.groups).whole([pairs[:, 0].flatten(0, 1), pairs[:, 1].flatten(0, 1), *key_and_value])

    def parts(self, merged: Tensor, shapes: Sequence[Shape]) -> tuple[Tensor, ...]:
        query_and_gate, *kv_shapes = shapes
        half = (query_and_gate[0] // 2, *query_and_gate[1:])
        query, gate, *key_and_value = GroupedRows(self.groups).parts(merged, [half, half, *kv_shapes])
        pairs = torch.stack([part.reshape(-1, self.dim, *part.shape[1:]) for part in (query, gate)], dim=1)
        return (pairs.flatten(0, 2), *key_and_value)

    def shape(self, shapes: Sequence[Shape]) -> Shape:
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])


@dataclass(frozen=True)
class Ungrouped:
    """Tensors interleaved by groups, deinterleaved: all groups' first bands, then all second ones, and so on.

    `bands` are the rows of every band of one group, tensor by tensor. Qwen3-Next keeps [q | k | v | z] of each key
    head in one tensor and [b | a] in another; Megatron's gated delta net concatenates all q, all k, ….
    """

    groups: int
    bands: tuple[tuple[int, ...], ...]

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        bands = []
        for part, rows in zip(parts, self.bands, strict=True):
            grouped = part.reshape(self.groups, part.shape[0] // self.groups, *part.shape[1:])
            bands += [band.flatten(0, 1) for band in torch.split(grouped, list(rows), dim=1)]
        return torch.cat(bands)

    def parts(self, merged: Tensor, shapes: Sequence[Shape]) -> tuple[Tensor, ...]:
        band_iterator = iter(torch.split(merged, [self.groups * rows for bands in self.bands for rows in bands]))
        return tuple(GroupedRows(self.groups).whole([next(band_iterator) for _ in bands]) for bands in self.bands)

    def shape(self, shapes: Sequence[Shape]) -> Shape:
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])
