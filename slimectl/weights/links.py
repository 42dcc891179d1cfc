"""One Megatron parameter, the Hugging Face tensors that hold the same numbers, and the way between them.

H hidden · D head · R rows · a block is a part of an axis that tensor parallelism cuts on its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from slimectl.errors import CheckpointError

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


@dataclass(frozen=True)
class Split:
    """How tensor parallelism cuts a Megatron parameter: every block of `axis` in equal parts, one for each rank.

    `blocks` are sizes along the axis; empty stands for a single block. Gate over up is two blocks: rank r holds
    [gate r | up r].
    """

    axis: int
    blocks: tuple[int, ...] = ()

    def shard(self, whole: Tensor, rank: int, ranks: int) -> Tensor:
        """Rank `rank`'s part. Raises CheckpointError if a block cannot be cut evenly."""
        cut = []
        for block in torch.split(whole, list(self.blocks) or [whole.shape[self.axis]], dim=self.axis):
            if block.shape[self.axis] % ranks:
                raise CheckpointError(f"{block.shape[self.axis]} rows or columns cannot be cut in {ranks} equal parts")
            cut.append(block.chunk(ranks, dim=self.axis)[rank])
        return cut[0] if len(cut) == 1 else torch.cat(cut, dim=self.axis)

    def joined(self, shards: Sequence[Tensor]) -> Tensor:
        """The whole of all ranks' parts, in order of rank."""
        sizes = [size // len(shards) for size in self.blocks] or [shards[0].shape[self.axis]]
        cut = [torch.split(shard, sizes, dim=self.axis) for shard in shards]
        return torch.cat([parts[i] for i in range(len(sizes)) for parts in cut], dim=self.axis)


@dataclass(frozen=True)
class Link:
    """A whole Megatron parameter and its Hugging Face tensors.

    `megatron` is the parameter's name in mcore's GPTModel as one process without parallelism would see it: layers and
    experts are counted over the whole model. `split` None: every tensor-parallel rank holds all of it. `padded`: its
    rows are padded to a multiple of the tensor-parallel size (embedding and output layer).

    >>> link = Link("mlp.linear_fc1.weight", ("gate", "up"), ((2, 3), (2, 3)), Rows(), Split(0, (2, 2)))
    >>> link.shape
    (4, 3)
    """

    megatron: str
    hf: tuple[str, ...]
    shapes: tuple[Shape, ...]
    join: Join = field(default_factory=Same)
    split: Split | None = None
    padded: bool = False

    @property
    def shape(self) -> Shape:
        return self.join.shape(self.shapes)

    @property
    def expert(self) -> int | None:
        """Which routed expert it belongs to; those are cut by expert tensor parallelism. None: every rank's part."""
        found = re.search(r"\.local_experts\.(\d+)\.", self.megatron)
        return int(found[1]) if found else None

    @property
    def buffer(self) -> bool:
        """Whether it is state that gradients do not move: the bias of a router's choice."""
        return self.megatron.endswith(".router.expert_bias")

    def to_megatron(self, tensors: Sequence[Tensor]) -> Tensor:
        """The Megatron parameter. Raises CheckpointError for a tensor of another shape."""
        for name, tensor, shape in zip(self.hf, tensors, self.shapes, strict=True):
            if tuple(tensor.shape) != shape:
                raise CheckpointError(
                    f"{name} has shape {list(tensor.shape)}, config.json asks for {list(shape)}; copy config and"
                    " weights from the same checkpoint"
                )
        return self.join.whole(tensors)

    def to_hf(self, whole: Tensor) -> tuple[tuple[str, Tensor], ...]:
        """(Hugging Face name, tensor) for each; padding rows are cut off. Raises CheckpointError for a wrong shape."""
        if self.padded and whole.shape[0] > self.shape[0]:
            whole = whole[: self.shape[0]]
        if tuple(whole.shape) != self.shape:
            raise CheckpointError(
                f"{self.megatron} has shape {list(whole.shape)}, expected {list(self.shape)}; the checkpoint was made"
                " for another model"
            )
        return tuple(zip(self.hf, self.join.parts(whole, self.shapes), strict=True))
