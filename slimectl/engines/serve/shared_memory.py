"""Reads tensors from POSIX shared memory of this machine: bytes and a table, no pickles."""

from __future__ import annotations

import math
import mmap
import os
import re
import stat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slimectl.engines.serve.fields import Fields

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


def dtype_of(fields: Fields, name: str, value: Any) -> torch.dtype:
    dtype = DTYPES.get(value.removeprefix("torch.")) if isinstance(value, str) else None
    if dtype is None:
        raise fields.refuse(name, f"a dtype is not one of {', '.join(DTYPES)}")
    return dtype


def shape_of(fields: Fields, name: str, value: Any) -> tuple[int, ...]:
    sizes = fields.tokens(name, value)
    if len(sizes) > MOST_DIMENSIONS or not all(0 <= size < MOST_ELEMENTS for size in sizes):
        raise fields.refuse(name, "a shape is not one of a tensor")
    if math.prod(sizes) >= MOST_ELEMENTS:
        raise fields.refuse(name, f"a shape is one of {math.prod(sizes):.0e} elements")
    return tuple(sizes)


def mapped(fields: Fields) -> list[tuple[str, Tensor]]:
    """Map the tensors of {"name": block, "tensors": [[name, dtype, shape, offset], …]}, without a copy.

    The block stays mapped as long as they live. Raises Refused for a block that does not exist, or is too small.
    """
    block = fields.needed("name").removeprefix("/")
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}", block):
        raise fields.refuse("name", "is not the name of a block of shared memory")
    try:
        # Neither a symbolic link nor a pipe, whose open would block for ever: any user may create one there.
        with open(os.open(FOLDER / block, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise fields.refuse("name", f"{FOLDER / block}: is no block of shared memory")
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        reason = "is empty" if isinstance(error, ValueError) else error.strerror
        raise fields.refuse("name", f"{FOLDER / block}: {reason}; is the sender on this machine?") from None
    rows = fields.raw("tensors")
    if not isinstance(rows, list) or not all(isinstance(row, list) and len(row) == 4 for row in rows):
        raise fields.refuse("tensors", "is not a list of [name, dtype, shape, offset]")
    return [_tensor_view(fields, memory, row) for row in rows]


def _tensor_view(fields: Fields, memory: mmap.mmap, row: list[Any]) -> tuple[str, Tensor]:
    name, dtype, shape = row[0], dtype_of(fields, "tensors", row[1]), shape_of(fields, "tensors", row[2])
    if not isinstance(name, str):
        raise fields.refuse("tensors", "a name is not a string")
    (offset,) = fields.tokens("tensors", [row[3]])
    count = math.prod(shape)
    if not 0 <= offset <= len(memory) - count * dtype.itemsize or offset % dtype.itemsize:
        raise fields.refuse("tensors", f"{name[:200]} does not lie within the block of {len(memory)} bytes")
    if not count:
        return name, torch.empty(shape, dtype=dtype)
    return name, torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(shape)
