"""Process groups in which a trainer broadcasts weights, made as SGLang's scheduler makes them."""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous

Form = tuple[str, torch.dtype, tuple[int, ...]]
"""Name, dtype and shape of a tensor that is to come."""


class BroadcastGroup:
    """A group beside torch's default one; the trainer is rank 0."""

    def __init__(
        self, *, host: str, port: int, rank: int, world: int, name: str, backend: str, device: str, timeout_s: float
    ) -> None:
        """Blocks until all are in, or raises when `timeout_s` have passed."""
        timeout = datetime.timedelta(seconds=timeout_s)
        address = f"[{host}]" if ":" in host else host
        store, _, _ = next(rendezvous(f"tcp://{address}:{port}", rank, world, timeout=timeout))
        store.set_timeout(timeout)
        # The prefixes have to be the sender's: the name twice, here and inside of torch.
        self._group, _ = c10d._new_process_group_helper(
            world,
            rank,
            [],
            c10d.Backend(backend),
            c10d.PrefixStore(name, store),
            group_name=c10d.GroupName(name),
            timeout=timeout,
        )
        c10d._world.pg_group_ranks[self._group] = {each: each for each in range(world)}
        self._device = torch.device(device)

    def receive(self, forms: Sequence[Form], *, flattened: bool) -> list[tuple[str, Tensor]]:
        """The next tensors that rank 0 broadcasts, one by one or as the bytes of all of them."""
        if flattened:
            sizes = [math.prod(shape) * dtype.itemsize for _, dtype, shape in forms]
            flat = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
            dist.broadcast(flat, src=0, group=self._group)
            parts = torch.split(flat, sizes)
            return [
                (name, part.view(dtype).view(shape)) for (name, dtype, shape), part in zip(forms, parts, strict=True)
            ]
        tensors = [(name, torch.empty(shape, dtype=dtype, device=self._device)) for name, dtype, shape in forms]
        for work in [dist.broadcast(tensor, src=0, group=self._group, async_op=True) for _, tensor in tensors]:
            work.wait()
        return tensors

    def close(self) -> None:
        dist.destroy_process_group(self._group)
