"""Routes that replace the weights: from disk, from shared memory, or by broadcast from a trainer."""

from __future__ import annotations

import datetime
import math
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from aiohttp import web
from torch import Tensor

from slimectl.chats.requests import RequestBody
from slimectl.data.hashing import tensor_checksum
from slimectl.engines.embedded.weights import FileTensor
from slimectl.engines.server.adapters import AdapterUpdate, announced
from slimectl.engines.server.engine_thread import run_in_daemon_thread
from slimectl.engines.server.errors import RequestError, line
from slimectl.engines.server.schema import read
from slimectl.engines.server.state import SERVICE, Service
from slimectl.engines.weight_sync.process_groups import join, start_broadcast
from slimectl.errors import CheckpointError, MissingExtraError
from slimectl.system.listening import address_towards
from slimectl.system.stdio import logger

Form = tuple[str, torch.dtype, tuple[int, ...]]
"""Name, dtype and shape of a tensor to receive."""


class BroadcastGroup:
    """A process group separate from torch's default one, compatible with SGLang.

    The trainer is rank 0 and hosts the store.
    """

    def __init__(
        self, address: tuple[str, int], rank: int, world: int, *, name: str, backend: str, device: str
    ) -> None:
        """Block until all ranks have joined the store at `address`, or raise after TIMEOUT_S."""
        timeout = datetime.timedelta(seconds=TIMEOUT_S)
        self._store = dist.TCPStore(*address, world, is_master=False, timeout=timeout)
        own_address = address_towards(address[0])
        self._group = join(backend, self._store, rank, world, name=name, timeout=timeout, address=own_address)
        self._device, self._timeout = torch.device(device), timeout

    def receive(self, forms: Sequence[Form], *, flattened: bool) -> list[tuple[str, Tensor]]:
        """Receive the next tensors that rank 0 broadcasts, one by one or `flattened` into one buffer of bytes."""
        if flattened:
            sizes = [math.prod(shape) * dtype.itemsize for _, dtype, shape in forms]
            flat = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
            start_broadcast(self._group, flat, self._timeout).wait()
            parts = torch.split(flat, sizes)
            return [
                (name, part.view(dtype).view(shape)) for (name, dtype, shape), part in zip(forms, parts, strict=True)
            ]
        tensors = [(name, torch.empty(shape, dtype=dtype, device=self._device)) for name, dtype, shape in forms]
        for work in [start_broadcast(self._group, tensor, self._timeout) for _, tensor in tensors]:
            work.wait()
        return tensors

    def close(self) -> None:
        """Leave the group and close its connections."""
        del self._group, self._store


FOLDER = Path("/dev/shm")
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool,
    )
}  # fmt: skip
MOST_ELEMENTS = 2**40
MOST_DIMENSIONS = 8


def dtype_of(fields: RequestBody, name: str, value: Any) -> torch.dtype:
    dtype = DTYPES.get(value.removeprefix("torch.")) if isinstance(value, str) else None
    if dtype is None:
        raise fields.refuse(name, f"has a dtype that is not one of {', '.join(DTYPES)}")
    return dtype


def shape_of(fields: RequestBody, name: str, value: Any) -> tuple[int, ...]:
    sizes = fields.tokens(name, value)
    if len(sizes) > MOST_DIMENSIONS or not all(0 <= size < MOST_ELEMENTS for size in sizes):
        raise fields.refuse(name, "has an invalid shape")
    if math.prod(sizes) >= MOST_ELEMENTS:
        raise fields.refuse(name, f"has a shape with {math.prod(sizes):.0e} elements")
    return tuple(sizes)


