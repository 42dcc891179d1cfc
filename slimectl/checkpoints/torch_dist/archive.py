"""Validates a chunk of a .distcp file, an archive of torch.save, before torch opens it.

torch.load(weights_only=True) executes no code of a file, but it unpacks compressed entries, makes views that are larger
than their storage, and accepts every class that was ever registered with it. Here an archive must be a plain tensor:
stored without compression, no larger than its part of the file, with names from an exact list.
"""

from __future__ import annotations

import io
import os
import struct
import sys
import zipfile
from math import prod
from typing import IO, Any, BinaryIO, cast

import torch
from torch import Tensor

from slimectl.checkpoints.safetensors_io import TensorMemory
from slimectl.checkpoints.torch_dist.pickle_tree import (
    Construction,
    Persistent,
    UnsafePickleError,
    parse_pickle,
    reference_of,
)

MAX_DIRECTORY_BYTES = 64 * 1024
"""Limit on the directory of an archive. torch.save writes about 600 bytes for a tensor."""
MAX_PICKLE_BYTES = 64 * 1024

_STORAGES = (
    "DoubleStorage", "FloatStorage", "HalfStorage", "BFloat16Storage", "LongStorage", "IntStorage", "ShortStorage",
    "CharStorage", "ByteStorage", "BoolStorage", "UntypedStorage", "Float8_e4m3fnStorage", "Float8_e5m2Storage",
)  # fmt: skip
_STORAGE = {
    torch.float64: "DoubleStorage", torch.float32: "FloatStorage", torch.float16: "HalfStorage",
    torch.bfloat16: "BFloat16Storage", torch.int64: "LongStorage", torch.int32: "IntStorage",
}  # fmt: skip
"""Names of the storages for the most common dtypes of models."""
_DTYPES = ("float8_e4m3fn", "float8_e5m2")
TENSOR_NAMES = frozenset({
    ("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_tensor_v3"), ("collections", "OrderedDict"),
    ("torch._utils", "_rebuild_parameter"), ("torch.storage", "UntypedStorage"),
    *(("torch", name) for name in (*_STORAGES, *_DTYPES)),
})  # fmt: skip
"""All names that occur in the pickle of a tensor or parameter."""


