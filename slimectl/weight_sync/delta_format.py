"""Locates the bytes of each tensor in the files of a Hugging Face directory."""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slimectl.errors import CheckpointError, MissingExtraError

WIDTH = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
"""Bytes of a number by safetensors' code; all others have one."""


@dataclass(frozen=True, slots=True)
class TensorRange:
    """Byte range of one tensor in its file."""

    file: Path
    start: int
    nbytes: int
    code: str
    shape: tuple[int, ...]

    @property
    def width(self) -> int:
        """Bytes of one number."""
        return WIDTH.get(self.code, 1)

    def read(self) -> bytes:
        with self.file.open("rb", buffering=0) as stream:
            stream.seek(self.start)
            parts, missing = [], self.nbytes
            # The system reads at most 2 GiB at a time.
            while missing:
                part = stream.read(missing)
                if not part:
                    raise CheckpointError(f"{self.file}: {missing} bytes are missing; push whole weights again")
                parts.append(part)
                missing -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def write(self, data: bytes | memoryview) -> None:
        """Overwrite the bytes in place; the file keeps its size."""
        view = memoryview(data)
        with self.file.open("r+b", buffering=0) as stream:
            stream.seek(self.start)
            while view:
                view = view[stream.write(view) :]


def tensor_ranges(folder: Path) -> dict[str, TensorRange]:
    """Return the byte range of every tensor in the directory, by name. Raises CheckpointError."""
    tensor_regions: dict[str, TensorRange] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with file.open("rb") as stream:
                length = int.from_bytes(stream.read(8), "little")
                header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            for name, entry in header.items():
                start, end = entry["data_offsets"]
                shape = tuple(entry["shape"])
                region = TensorRange(file, 8 + length + start, end - start, entry["dtype"], shape)
                if region.nbytes != math.prod(shape) * region.width:
                    raise ValueError(f"{name} has {region.nbytes} bytes")
                tensor_regions[name] = region
        except (OSError, ValueError, KeyError, TypeError, MemoryError) as error:
            raise CheckpointError(
                f"{file}: cannot be read as safetensors ({error}); push whole weights again"
            ) from error
    if not tensor_regions:
        raise CheckpointError(f"{folder}: no safetensors files; push whole weights first")
    return tensor_regions


MAGIC = b"slimedlt"
LEVEL = 1
"""zstd's fastest: higher levels gain a few per cent on bitmaps and bits."""
TAIL = 8 + 16 + len(MAGIC)


@dataclass(frozen=True, slots=True)
class Change:
    """Change of one tensor: `bitmap` and `values` are [offset, bytes] in the file; None if the tensor is unchanged."""

    code: str
    shape: list[int]
    before: str
    after: str
    changed: int = 0
    bitmap: list[int] | None = None
    values: list[int] | None = None


@dataclass(frozen=True, slots=True)
class Versions:
    """First and last weight version of a delta, its encoding and its checksum algorithm."""

    start: str
    end: str
    encoding: str
    checksum: str


