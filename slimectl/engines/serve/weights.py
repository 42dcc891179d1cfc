"""Weight update endpoints: from disk, shared memory or broadcast, in one call or several between begin and end."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web

from slimectl.data.hashing import tensor_checksum
from slimectl.engines.serve.fields import Fields, read
from slimectl.engines.serve.groups import BroadcastGroup
from slimectl.engines.serve.refusals import Refused, line
from slimectl.engines.serve.service import SERVICE, Service
from slimectl.engines.serve.shared_memory import dtype_of, mapped, shape_of
from slimectl.engines.serve.thread import apart

GROUP = "weight_update_group"
TIMEOUT_S = 600.0
"""Seconds that a group waits for its trainer."""
LONGEST_VERSION = 200
ADDRESS = re.compile(r"[A-Za-z0-9_.:-]{1,253}")


async def update_from_disk(request: web.Request) -> web.Response:
    """Load all tensors of a Hugging Face directory."""
    service, fields = request.app[SERVICE], await read(request)
    folder, version = Path(fields.needed("model_path")), _version(fields)
    if not folder.is_dir():
        raise fields.refuse("model_path", f"{str(folder)[:200]} is not a directory on this machine")
    engine = service.thread.engine

    def load() -> None:
        engine.load_weights(service.served.read(folder), version=version or engine.weight_version)

    await _load(service, fields, load)
    return _done("Succeeded to update model weights.", num_paused_requests=0)


async def update_from_tensor(request: web.Request) -> web.Response:
    """Load tensors from shared memory."""
    service, fields = request.app[SERVICE], await read(request)
    if "serialized_named_tensors" in fields or fields.text("load_format") != "shared_memory":
        raise Refused(
            "serialized_named_tensors: pickles are not taken, because reading one runs whatever code is in it; "
            'send load_format "shared_memory" with name and tensors (docs/serving.md)'
        )
    tensors, version = mapped(fields), _version(fields)
    await _load(service, fields, lambda: service.thread.engine.update_weights(tensors, version=version))
    return _done("Success")


async def update_from_distributed(request: web.Request) -> web.Response:
    """Load tensors that the trainer broadcasts; received before they are checked, so that it does not block."""
    service, fields = request.app[SERVICE], await read(request)
    group = service.groups.get(fields.text("group_name", GROUP) or GROUP)
    if group is None:
        raise fields.refuse("group_name", "no such group; call init_weights_update_group first")
    columns = [fields.raw(name) for name in ("names", "dtypes", "shapes")]
    if not all(isinstance(column, list) and len(column) == len(columns[0]) for column in columns):
        raise fields.refuse("names", "names, dtypes and shapes are not lists of one length")
    names = fields.texts("names", max_count=len(columns[0]))
    dtypes = [dtype_of(fields, "dtypes", value) for value in columns[1]]
    shapes = [shape_of(fields, "shapes", value) for value in columns[2]]
    forms, version = list(zip(names, dtypes, shapes, strict=True)), _version(fields)
    flattened = fields.choice("load_format", "auto", ("auto", "flattened_bucket")) == "flattened_bucket"
    try:
        tensors = await apart(partial(group.receive, forms, flattened=flattened))
    except (RuntimeError, ValueError) as error:  # errors of gloo and nccl: the trainer went away, or sent others
        raise Refused(f"the broadcast failed; has the trainer gone? {line(error)}") from None
    await _load(service, fields, lambda: service.thread.engine.update_weights(tensors, version=version))
    return _done("Succeeded to update parameter online.")


async def init_group(request: web.Request) -> web.Response:
    """Join a trainer's process group."""
    service, fields = request.app[SERVICE], await read(request)
    name = fields.text("group_name", GROUP, longest=200) or GROUP
    if name in service.groups:
        raise fields.refuse("group_name", f"{name!a} exists already; destroy it first")
    world = fields.whole("world_size", 0, low=2, high=65536)
    host = fields.needed("master_address")
    if not ADDRESS.fullmatch(host):
        raise fields.refuse("master_address", f"{host[:100]!a} is neither a host name nor an address")
    join = partial(
        BroadcastGroup,
        host=host,
        port=fields.whole("master_port", 0, low=1, high=65535),
        rank=fields.whole("rank_offset", 1, low=1, high=max(1, world - 1)),
        world=world,
        name=name,
        backend=fields.choice("backend", "gloo", ("gloo", "nccl")),
        device=service.thread.engine.device,
        timeout_s=TIMEOUT_S,
    )
    if not world or "master_port" not in fields:
        raise Refused("world_size, master_port: are missing")
    service.groups[name] = None  # reserved while waiting for the other ranks
    try:
        service.groups[name] = await apart(join)
    except (RuntimeError, ValueError, OSError) as error:
        raise Refused(f"cannot join the group {name!a}: {line(error)}") from None
    finally:
        if service.groups[name] is None:
            del service.groups[name]
    return _done("Succeeded to initialize custom process group.")


async def destroy_group(request: web.Request) -> web.Response:
    service, fields = request.app[SERVICE], await read(request)
    group = service.groups.pop(fields.text("group_name", GROUP) or GROUP, None)
    if group is None:
        raise fields.refuse("group_name", "the group to be destroyed does not exist")
    await apart(group.close)
    return _done("Succeeded to destroy custom process group.")


async def begin_update(request: web.Request) -> web.Response:
    """Open an update session: tensors until end_weight_update are one version; until then nothing is sampled."""
    service = request.app[SERVICE]
    await read(request)
    await service.thread.call(service.thread.engine.begin_update)
    return _done("Success")


async def end_update(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    await read(request)
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
    """Return a checksum of every tensor as the engine stores it, by its Hugging Face name."""
    service, fields = request.app[SERVICE], await read(request)
    fields.choice("action", "checksum", ("checksum",))
    checksums = await service.thread.call(lambda: service.thread.engine.checksums(tensor_checksum))
    return _done("Success", ranks=[{"checksums": checksums}])


async def _load(service: Service, fields: Fields, load: Callable[[], None]) -> None:
    """Load weights between two steps. Raises CheckpointError for those that do not fit."""
    if fields.flag("abort_all_requests"):
        await service.thread.call(service.thread.engine.end_all)
    async with service.updating:
        await service.thread.call(load)


def _version(fields: Fields) -> str | None:
    return fields.text("weight_version", longest=LONGEST_VERSION) or None


def _done(message: str, **more: Any) -> web.Response:
    return web.json_response({"success": True, "message": message, **more})