class FileRange(io.RawIOBase):
    """File view of the bytes `start` to `start + length` of an open file."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length = file, start, length
        self._position = 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError(f"position {base + offset} is before the beginning")
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        view = memoryview(target).cast("B")
        view = view[: max(0, min(len(view), self._length - self._position))]
        self._file.seek(self._start + self._position)
        count = self._file.readinto(view) or 0  # type: ignore[attr-defined]
        self._position += count
        return int(count)


def load_tensor(
    file: BinaryIO,
    start: int,
    length: int,
    *,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    memory: TensorMemory | None = None,
) -> Tensor:
    """Load the tensor of an archive inside a file, into `memory` if it is given.

    Raises ValueError for any other content, shape or dtype.
    """
    if prod(shape) * dtype.itemsize > length:
        raise ValueError(f"{length} bytes for a tensor {list(shape)} of {dtype}")
    view = FileRange(file, start, length)
    data_start = check_archive(view, length, shape=shape, dtype=dtype)
    if data_start is not None:
        return (memory or TensorMemory()).read(file, start + data_start, shape, dtype)
    view.seek(0)
    values = torch.load(cast("IO[bytes]", view), map_location="cpu", weights_only=True)
    if not isinstance(values, Tensor) or values.layout != torch.strided or values.is_quantized:
        raise ValueError(f"{type(values).__name__} instead of a tensor")
    values = values.detach()
    if tuple(values.shape) != shape or values.dtype != dtype:
        raise ValueError(f"it is {values.dtype} {list(values.shape)}, but {dtype} {list(shape)} in .metadata")
    if values.untyped_storage().nbytes() < values.nbytes or not values.is_contiguous():
        raise ValueError(f"{values.untyped_storage().nbytes()} bytes for a tensor {list(shape)}")
    return values


def check_archive(view: FileRange, length: int, shape: tuple[int, ...], dtype: torch.dtype) -> int | None:
    """Return the offset of the data of a contiguous tensor of that form, or None if torch has to rebuild it.

    Raises ValueError, or an error of zipfile, unless this is the archive of a plain tensor.
    """
    with _open_archive(view, length) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
        pickles = [entry for name, entry in entries.items() if name.endswith("data.pkl")]
        if len(pickles) != 1 or pickles[0].file_size > MAX_PICKLE_BYTES:
            raise ValueError("no pickle of a tensor")
        for entry in entries.values():  # torch.save writes 0 if checksums are disabled
            entry.CRC = None  # type: ignore[assignment]
        tree = parse_pickle(archive.read(pickles[0]), allowed=TENSOR_NAMES, persistent=True)
        if not _is_tensor(tree):
            raise UnsafePickleError("something else instead of a tensor")
        folder, storage = pickles[0].filename.removesuffix("data.pkl"), _whole_storage(tree, shape, dtype)
        order, data = entries.get(f"{folder}byteorder"), entries.get(f"{folder}data/{storage}")
        if storage is None or data is None or data.file_size != prod(shape) * dtype.itemsize:
            return None
        if order is None or order.file_size > len("little") or archive.read(order).decode() != sys.byteorder:
            return None
    header = struct.Struct("<4s5H3L2H")
    view.seek(data.header_offset)
    signature, *_, name_bytes, extra_bytes = header.unpack(view.read(header.size))
    start: int = data.header_offset + header.size + name_bytes + extra_bytes
    return start if signature == b"PK\3\4" and start + data.file_size <= length else None


def _whole_storage(tree: Construction, shape: tuple[int, ...], dtype: torch.dtype) -> str | None:
    """Return the name of the storage if a contiguous tensor of that form fills it, else None."""
    if tree.reference.name != "_rebuild_tensor_v2":
        return None
    persistent, offset, size, stride = tree.arguments[:4]
    match persistent.name:
        case ("storage", kind, str(name), _, _):
            strides = torch.empty(shape, device="meta").stride()
            expected = (("torch", _STORAGE.get(dtype)), 0, shape, strides)
            is_whole = (reference_of(kind), offset, size, stride) == expected
            return name if is_whole else None
    return None


def check_stored(view: FileRange, length: int) -> None:
    """Raise ValueError, or an error of zipfile, for a torch.save archive that would expand when it is read."""
    _open_archive(view, length).close()
    view.seek(0)


def _open_archive(view: FileRange, length: int) -> zipfile.ZipFile:
    _check_directory(view, length)
    archive = zipfile.ZipFile(cast("IO[bytes]", view))
    entries = archive.infolist()
    if len({entry.filename for entry in entries}) < len(entries):
        raise ValueError("a duplicate entry")
    if any(entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1 for entry in entries):
        raise ValueError("a compressed entry, which torch.save never writes")
    if sum(entry.file_size for entry in entries) > length:
        raise ValueError("entries larger than the file")
    return archive


def _is_tensor(tree: Any) -> bool:
    if not isinstance(tree, Construction) or tree.state is not None or tree.items or not tree.arguments:
        return False
    if tree.reference.name == "_rebuild_parameter":
        return _is_tensor(tree.arguments[0])
    return tree.reference.name.startswith("_rebuild_tensor_v") and isinstance(tree.arguments[0], Persistent)


def _check_directory(view: FileRange, length: int) -> None:
    """Raise ValueError for a table of contents that would need much memory to read."""
    end = struct.Struct("<4s4H2LH")
    if length < end.size:
        raise ValueError(f"{length} bytes are too short for an archive")
    view.seek(length - end.size, os.SEEK_SET)
    signature, *_, size, _, _ = end.unpack(view.read(end.size))
    if signature != b"PK\5\6":
        raise ValueError("the end is not that of a torch.save archive")
    if size == 0xFFFFFFFF:
        size = _zip64_directory_bytes(view, length - end.size)
    if size > MAX_DIRECTORY_BYTES:
        raise ValueError(f"a table of contents of {size} bytes")
    view.seek(0)


def _zip64_directory_bytes(view: FileRange, end: int) -> int:
    locator, record = struct.Struct("<4sLQL"), struct.Struct("<4sQ2H2L4Q")
    view.seek(max(0, end - locator.size), os.SEEK_SET)
    signature, _, start, _ = locator.unpack(view.read(locator.size))
    if signature != b"PK\6\7" or start + record.size > end:
        raise ValueError("a damaged table of contents")
    view.seek(start, os.SEEK_SET)
    size: int = record.unpack(view.read(record.size))[8]
    return size
