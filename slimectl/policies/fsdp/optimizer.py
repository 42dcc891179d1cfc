"""The optimizer of master weights: AdamW, or Muon on whole matrices that ranks exchange."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slimectl.policies.fsdp.master_weights import MasterWeights, Shard
from slimectl.policies.muon import LocalMatrices, Muon, Orthogonalize, WholeMatrices
from slimectl.policies.optimizer import ChunkedAdamW, OptimizerOptions


def optimizer_of(
    masters: MasterWeights, options: OptimizerOptions, matrices: Collection[str], *, dtype: torch.dtype
) -> torch.optim.AdamW:
    """Return the optimizer of the trained masters. `matrices` are the names of Muon's, whose products have `dtype`.

    Weight decay skips parameters with one dimension before any sharding.
    """
    groups: dict[tuple[bool, bool], list[Tensor]] = {(True, True): [], (False, True): [], (False, False): []}
    # On every rank in the same order, large ones first, so that matrices that ranks compute at once have similar sizes.
    for name in sorted(masters.trained, key=lambda name: -masters.shapes[name].numel() if name in matrices else 0):
        groups[name in matrices, len(masters.shapes[name]) > 1].append(masters.trained[name])
    filled = [
        {"params": tensors, "weight_decay": options.weight_decay if decays else 0.0, "matrices": is_muon}
        for (is_muon, decays), tensors in groups.items()
        if tensors
    ] or [{"params": []}]
    common: dict[str, Any] = {"lr": options.lr, "betas": options.betas, "eps": options.eps}
    if options.name == "muon":
        exchange: WholeMatrices = LocalMatrices()
        if masters.mesh is not None and masters.mesh.size() > 1:
            exchange = ShardedMatrices(masters.mesh, {masters.tensors[name]: masters.shapes[name] for name in matrices})
        return Muon(filled, options, exchange=exchange, dtype=dtype, shards=masters.shards(), **common)
    if options.state_dtype != "float32":
        return ChunkedAdamW(filled, state_dtype=options.state_dtype, shards=masters.shards(), **common)
    return torch.optim.AdamW(filled, fused=True, **common)


class ShardedMatrices:
    """WholeMatrices of ranks that hold shards. Each rank orthogonalizes one of as many matrices as there are ranks.

    A stack whose experts are each on one rank is orthogonalized where it is.
    """

    def __init__(self, mesh: Any, shapes: Mapping[Tensor, torch.Size]) -> None:
        """`shapes` has the whole shapes of this rank's shards."""
        self.at_once, self._rank, self._group = mesh.size(), mesh.get_local_rank(), mesh.get_group()
        self._device, self._shapes = torch.device(mesh.device_type), shapes

    def apply(self, masters: Sequence[Tensor], updates: Sequence[Tensor], function: Orthogonalize) -> list[Tensor]:
        results = [update.to(self._device) for update in updates]
        divided = [i for i, master in enumerate(masters) if not self._holds_experts(master)]
        for i, part in enumerate(results):
            if i not in divided and part.numel():
                results[i] = function(part)
        if divided:
            parts = self._divided([self._shapes[masters[i]] for i in divided], [results[i] for i in divided], function)
            for i, part in zip(divided, parts, strict=True):
                results[i] = part
        return [part.to(master.device) for part, master in zip(results, masters, strict=True)]

    def has_tokens(self, master: Tensor, gradient: Tensor) -> Tensor:
        mask = gradient.flatten(1).any(dim=1)
        if self._holds_experts(master):
            return mask
        shared = mask.to(self._device, torch.float32)
        dist.all_reduce(shared, dist.ReduceOp.MAX, group=self._group)
        return shared.to(mask.device, torch.bool)

    def _holds_experts(self, master: Tensor) -> bool:
        """Return whether the shards of a parameter consist of whole matrices of experts."""
        shape = self._shapes[master]
        return len(shape) == 3 and self._cuts(shape)[0].dimension == 0

    def _cuts(self, shape: torch.Size) -> list[Shard]:
        return [Shard.of_rank(shape, rank, self.at_once) for rank in range(self.at_once)]

    def _divided(self, shapes: Sequence[torch.Size], parts: Sequence[Tensor], function: Orthogonalize) -> list[Tensor]:
        """Return this rank's parts of the results. Rank i computes the i-th matrix."""
        cuts, results = self._cuts(shapes[self._rank]) if self._rank < len(shapes) else [], []
        pieces = self._exchange([part.reshape(-1) for part in parts], [cut.local_shape.numel() for cut in cuts])
        if cuts:
            matrix = torch.cat(
                [p.view(cut.local_shape) for p, cut in zip(pieces, cuts, strict=True)], cuts[0].dimension
            )
            result = function(matrix)
            results = [cut.cut(result).reshape(-1) for cut in cuts]
        received = self._exchange(results, [part.numel() for part in parts])
        return [flat.view(part.shape) for flat, part in zip(received[: len(parts)], parts, strict=True)]

    def _exchange(self, sent: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Send the i-th tensor to rank i, and return as many elements of each rank as `sizes` has. Missing: none."""
        sent_sizes = [len(tensor) for tensor in sent] + [0] * (self.at_once - len(sent))
        sizes = [*sizes, *[0] * (self.at_once - len(sizes))]
        received = torch.empty(sum(sizes), device=self._device)
        packed = torch.cat([*sent, received.new_empty(0)])
        dist.all_to_all_single(received, packed, sizes, sent_sizes, group=self._group)
        return list(received.split(sizes))
