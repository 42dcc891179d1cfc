"""Maps one Megatron parameter to the Hugging Face tensors with the same values, and back.

A block is a part of an axis that tensor parallelism splits separately.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slimectl.errors import CheckpointError
from slimectl.weights.joins import Join, Same, Shape


@dataclass(frozen=True)
class Split:
    """Tensor-parallel split of a Megatron parameter: every block of `axis` in equal parts, one for each rank.

    `blocks` are sizes along the axis; empty means a single block. Gate over up is two blocks: rank r holds
    [gate r | up r].
    """

    axis: int
    blocks: tuple[int, ...] = ()

    def shard(self, full: Tensor, rank: int, ranks: int) -> Tensor:
        """Return the shard of `rank`. Raises CheckpointError if a block cannot be split evenly."""
        shards = []
        for block in torch.split(full, list(self.blocks) or [full.shape[self.axis]], dim=self.axis):
            if block.shape[self.axis] % ranks:
                raise CheckpointError(f"{block.shape[self.axis]} rows or columns cannot be cut in {ranks} equal parts")
            shards.append(block.chunk(ranks, dim=self.axis)[rank])
        return shards[0] if len(shards) == 1 else torch.cat(shards, dim=self.axis)

    def joined(self, shards: Sequence[Tensor]) -> Tensor:
        """Concatenate the shards of all ranks, in order of rank, to the full parameter."""
        sizes = [size // len(shards) for size in self.blocks] or [shards[0].shape[self.axis]]
        blocks_by_rank = [torch.split(shard, sizes, dim=self.axis) for shard in shards]
        return torch.cat([parts[i] for i in range(len(sizes)) for parts in blocks_by_rank], dim=self.axis)


@dataclass(frozen=True)
class Link:
    """A full Megatron parameter and its Hugging Face tensors.

    `megatron` is the parameter's name in mcore's GPTModel in one process without parallelism: layers and experts are
    counted over the whole model. `split` None: replicated on every tensor-parallel rank. `padded`: its
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
        """Index of the routed expert (split by expert tensor parallelism); None for other parameters."""
        match = re.search(r"\.local_experts\.(\d+)\.", self.megatron)
        return int(match[1]) if match else None

    @property
    def buffer(self) -> bool:
        """Whether it is state without gradients: the expert bias of a router."""
        return self.megatron.endswith(".router.expert_bias")

    def to_megatron(self, tensors: Sequence[Tensor]) -> Tensor:
        """Merge tensors to the Megatron parameter. Raises CheckpointError for a tensor of another shape."""
        for name, tensor, shape in zip(self.hf, tensors, self.shapes, strict=True):
            if tuple(tensor.shape) != shape:
                raise CheckpointError(
                    f"{name} has shape {list(tensor.shape)}, config.json asks for {list(shape)}; copy config and"
                    " weights from the same checkpoint"
                )
        return self.join.whole(tensors)

    def to_hf(self, full: Tensor) -> tuple[tuple[str, Tensor], ...]:
        """Split to (Hugging Face name, tensor) pairs without padding rows. Raises CheckpointError for a wrong shape."""
        if self.padded and full.shape[0] > self.shape[0]:
            full = full[: self.shape[0]]
        if tuple(full.shape) != self.shape:
            raise CheckpointError(
                f"{self.megatron} has shape {list(full.shape)}, expected {list(self.shape)}; the checkpoint was made"
                " for another model"
            )
        return tuple(zip(self.hf, self.join.parts(full, self.shapes), strict=True))