class DeltaWriter:
    """Writes tensor after tensor; `finish` makes the file readable."""

    def __init__(self, path: Path, versions: Versions) -> None:
        self.versions = versions
        self.changes: dict[str, Change] = {}
        self._compressor = _zstandard().ZstdCompressor(level=LEVEL)
        self._file = path.open("wb")
        self._file.write(MAGIC)

    def add(self, name: str, change: Change, *, width: int, old: bytes, new: bytes) -> None:
        """Write a tensor by its bytes; `change` has its checksums, numbers are `width` bytes wide."""
        self.changes[name] = Change(change.code, change.shape, change.before, change.after)
        if old == new:
            return
        old_N, new_N = (np.frombuffer(data, dtype=f"<u{width}") for data in (old, new))
        changed_N = old_N != new_N
        indices = np.flatnonzero(changed_N)  # few, mostly: faster than the mask itself
        values = new_N[indices]
        if self.versions.encoding == "xor":
            values = values ^ old_N[indices]
        self._write_parts(name, changed_N, values)

    def _write_parts(self, name: str, changed_N: Any, values: Any) -> None:
        change = self.changes[name]
        parts = []
        # Bytes of the same place in the number side by side: those that never change make long runs.
        planes = np.ascontiguousarray(values.view(np.uint8).reshape(len(values), -1).T)
        for data in (np.packbits(changed_N), planes):
            packed = self._compressor.compress(data.tobytes())
            parts.append([self._file.tell(), len(packed)])
            self._file.write(packed)
        self.changes[name] = Change(
            change.code, change.shape, change.before, change.after, len(values), bitmap=parts[0], values=parts[1]
        )

    def finish(self) -> int:
        """Write the footer and close the file; returns its size in bytes."""
        changes = {name: asdict(change) for name, change in self.changes.items()}
        footer = self._compressor.compress(json.dumps({**asdict(self.versions), "tensors": changes}).encode())
        self._file.write(footer + len(footer).to_bytes(8, "little") + _seal(footer) + MAGIC)
        size = self._file.tell()
        self.close()
        return size

    def close(self) -> None:
        self._file.close()


class DeltaFile:
    """Reads a finished delta. Raises CheckpointError if the file is not one, or is truncated."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._decompressor = _zstandard().ZstdDecompressor()
        footer = self._footer()
        if footer is None:
            raise CheckpointError(f"{path}: not a whole delta; push whole weights")
        metadata: dict[str, Any] = json.loads(self._decompressor.decompress(footer))
        tensors: Mapping[str, Any] = metadata.pop("tensors")
        self.versions = Versions(**metadata)
        self.changes = {name: Change(**change) for name, change in tensors.items()}

    def _footer(self) -> bytes | None:
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, 2)
                file.seek(max(0, size - TAIL))
                tail = file.read()
                length = int.from_bytes(tail[:8], "little")
                # A damaged length must not ask for all memory.
                if not tail.endswith(MAGIC) or length > size - TAIL:
                    return None
                file.seek(size - TAIL - length)
                footer = file.read(length)
        except OSError as error:
            raise CheckpointError(f"{self.path}: {error.strerror}; push whole weights") from error
        return footer if tail[8:24] == _seal(footer) else None

    def applied(self, name: str, old: bytes, width: int) -> bytes:
        """Apply the change to the bytes `old` of a tensor; returns the new bytes."""
        change = self.changes[name]
        if change.bitmap is None or change.values is None:
            return old
        new_N = np.frombuffer(old, dtype=f"<u{width}").copy()
        bitmap = np.frombuffer(self._part(change.bitmap), np.uint8)
        indices = np.flatnonzero(np.unpackbits(bitmap, count=len(new_N)).view(bool))
        planes = np.frombuffer(self._part(change.values), np.uint8).reshape(width, change.changed)
        values = np.ascontiguousarray(planes.T).view(f"<u{width}").reshape(-1)
        new_N[indices] = values ^ new_N[indices] if self.versions.encoding == "xor" else values
        return new_N.tobytes()

    def _part(self, span: list[int]) -> bytes:
        with self.path.open("rb") as file:
            file.seek(span[0])
            packed = file.read(span[1])
        try:
            return bytes(self._decompressor.decompress(packed))
        except _zstandard().ZstdError as error:
            raise CheckpointError(f"{self.path}: is damaged ({error}); push whole weights") from error


def digest(kind: str, data: bytes) -> str:
    """Return the checksum of a tensor's bytes."""
    if kind == "adler32":
        return f"{zlib.adler32(data):08x}"
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _seal(footer: bytes) -> bytes:
    return hashlib.blake2b(footer, digest_size=16).digest()


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError:
        raise MissingExtraError("zstandard", extra="zstd", wanted_by="sync.transport delta") from None
    return zstandard
