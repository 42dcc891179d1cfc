"""Delta files, and the bytes of each tensor in the files of a Hugging Face directory.

For every tensor, a delta has the numbers that changed: how many unchanged ones precede each, and the xor of its old and
new bits. Both are split into byte planes and compressed. B bytes · N numbers of a tensor · C changed ones.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np

from slimectl.data.io import zstandard
from slimectl.errors import CheckpointError, requiring

WIDTH = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
"""Bytes of a number by safetensors' code. All other codes have one byte."""
CHUNK_BYTES = 2 * 2**20
"""Bytes that are compared at a time."""


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

    def chunks(self) -> Iterator[slice]:
        """Yield byte ranges that cover the tensor, each small enough for the processor's cache."""
        for start in range(0, self.nbytes, CHUNK_BYTES):
            yield slice(start, min(start + CHUNK_BYTES, self.nbytes))

    def mapped(self, files: dict[Path, Any]) -> Any:
        """Return all bytes [B] in the mapped file, where they can be changed. Raises CheckpointError.

        `files` has the mapped bytes of files, from a time after which no other process could have replaced them.
        """
        file_B = files.get(self.file)
        if file_B is None:
            file_B = files[self.file] = mapped_file(self.file)
        data_B = file_B[self.start : self.start + self.nbytes]
        if len(data_B) < self.nbytes:
            raise CheckpointError(
                f"{self.file}: {self.nbytes - len(data_B)} bytes are missing. Push whole weights again."
            )
        return data_B


_MAPPED: dict[Path, tuple[tuple[int, ...], Any]] = {}
"""Identity and mapped bytes of the files that this process keeps for its next push."""


def mapped_file(path: Path) -> Any:
    """Return a file's bytes [B], mapped. The mapping is kept, because it costs more to create than to read once."""
    status = path.stat()
    identity = (status.st_dev, status.st_ino, status.st_size)
    if path not in _MAPPED or _MAPPED[path][0] != identity:
        with path.open("rb+") as file:
            memory = mmap.mmap(file.fileno(), 0) if status.st_size else b""
        _MAPPED[path] = identity, np.frombuffer(memory, np.uint8)
    return _MAPPED[path][1]


def release_mapped(folder: Path) -> None:
    """Release the mapped files of a folder."""
    for path in [path for path in _MAPPED if path.parent == folder]:
        del _MAPPED[path]


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
                f"{file}: cannot be read as safetensors ({error}). Push whole weights again."
            ) from error
    if not tensor_regions:
        raise CheckpointError(f"{folder}: no safetensors files. Push whole weights first.")
    return tensor_regions


WANTED_BY = "sync.transport delta"
MAGIC = b"slimedl3"
LEVEL = 1
"""zstd's fastest level. Higher levels gain a few per cent."""
TAIL = 8 + 16 + len(MAGIC)


@dataclass(frozen=True, slots=True)
class Change:
    """Change of one tensor: `gaps` and `values` are [offset, bytes, width of a number] in the file, if there is any."""

    code: str
    shape: list[int]
    before: str
    after: str
    changed: int = 0
    gaps: list[int] | None = None
    values: list[int] | None = None


@dataclass(frozen=True, slots=True)
class Versions:
    """First and last weight version of a delta."""

    start: str
    end: str


@dataclass(frozen=True)
class Difference:
    """Numbers of a tensor that differ: their indices, ascending, and the xor of their old and new bits."""

    indices_C: Any
    xor_C: Any

    @cached_property
    def gaps_C(self) -> Any:
        """Return how many equal numbers precede each, as the narrowest integers that hold them all."""
        gaps_C = np.empty_like(self.indices_C)
        gaps_C[:1] = self.indices_C[:1]
        np.subtract(self.indices_C[1:], self.indices_C[:-1], out=gaps_C[1:])
        gaps_C[1:] -= 1
        largest = int(gaps_C.max(initial=0))
        return gaps_C.astype(next(f"<u{width}" for width in (1, 2, 4, 8) if largest < 256**width))

    @classmethod
    def joined(cls, parts: list[Difference]) -> Difference:
        """Join the differences of successive chunks."""
        if len(parts) == 1:
            return parts[0]
        if not parts:
            return cls(np.empty(0, np.int64), np.empty(0, np.uint8))
        columns = ("indices_C", "xor_C")
        return cls(*(np.concatenate([getattr(part, column) for part in parts]) for column in columns))


