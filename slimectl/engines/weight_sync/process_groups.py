"""Process groups of torch.distributed beside its default one, between a trainer and its engines."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from slimectl.system.listening import bound


def host_store(host: str, timeout: timedelta) -> dist.TCPStore:
    """Return a store that listens only on `host`. By default, torch (2.13) listens on every address of the machine."""
    listener = bound(host, 0)
    port = listener.getsockname()[1]
    # Only the libuv backend accepts a descriptor. The store closes it.
    return dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=timeout, use_libuv=True,
        master_listen_fd=listener.detach(),
    )  # fmt: skip


def join(kind: str, store: dist.Store, rank: int, world: int, *, name: str, timeout: timedelta, address: str) -> Any:
    """Join a group, "nccl" or gloo, as init_custom_process_group of SGLang 0.5.18 to 0.5.21 does.

    It returns when all ranks have joined. Every key is prefixed with the group's name twice and the kind of device, as
    in torch's own groups since 2.0. gloo listens at `address`, because by default it looks up the machine's own name,
    which containers often cannot resolve.
    """
    store = dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store))
    if kind == "nccl":
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        return dist.ProcessGroupNCCL(dist.PrefixStore("cuda/", store), rank, world, nccl)
    gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._timeout = timeout
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    return dist.ProcessGroupGloo(dist.PrefixStore("cpu/", store), rank, world, gloo)


def start_broadcast(group: Any, tensor: Tensor, timeout: timedelta) -> Any:
    """Start to broadcast a tensor from rank 0, and return the work to wait for."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    options.timeout = timeout
    return group.broadcast([tensor], options)
