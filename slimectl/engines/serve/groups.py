"""Process groups for weight broadcasts of a trainer, compatible with those of SGLang's scheduler."""

from __future__ import annotations

import datetime
import math
import socket
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Form = tuple[str, torch.dtype, tuple[int, ...]]
"""Name, dtype and shape of a tensor to receive."""


class BroadcastGroup:
    """Group beside torch's default one; the trainer is rank 0 and hosts the store."""

    def __init__(
        self, *, host: str, port: int, rank: int, world: int, name: str, backend: str, device: str, timeout_s: float
    ) -> None:
        """Block until all ranks have joined, or raise after `timeout_s` seconds."""
        timeout = datetime.timedelta(seconds=timeout_s)
        self._store = dist.TCPStore(host, port, world, is_master=False, timeout=timeout)
        # The prefixes have to be the sender's: the group's name twice, then the kind of device.
        store = dist.PrefixStore(f"{name}/", dist.PrefixStore(name, self._store))
        self._group = _backend(backend, store, rank, world, timeout, address=_address_towards(host))
        self._device, self._timeout = torch.device(device), timeout

    def receive(self, forms: Sequence[Form], *, flattened: bool) -> list[tuple[str, Tensor]]:
        """Receive the next tensors that rank 0 broadcasts, one by one or as the bytes of all of them."""
        if flattened:
            sizes = [math.prod(shape) * dtype.itemsize for _, dtype, shape in forms]
            flat = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
            self._broadcast(flat).wait()
            parts = torch.split(flat, sizes)
            return [
                (name, part.view(dtype).view(shape)) for (name, dtype, shape), part in zip(forms, parts, strict=True)
            ]
        tensors = [(name, torch.empty(shape, dtype=dtype, device=self._device)) for name, dtype, shape in forms]
        for work in [self._broadcast(tensor) for _, tensor in tensors]:
            work.wait()
        return tensors

    def close(self) -> None:
        """Leave the group; its connections end with it."""
        del self._group, self._store

    def _broadcast(self, tensor: Tensor) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = self._timeout
        return self._group.broadcast([tensor], options)


def _backend(kind: str, store: dist.Store, rank: int, world: int, timeout: datetime.timedelta, *, address: str) -> Any:
    if kind == "nccl":
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        return dist.ProcessGroupNCCL(dist.PrefixStore("cuda/", store), rank, world, nccl)
    gloo = dist.ProcessGroupGloo._Options()
    gloo._timeout = timeout
    # By itself gloo listens at whatever address the machine's own name resolves to.
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    return dist.ProcessGroupGloo(dist.PrefixStore("cpu/", store), rank, world, gloo)


def _address_towards(host: str) -> str:
    """Return the address of this machine from which `host` is reached."""
    family, kind, protocol, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    # Connecting a datagram socket sends nothing, but picks the route.
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(place)
        return str(probe.getsockname()[0])