@contextmanager
def shared_tensors(fields: RequestBody) -> Iterator[list[tuple[str, FileTensor]]]:
    """Open the tensors of {"name": block, "tensors": [[name, dtype, shape, offset], …]}, without reading them.

    Raises MessageError for a block that does not exist or is too small.
    """
    block = fields.needed("name").removeprefix("/")
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}", block):
        raise fields.refuse("name", "is not the name of a block of shared memory")
    rows = fields.raw("tensors")
    if not isinstance(rows, list) or not all(isinstance(row, list) and len(row) == 4 for row in rows):
        raise fields.refuse("tensors", "is not a list of [name, dtype, shape, offset]")
    try:
        # Any user may create a symbolic link here, or a pipe, which would block on opening.
        descriptor = os.open(FOLDER / block, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise fields.refuse("name", f"{FOLDER / block}: {error.strerror}. Is the sender on this machine?") from None
    with open(descriptor, "rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise fields.refuse("name", f"{FOLDER / block} is not a block of shared memory")
        yield [_file_tensor(fields, row, file, status.st_size) for row in rows]


def _file_tensor(fields: RequestBody, row: list[Any], file: FileIO, size: int) -> tuple[str, FileTensor]:
    """Return a tensor's name and location after checking that it lies within a block of `size` bytes."""
    name, dtype, shape = row[0], dtype_of(fields, "tensors", row[1]), shape_of(fields, "tensors", row[2])
    if not isinstance(name, str):
        raise fields.refuse("tensors", "has a name that is not a string")
    (offset,) = fields.tokens("tensors", [row[3]])
    if not 0 <= offset <= size - math.prod(shape) * dtype.itemsize or offset % dtype.itemsize:
        raise fields.refuse("tensors", f"{name[:200]} does not lie within the block of {size} bytes")
    return name, FileTensor(file, offset, dtype, shape)


GROUP = "weight_update_group"
TIMEOUT_S = 600.0
"""Seconds to wait until all ranks have joined a group."""
LONGEST_VERSION = 200
LONGEST_PATH = 4096
ADDRESS = re.compile(r"[A-Za-z0-9_.:-]{1,253}")


async def update_from_disk(request: web.Request) -> web.Response:
    """Load a Hugging Face directory, or only the changes in `delta` if it fits the engine's weights."""
    service, fields = request.app[SERVICE], await read(request)
    folder, version = Path(fields.needed("model_path")), _version(fields)
    delta = fields.text("delta", longest=LONGEST_PATH)
    if not folder.is_dir():
        raise fields.refuse("model_path", f"{str(folder)[:200]} is not a directory on this machine")
    engine = service.thread.engine

    def load() -> None:
        service.merged = None
        if version is None or delta is None or not _apply_delta(service, Path(delta), version):
            engine.load_weights(service.served.read(folder), version=version or engine.weight_version)

    await _load(service, fields, load)
    return _done("Succeeded to update model weights.", num_paused_requests=0)


def _apply_delta(service: Service, delta: Path, version: str) -> bool:
    """Update the engine's weights to `version` with a delta. Return False if it does not fit or cannot be read."""
    if service.served.read_delta is None:
        return False
    try:
        service.thread.engine.apply_delta(service.served.read_delta(delta), version=version)
    except (CheckpointError, MissingExtraError) as error:
        logger.info(f"cannot apply {delta}, loading all weights instead: {error}")
        return False
    return True


async def update_from_tensor(request: web.Request) -> web.Response:
    """Load tensors from shared memory. With the field `adapter`, they are a complete adapter."""
    service, fields = request.app[SERVICE], await read(request)
    if "serialized_named_tensors" in fields or fields.text("load_format") != "shared_memory":
        raise RequestError(
            "serialized_named_tensors: pickles are not supported, because reading one runs the code in it. "
            'Send load_format "shared_memory" with name and tensors (docs/reference/weight-updates.md)'
        )
    version = _version(fields)
    alone = await _announced(service, fields)
    with shared_tensors(fields) as tensors:
        await _update(service, fields, tensors, version, alone)
    return _done("Success")


async def update_from_distributed(request: web.Request) -> web.Response:
    """Load tensors broadcast by the trainer. Receives before checking them, so that the trainer does not block."""
    service, fields = request.app[SERVICE], await read(request)
    group = service.groups.get(fields.text("group_name", GROUP) or GROUP)
    if group is None:
        raise fields.refuse("group_name", "no such group. Call init_weights_update_group first.")
    columns = [fields.raw(name) for name in ("names", "dtypes", "shapes")]
    if not all(isinstance(column, list) and len(column) == len(columns[0]) for column in columns):
        raise fields.refuse("names", "names, dtypes and shapes must be lists of equal length")
    names = fields.texts("names", max_count=len(columns[0]))
    dtypes = [dtype_of(fields, "dtypes", value) for value in columns[1]]
    shapes = [shape_of(fields, "shapes", value) for value in columns[2]]
    forms, version = list(zip(names, dtypes, shapes, strict=True)), _version(fields)
    flattened = fields.choice("load_format", "auto", ("auto", "flattened_bucket")) == "flattened_bucket"
    try:
        tensors = await run_in_daemon_thread(partial(group.receive, forms, flattened=flattened))
    except (RuntimeError, ValueError) as error:  # errors of gloo and nccl: the trainer is gone or sent other tensors
        raise RequestError(f"the broadcast failed. Is the trainer still running? {line(error)}") from None
    await _update(service, fields, tensors, version)
    return _done("Succeeded to update parameter online.")


async def init_group(request: web.Request) -> web.Response:
    """Join a trainer's process group."""
    service, fields = request.app[SERVICE], await read(request)
    name = fields.text("group_name", GROUP, longest=200) or GROUP
    if name in service.groups:
        raise fields.refuse("group_name", f"{name!a} already exists. Destroy it first.")
    world = fields.whole("world_size", 0, low=2, high=65536)
    host = fields.needed("master_address")
    if not ADDRESS.fullmatch(host):
        raise fields.refuse("master_address", f"{host[:100]!a} is not a host name or address")
    join = partial(
        BroadcastGroup,
        (host, fields.whole("master_port", 0, low=1, high=65535)),
        fields.whole("rank_offset", 1, low=1, high=max(1, world - 1)),
        world,
        name=name,
        backend=fields.choice("backend", "gloo", ("gloo", "nccl")),
        device=service.thread.engine.device,
    )
    if not world or "master_port" not in fields:
        raise RequestError("world_size, master_port: both are required")
    service.groups[name] = None  # reserved while waiting for the other ranks
    try:
        service.groups[name] = await run_in_daemon_thread(join)
    except (RuntimeError, ValueError, OSError) as error:
        raise RequestError(f"cannot join the group {name!a}: {line(error)}") from None
    finally:
        if service.groups[name] is None:
            del service.groups[name]
    return _done("Succeeded to initialize custom process group.")


async def destroy_group(request: web.Request) -> web.Response:
    service, fields = request.app[SERVICE], await read(request)
    group = service.groups.pop(fields.text("group_name", GROUP) or GROUP, None)
    if group is None:
        raise fields.refuse("group_name", "the group to be destroyed does not exist")
    await run_in_daemon_thread(group.close)
    return _done("Succeeded to destroy custom process group.")


async def begin_update(request: web.Request) -> web.Response:
    """Open an update session. All tensors until end_weight_update are one version, and generation pauses until then.

    With the field `adapter`, the tensors are parts of an adapter that end_weight_update merges into its base model.
    """
    service, fields = request.app[SERVICE], await read(request)
    adapter = await _announced(service, fields)
    if service.adapter_update is not None:  # from a trainer that died, and not written yet
        service.adapter_update = None
        await service.thread.call(service.thread.engine.end_update)
    await service.thread.call(service.thread.engine.begin_update)
    service.adapter_update = adapter
    return _done("Success")


async def end_update(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    await read(request)
    adapter, service.adapter_update = service.adapter_update, None
    try:
        if adapter is not None and adapter.parts:
            await service.thread.call(partial(_merge, service, adapter))
    finally:
        await service.thread.call(service.thread.engine.end_update)
    return _done("Success")


async def update_version(request: web.Request) -> web.Response:
    """Rename the weight version."""
    service, fields = request.app[SERVICE], await read(request)
    version = fields.needed("new_version")[:LONGEST_VERSION]
    if fields.flag("abort_all_requests", True):
        await service.thread.call(service.thread.engine.end_all)
    await service.thread.call(lambda: service.thread.engine.update_weights([], version=version))
    return _done(f"Weight version updated to {version}", new_version=version)


async def check(request: web.Request) -> web.Response:
    """Return a checksum of every tensor as stored by the engine, by Hugging Face name."""
    service, fields = request.app[SERVICE], await read(request)
    fields.choice("action", "checksum", ("checksum",))
    checksums = await service.thread.call(lambda: service.thread.engine.checksums(tensor_checksum))
    return _done("Success", ranks=[{"checksums": checksums}])


async def _announced(service: Service, fields: RequestBody) -> AdapterUpdate | None:
    served = service.served
    return await run_in_daemon_thread(partial(announced, fields, served.folder, served.base_model))


async def _update(
    service: Service,
    fields: RequestBody,
    tensors: Sequence[tuple[str, Tensor | FileTensor]],
    version: str | None,
    alone: AdapterUpdate | None = None,
) -> None:
    """Load tensors of the model, or parts of an adapter. A complete adapter, `alone`, is merged at once."""
    adapter = alone or service.adapter_update

    def load() -> None:
        if adapter is None:
            service.merged = None
            service.thread.engine.update_weights(tensors, version=version)
            return
        adapter.add(tensors, version)
        if alone is not None:
            _merge(service, alone)

    await _load(service, fields, load)


def _merge(service: Service, adapter: AdapterUpdate) -> None:
    """Load an adapter merged into its base model. Raises CheckpointError if the adapter is incomplete."""
    adapter.check_complete()
    merged, service.merged = service.merged, None
    service.merged = adapter.apply(service.thread.engine, merged)


async def _load(service: Service, fields: RequestBody, load: Callable[[], None]) -> None:
    """Load weights between two steps. Raises CheckpointError if they do not fit."""
    if fields.flag("abort_all_requests"):
        await service.thread.call(service.thread.engine.end_all)
    async with service.updating:
        await service.thread.call(load)


def _version(fields: RequestBody) -> str | None:
    return fields.text("weight_version", longest=LONGEST_VERSION) or None


def _done(message: str, **more: Any) -> web.Response:
    return web.json_response({"success": True, "message": message, **more})
