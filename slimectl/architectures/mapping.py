"""Merges Hugging Face tensors into one Megatron parameter, and splits it again.

R rows · a band is a block of rows that stays together · E experts · F width of an expert · H hidden width.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slimectl.errors import CheckpointError

if TYPE_CHECKING:  # the planner counts parameters with these classes, without torch
    from torch import Tensor, dtype

Shape = tuple[int, ...]


Empty = Callable[["tuple[int, ...]", "dtype"], "Tensor"]
"""Allocates memory for a merged tensor of a shape and dtype."""


def _cat(parts: Sequence[Tensor], *, dim: int = 0, empty: Empty | None = None) -> Tensor:
    import torch

    if empty is None:
        return torch.cat(list(parts), dim=dim)
    shape = list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    return torch.cat(list(parts), dim=dim, out=empty(tuple(shape), parts[0].dtype))


def _stack(parts: Sequence[Tensor], *, dim: int) -> Tensor:
    import torch

    return torch.stack(list(parts), dim=dim)


class Merge(ABC):
    """Merge of Hugging Face tensors into one, by rows. It is exact and reversible: values are moved, not changed.

    `whole` may return memory from `empty`.
    """

    @abstractmethod
    def whole(self, parts: Sequence[Tensor], empty: Empty | None = None) -> Tensor: ...

    @abstractmethod
    def parts(self, merged: Tensor, shapes: Sequence[Shape]) -> tuple[Tensor, ...]: ...

    def shape(self, shapes: Sequence[Shape]) -> Shape:
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])


@dataclass(frozen=True)
class Identity(Merge):
    """A single tensor, unchanged."""

    def whole(self, parts: Sequence[Tensor], empty: Empty | None = None) -> Tensor:
        return parts[0]

    def parts(self, merged: Tensor, shapes: Sequence[Shape]) -> tuple[Tensor, ...]:
        return (merged,)


@dataclass(frozen=True)
class ConcatRows(Merge):
    """Tensors concatenated by rows, such as gate over up."""

    def whole(self, parts: Sequence[Tensor], empty: Empty | None = None) -> Tensor:
        return _cat(parts, empty=empty)

    def parts(self, merged: Tensor, shapes: Sequence[Shape]) -> tuple[Tensor, ...]:
        split: tuple[Tensor, ...] = merged.split([shape[0] for shape in shapes])
        return split


@dataclass(frozen=True)
class InterleaveGroups(Merge):
    """Row bands interleaved by groups: for each group, its band of every tensor, in order.

    With query, key and value projections and one group per key-value head this is Megatron's fused QKV,
    [q of group 0 | k 0 | v 0 | q of group 1 | …]. Works for matrices and biases.
    """

    groups: int

    def whole(self, parts: Sequence[Tensor], empty: Empty | None = None) -> Tensor:
        banded = [part.reshape(self.groups, part.shape[0] // self.groups, *part.shape[1:]) for part in parts]
        return _cat(banded, dim=1, empty=empty).flatten(0, 1)

    def parts(self, merged: Tensor, shapes: Sequence[Shape]) -> tuple[Tensor, ...]:
        bands = merged.reshape(self.groups, merged.shape[0] // self.groups, *merged.shape[1:])
        sizes = [shape[0] // self.groups for shape in shapes]
        return tuple(band.flatten(0, 1) for band in bands.split(sizes, dim=1))


@dataclass(frozen=True)
class InterleaveGatedGroups(Merge):
    """InterleaveGroups of query, gate, key and value, if query and gate are one tensor: [q | gate] of each head.

    `dim` is the width of a head. Megatron's fused QKV with an output gate is, for each group,
    [q of its heads | gate of its heads | k | v].
    """

    groups: int
    dim: int

    def whole(self, parts: Sequence[Tensor], empty: Empty | None = None) -> Tensor:
        query_and_gate, *key_and_value = parts
        pairs = query_and_gate.reshape(-1, 2, self.dim, *query_and_gate.shape[1:])
        return InterleaveGroups(self.groups).whole(
            [pairs[:, 0].flatten(0, 1), pairs[:, 1].flatten(0, 1), *key_and_value], empty
        )

    def parts(self, merged: Tensor, shapes: Sequence[Shape]) -> tuple[Tensor, ...]:
        query_and_gate, *kv_shapes = shapes
        half = (query_and_gate[0] // 2, *query_and_gate[1:])
        query, gate, *key_and_value = InterleaveGroups(self.groups).parts(merged, [half, half, *kv_shapes])
        pairs = _stack([part.reshape(-1, self.dim, *part.shape[1:]) for part in (query, gate)], dim=1)
        return (pairs.flatten(0, 2), *key_and_value)


@dataclass(frozen=True)
class Deinterleave(Merge):
    """Tensors interleaved by groups, deinterleaved: all groups' first bands, then all second ones, and so on.

    `bands` are the rows of every band of one group, tensor by tensor. Qwen3-Next keeps [q | k | v | z] of each key
    head in one tensor and [b | a] in another. Megatron's gated delta net concatenates all q, all k, and so on.
    """

    groups: int
    bands: tuple[tuple[int, ...], ...]

    def whole(self, parts: Sequence[Tensor], empty: Empty | None = None) -> Tensor:
        bands = []
        for part, rows in zip(parts, self.bands, strict=True):
            grouped = part.reshape(self.groups, part.shape[0] // self.groups, *part.shape[1:])
            bands += [band.flatten(0, 1) for band in grouped.split(list(rows), dim=1)]
        return _cat(bands, empty=empty)

    def parts(self, merged: Tensor, shapes: Sequence[Shape]) -> tuple[Tensor, ...]:
        band_iterator = iter(merged.split([self.groups * rows for bands in self.bands for rows in bands]))
        return tuple(InterleaveGroups(self.groups).whole([next(band_iterator) for _ in bands]) for bands in self.bands)


@dataclass(frozen=True)
class Transposed(Merge):
    """A single matrix [I, O] of a product from the left, or its bias [O], for a product with [O, I].

    If `interleaved`, outputs alternate between two layers (gate and up), and become one block of each.
    """

    interleaved: bool = False

    def whole(self, parts: Sequence[Tensor], empty: Empty | None = None) -> Tensor:
        rows = parts[0].transpose(0, -1)
        if self.interleaved:
            rows = rows.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1)
        return _cat([rows], empty=empty)

    def parts(self, merged: Tensor, shapes: Sequence[Shape]) -> tuple[Tensor, ...]:
        if self.interleaved:
            merged = merged.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)
        return (merged.transpose(0, -1).contiguous(),)

    def shape(self, shapes: Sequence[Shape]) -> Shape:
        return shapes[0][::-1]


@dataclass(frozen=True)
class TensorParallelSplit:
    """Tensor-parallel split of a Megatron parameter: every block along `axis` in equal parts, one for each rank.

    `blocks` are sizes along the axis. Empty means a single block. Gate over up is two blocks, and rank r holds
    [gate r | up r].
    """

    axis: int
    blocks: tuple[int, ...] = ()

    def shard(self, full: Tensor, rank: int, ranks: int) -> Tensor:
        """Return the shard of `rank`. Raises CheckpointError if a block cannot be split evenly."""
        shards = []
        for block in full.split(list(self.blocks) or [full.shape[self.axis]], dim=self.axis):
            if block.shape[self.axis] % ranks:
                raise CheckpointError(
                    f"{block.shape[self.axis]} rows or columns cannot be split into {ranks} equal parts"
                )
            shards.append(block.chunk(ranks, dim=self.axis)[rank])
        return shards[0] if len(shards) == 1 else _cat(shards, dim=self.axis)

    def joined(self, shards: Sequence[Tensor]) -> Tensor:
        """Concatenate the shards of all ranks, in rank order, to the full parameter."""
        sizes = [size // len(shards) for size in self.blocks] or [shards[0].shape[self.axis]]
        blocks_by_rank = [shard.split(sizes, dim=self.axis) for shard in shards]
        return _cat([parts[i] for i in range(len(sizes)) for parts in blocks_by_rank], dim=self.axis)


@dataclass(frozen=True)
class ParamMapping:
    """A full Megatron parameter and its Hugging Face tensors.

    `megatron` is the parameter's name in mcore's GPTModel in one process without parallelism, so layers and experts are
    counted over the whole model. With `split` None it is replicated on every tensor-parallel rank. If `padded`, its
    rows are padded to a multiple of the tensor-parallel size (embedding and output layer).

    >>> split = TensorParallelSplit(0, (2, 2))
    >>> link = ParamMapping("mlp.linear_fc1.weight", ("gate", "up"), ((2, 3), (2, 3)), ConcatRows(), split)
    >>> link.shape
    (4, 3)
    """

    megatron: str
    hf: tuple[str, ...]
    shapes: tuple[Shape, ...]
    join: Merge = field(default_factory=Identity)
    split: TensorParallelSplit | None = None
    padded: bool = False

    @property
    def shape(self) -> Shape:
        return self.join.shape(self.shapes)

    @property
    def expert(self) -> int | None:
        """Return the index of the routed expert (split by expert tensor parallelism), or None for other parameters."""
        if ".local_experts." not in self.megatron:
            return None
        match = re.search(r"\.local_experts\.(\d+)\.", self.megatron)
        return int(match[1]) if match else None

    @property
    def buffer(self) -> bool:
        """Return whether it is state without gradients, such as the expert bias of a router."""
        return self.megatron.endswith(".router.expert_bias")

    @property
    def frozen(self) -> bool:
        """Return whether it gets no gradient in any model, such as the weights of an indexer."""
        return ".indexer." in self.megatron

    def to_megatron(self, tensors: Sequence[Tensor], empty: Empty | None = None) -> Tensor:
        """Merge tensors to the Megatron parameter, in memory from `empty` if it is given.

        Raises CheckpointError for a tensor of another shape.
        """
        for name, tensor, shape in zip(self.hf, tensors, self.shapes, strict=True):
            if tuple(tensor.shape) != shape:
                raise CheckpointError(
                    f"{name} has shape {list(tensor.shape)}, but {list(shape)} is expected from config.json. Copy "
                    "config and weights from the same checkpoint."
                )
        return self.join.whole(tensors, empty)

    def to_hf(self, full: Tensor) -> tuple[tuple[str, Tensor], ...]:
        """Split to (Hugging Face name, tensor) pairs without padding rows. Raises CheckpointError for a wrong shape."""
        if self.padded and full.shape[0] > self.shape[0]:
            full = full[: self.shape[0]]
        if tuple(full.shape) != self.shape:
            raise CheckpointError(
                f"{self.megatron} has shape {list(full.shape)}, expected {list(self.shape)}. The checkpoint belongs"
                " to another model."
            )
        return tuple(zip(self.hf, self.join.parts(full, self.shapes), strict=True))


_FUSED = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)")
_STACK = re.compile(r".+\.experts\.(gate_up_proj|down_proj)(_bias)?")
_PART = re.compile(rf"({_STACK.pattern})\.(\d+)")


@dataclass(frozen=True)
class TensorView:
    """A part of the tensor `source`: `tensor[view.index]` has `shape`."""

    source: str
    index: tuple[int, slice]
    shape: Shape


def views(shapes: Mapping[str, Shape]) -> dict[str, TensorView]:
    """Return views of each expert's matrices in the fused tensors of a checkpoint. Empty if it has none.

    `….experts.gate_up_proj` is [E, 2F, H], gate over up. `….experts.down_proj` is [E, H, F]. The views are named
    `….experts.0.gate_proj.weight` and so on. Raises CheckpointError for a tensor of another shape.
    """
    result: dict[str, TensorView] = {}
    for name, shape in shapes.items():
        match = _FUSED.fullmatch(name)
        if not match:
            continue
        if len(shape) != 3 or (match[2] == "gate_up_proj" and shape[1] % 2):
            raise CheckpointError(
                f"{name} has shape {list(shape)}, expected experts x rows x columns. Convert it again."
            )
        for expert in range(shape[0]):
            result |= dict(_parts(name, match[1], match[2], expert, shape))
    return result


def stack_views(shapes: Mapping[str, Shape]) -> dict[str, TensorView]:
    """Return views of each expert's parts of the tensors that hold all experts of a layer: `….experts.down_proj.0`.

    For families whose checkpoints have these tensors, in forms of their own (gpt-oss).
    """
    sources = [(name, shape) for name, shape in shapes.items() if _STACK.fullmatch(name) and shape]
    return {
        f"{name}.{e}": TensorView(name, (e, slice(None)), shape[1:]) for name, shape in sources for e in range(shape[0])
    }


def stacked_shapes(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the shapes of published tensors, where `shapes` may have parts of `stack_views`, in order.

    >>> stacked_shapes({"a.experts.down_proj.0": (4, 2), "a.experts.down_proj.1": (4, 2), "b": (3,)})
    {'a.experts.down_proj': (2, 4, 2), 'b': (3,)}
    """
    counts: dict[str, int] = {}
    result: dict[str, Shape] = {}
    for name, shape in shapes.items():
        part = _PART.fullmatch(name)
        source = part[1] if part else name
        counts[source] = counts.get(source, 0) + 1
        result[source] = (counts[source], *shape) if part else shape
    return result


