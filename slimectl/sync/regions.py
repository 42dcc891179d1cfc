"""Locates the bytes of each tensor in the files of a Hugging Face directory."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from slimectl.errors import CheckpointError

WIDTH = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
"""Bytes of a number by safetensors' code; all others have one."""


@dataclass(frozen=True, slots=True)
class Region:
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


def regions(folder: Path) -> dict[str, Region]:
    """Return the byte range of every tensor in the directory, by name. Raises CheckpointError."""
    tensor_regions: dict[str, Region] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with file.open("rb") as stream:
                length = int.from_bytes(stream.read(8), "little")
                header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            for name, entry in header.items():
                start, end = entry["data_offsets"]
                shape = tuple(entry["shape"])
                region = Region(file, 8 + length + start, end - start, entry["dtype"], shape)
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
