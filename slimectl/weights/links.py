"""One Megatron parameter, the Hugging Face tensors that hold the same numbers, and the way between them.

A block is a part of an axis that tensor parallelism cuts on its own.
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