def published_shapes(links: Iterable[ParamMapping]) -> dict[str, Shape]:
    """Return the shapes of all tensors of the links, by their names in published checkpoints."""
    return stacked_shapes({name: shape for link in links for name, shape in zip(link.hf, link.shapes, strict=True)})


def stacked(tensors: Iterable[tuple[str, Tensor]], shapes: Mapping[str, Shape]) -> Iterator[tuple[str, Tensor]]:
    """Stream published tensors, each after its last part. `shapes` are those of `stacked_shapes`."""
    incomplete: dict[str, Tensor] = {}
    for name, tensor in tensors:
        part = _PART.fullmatch(name)
        if part is None:
            yield name, tensor
            continue
        source, e = part[1], int(part[4])
        if source not in incomplete:
            incomplete[source] = tensor.new_empty(shapes[source])
        incomplete[source][e] = tensor
        if e == shapes[source][0] - 1:
            yield source, incomplete.pop(source)


def _parts(source: str, prefix: str, kind: str, expert: int, shape: Shape) -> Iterable[tuple[str, TensorView]]:
    _, rows, columns = shape
    names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
    share = rows // len(names)
    for i, name in enumerate(names):
        rows_of_part = slice(i * share, (i + 1) * share)
        yield f"{prefix}.{expert}.{name}.weight", TensorView(source, (expert, rows_of_part), (share, columns))