def difference(old_B: Any, new_B: Any, width: int, *, first: int = 0) -> Difference:
    """Compare two chunks of bytes with numbers `width` bytes wide. `first` is the index of their first number."""
    numbers, per_word = f"<u{width}", 8 // width
    if len(old_B) % 8:
        old_N, new_N = old_B.view(numbers), new_B.view(numbers)
        indices_C = np.flatnonzero(old_N != new_N)
        return Difference(indices_C + first, old_N[indices_C] ^ new_N[indices_C])
    # Compare words of several numbers first. Most are equal, and searching fewer items for differences costs less.
    old_W, new_W = old_B.view("<u8"), new_B.view("<u8")
    words_W = np.flatnonzero(old_W != new_W)
    xor_N = (old_W.take(words_W) ^ new_W.take(words_W)).view(numbers)
    places_C = np.flatnonzero(xor_N)
    indices_C = words_W.take(places_C // per_word) * per_word + places_C % per_word
    return Difference(indices_C + first, xor_N.take(places_C))


class DeltaWriter:
    """Writes one tensor after another. `finish` makes the file readable."""

    def __init__(self, path: Path, versions: Versions) -> None:
        self.versions = versions
        self.changes: dict[str, Change] = {}
        self._compressor = zstandard(WANTED_BY).ZstdCompressor(level=LEVEL)
        self._file = path.open("wb")
        self._file.write(MAGIC)

    def add(self, name: str, change: Change, changed: Difference) -> None:
        """Write what changed in a tensor. `change` has its form and its checksums."""
        count = len(changed.indices_C)
        gaps = values = None
        if count:
            gaps, values = self._write(changed.gaps_C), self._write(changed.xor_C)
        self.changes[name] = Change(change.code, change.shape, change.before, change.after, count, gaps, values)

    def _write(self, numbers_C: Any) -> list[int]:
        """Write numbers, compressed if that is shorter. Returns their offset, number of bytes, and width."""
        data = numbers_C.view(np.uint8).data
        # Store bytes of the same place in the number side by side, so that bytes that never change make long runs.
        planes = np.ascontiguousarray(numbers_C.view(np.uint8).reshape(len(numbers_C), -1).T)
        packed = self._compressor.compress(planes.data)
        data = packed if len(packed) < len(data) else data
        span = [self._file.tell(), len(data), numbers_C.itemsize]
        self._file.write(data)
        return span

    def finish(self) -> int:
        """Write the footer and close the file. Returns its size in bytes."""
        fields = Change.__slots__  # asdict would copy every one of thousands of lists
        changes = {name: [getattr(change, field) for field in fields] for name, change in self.changes.items()}
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
        self._decompressor = zstandard(WANTED_BY).ZstdDecompressor()
        footer = self._footer()
        if footer is None:
            raise CheckpointError(f"{path}: not a complete delta. Push whole weights.")
        metadata: dict[str, Any] = json.loads(self._decompressor.decompress(footer))
        tensors: Mapping[str, Any] = metadata.pop("tensors")
        self.versions = Versions(**metadata)
        self.changes = {name: Change(*change) for name, change in tensors.items()}

    def _footer(self) -> bytes | None:
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, 2)
                file.seek(max(0, size - TAIL))
                tail = file.read()
                length = int.from_bytes(tail[:8], "little")
                # A damaged length must not request all memory.
                if not tail.endswith(MAGIC) or length > size - TAIL:
                    return None
                file.seek(size - TAIL - length)
                footer = file.read(length)
        except OSError as error:
            raise CheckpointError(f"{self.path}: {error.strerror}. Push whole weights.") from error
        return footer if tail[8:24] == _seal(footer) else None

    @property
    def start(self) -> str:
        """Return the weight version that the changes start from."""
        return self.versions.start

    @property
    def forms(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return safetensors' code and the shape of every tensor."""
        return {name: (change.code, tuple(change.shape)) for name, change in self.changes.items()}

    def matches(self, name: str, data: Any) -> bool:
        """Return whether these are the bytes of a tensor after the changes."""
        return bool(checksum(data).hexdigest() == self.changes[name].after)

    def gaps(self, name: str, width: int) -> tuple[Any, Any]:
        """Return how many equal numbers precede each changed one [C], and the xor [C] of its old and new bits."""
        change = self.changes[name]
        if change.gaps is None or change.values is None:
            return np.empty(0, np.uint8), np.empty(0, f"<u{width}")
        with self.path.open("rb", buffering=0) as file:
            gaps_C, values_C = (self._numbers(file, span, change.changed) for span in (change.gaps, change.values))
        count = math.prod(change.shape)
        end = int(gaps_C.sum(dtype=np.uint64)) + len(gaps_C)
        if values_C.itemsize != width or end > count or int(gaps_C.max()) >= count:
            raise CheckpointError(f"{self.path}: is damaged ({name} is out of bounds). Push whole weights.")
        return gaps_C, values_C

    def _numbers(self, file: FileIO, span: list[int], count: int) -> Any:
        start, size, width = span
        file.seek(start)
        data = file.read(size)
        try:
            if size == width * count:  # not compressed
                return np.frombuffer(data, f"<u{width}")
            planes = np.frombuffer(self._decompressor.decompress(data), np.uint8)
            return np.ascontiguousarray(planes.reshape(width, count).T).view(f"<u{width}").reshape(-1)
        except (zstandard(WANTED_BY).ZstdError, ValueError, TypeError) as error:
            raise CheckpointError(f"{self.path}: is damaged ({error}). Push whole weights.") from error


def checksum(data: Any = b"") -> Any:
    """Return the checksum of bytes so far, as an object like those of hashlib."""
    with requiring("xxhash", extra="zstd", wanted_by=WANTED_BY):
        import xxhash
    return xxhash.xxh3_128(data)


def _seal(footer: bytes) -> bytes:
    return hashlib.blake2b(footer, digest_size=16).digest()
