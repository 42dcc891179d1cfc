"""Reads and writes safetensors files tensor by tensor, with reused or mapped memory."""

from __future__ import annotations

import json
import mmap
import os
import sys
from collections.abc import Iterable, Mapping
from functools import cached_property
from math import prod
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO, Protocol

import numpy as np
import torch
from torch import Tensor

from slimectl.errors import CheckpointError
from slimectl.system.model_files import open_file

MAX_BLOCKS = 8
"""Maximum number of blocks: query, key, value and merged tensor, for the current and for the next parameter."""
LEAST_BYTES = 1 << 20
"""Smaller tensors get separate memory."""
MAX_WASTE = 4
"""Largest ratio of a block to its tensor."""
UNUSED_REFERENCES = 3
"""References to an unused block: the list, the local variable that checks it, and getrefcount's argument."""


class TensorMemory:
    """Memory for tensors that are read or built one after another: blocks that are reused when they are free.

    A tensor and its views hold references to their block. An unused block is referenced only by the list. Files are not
    mapped, because truncating a mapped file would kill the process.
    """

    def __init__(self) -> None:
        self._blocks: list[Any] = []
        self._lock = Lock()

    def read(self, file: BinaryIO, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the tensor at byte `start` of the file. Raises EOFError."""
        return read_into(file, start, self.empty(shape, dtype))

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor. Its storage has exactly its size."""
        size = torch.Size(shape).numel() * dtype.itemsize
        block = self._block(size) if size >= LEAST_BYTES else None
        if block is None:
            return torch.empty(shape, dtype=dtype)
        return torch.from_numpy(block[:size]).view(dtype).view(shape)

    def _block(self, size: int) -> Any:
        """Return an unused block of at least `size` bytes, creating one if needed, or None if all are in use."""
        with self._lock:
            unfit = None
            for position in range(len(self._blocks)):
                block = self._blocks[position]
                if sys.getrefcount(block) > UNUSED_REFERENCES:
                    continue
                if size <= len(block) <= MAX_WASTE * size:
                    return block
                unfit = position
            block = None
            if unfit is not None:
                del self._blocks[unfit]
            elif len(self._blocks) == MAX_BLOCKS:
                return None
            self._blocks.append(np.empty(size, dtype=np.uint8))
            return self._blocks[-1]


class MappedMemory(TensorMemory):
    """Maps tensors from their files, so that only the parts in use are read and no memory is kept.

    Use it only for files that do not change. Truncating a mapped file kills the process.
    """

    def read(self, file: BinaryIO, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the tensor at byte `start` of the file. Changes to it are not written back. Raises EOFError."""
        size = nbytes((shape, dtype))
        is_whole = start + size <= os.fstat(file.fileno()).st_size
        if size < LEAST_BYTES or start % dtype.itemsize or not is_whole:
            return read_into(file, start, torch.empty(shape, dtype=dtype))
        before = start % mmap.ALLOCATIONGRANULARITY
        mapped = mmap.mmap(file.fileno(), before + size, access=mmap.ACCESS_COPY, offset=start - before)
        return torch.frombuffer(mapped, dtype=torch.uint8, offset=before).view(dtype).view(shape)


TensorSpec = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor."""

CODES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu, "C64": torch.complex64,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip
CODE = {dtype: code for code, dtype in CODES.items()}
MAX_HEADER_BYTES = 100_000_000
"""Header limit of safetensors, so that a damaged length cannot allocate all memory."""


MAX_NUMBER = 2**48
MAX_DIMENSIONS = 16


class WritableTensor(Protocol):
    """File-like target of tensor data."""

    def write(self, data: bytes | memoryview, /) -> int: ...


def nbytes(form: TensorSpec) -> int:
    return prod(form[0]) * form[1].itemsize


def buffer(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor without a copy, for any dtype."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def read_into(file: BinaryIO, start: int, tensor: Tensor) -> Tensor:
    """Fill a tensor with the bytes of the file from `start`, and return it. Raises EOFError."""
    file.seek(start)
    view = buffer(tensor)
    while view:  # a read returns at most 2 GiB
        count = file.readinto(view)  # type: ignore[attr-defined]
        if not count:
            raise EOFError(f"{len(view)} bytes are missing")
        view = view[count:]
    return tensor


class SafetensorsFile:
    """A safetensors file, read tensor by tensor.

    Raises CheckpointError if the file is truncated or not in this format.
    """

    def __init__(self, path: Path, memory: TensorMemory | None = None) -> None:
        self.path = path
        self._memory = memory

    @cached_property
    def _header(self) -> tuple[int, dict[str, tuple[int, TensorSpec]]]:
        """Return the start of the data, and offset and form of each tensor."""
        try:
            with open_file(self.path) as file:
                size = os.fstat(file.fileno()).st_size
                length = int.from_bytes(file.read(8), "little")
                if length > min(size, MAX_HEADER_BYTES):
                    raise ValueError(f"a header of {length} bytes in a file of {size}")
                entries: dict[str, Any] = json.loads(file.read(length))
            entries.pop("__metadata__", None)
            tensors = {name: _parse_entry(entry) for name, entry in entries.items()}
            _check_overlaps(tensors)
        except CheckpointError:
            raise
        except FileNotFoundError:
            raise CheckpointError(f"{self.path}: does not exist. Copy the checkpoint again.") from None
        except RecursionError:
            raise self._damaged_error("its header is damaged: nested too deeply") from None
        except Exception as error:
            raise self._damaged_error(f"its header is damaged: {error}") from error
        end = max((start + nbytes(form) for start, form in tensors.values()), default=0)
        if size < 8 + length + end:
            raise self._damaged_error(f"{size} bytes instead of {8 + length + end}, so it is truncated")
        return 8 + length, tensors

    def _damaged_error(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: cannot be read as safetensors ({reason}). Download or convert it again.")

    def forms(self) -> dict[str, TensorSpec]:
        """Return shape and dtype of every tensor, in file order."""
        placed = sorted(self._header[1].items(), key=lambda item: item[1][0])
        return {name: form for name, (_, form) in placed}

    def get(self, name: str) -> Tensor:
        begin, tensors = self._header
        start, (shape, dtype) = tensors[name]
        try:
            with self.path.open("rb", buffering=0) as file:
                if self._memory is not None:
                    return self._memory.read(file, begin + start, shape, dtype)
                return read_into(file, begin + start, torch.empty(shape, dtype=dtype))
        except EOFError as error:
            raise self._damaged_error(f"{name}: {error}") from None


def _parse_entry(entry: dict[str, Any]) -> tuple[int, TensorSpec]:
    start, end = entry["data_offsets"]
    form = tuple(entry["shape"]), CODES[entry["dtype"]]
    for number in (start, end, *form[0]):
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= MAX_NUMBER:
            raise ValueError(f"{number!r:.40} is not a size")
    if len(form[0]) > MAX_DIMENSIONS:
        raise ValueError(f"{len(form[0])} dimensions")
    if end - start != nbytes(form):
        raise ValueError(f"{end - start} bytes for {entry['dtype']} {entry['shape']}")
    return start, form


def _check_overlaps(tensors: Mapping[str, tuple[int, TensorSpec]]) -> None:
    """Raise ValueError for tensors that share bytes, because a small file could then describe a huge model."""
    end = 0
    for start, form in sorted(
        ((start, form) for start, form in tensors.values() if nbytes(form)), key=lambda place: place[0]
    ):
        if start < end:
            raise ValueError(f"two tensors at byte {start}")
        end = start + nbytes(form)


def write_safetensors(file: WritableTensor, forms: Mapping[str, TensorSpec], tensors: Iterable[Tensor]) -> None:
    """Write the tensors one after another. They must be in the order of `forms`."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (shape, dtype) in forms.items():
        start, end = end, end + nbytes((shape, dtype))
        header[name] = {"dtype": CODE[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for (name, form), tensor in zip(forms.items(), tensors, strict=True):
        assert (tuple(tensor.shape), tensor.dtype) == form, name
        file.write(buffer(tensor.detach().cpu().contiguous()))
