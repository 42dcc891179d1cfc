"""Content hashes for manifests (files by bytes, weights by headers and sizes), checksums and sample seeds."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimectl.errors import MissingExtraError, SettingsError, requiring
from slimectl.system.model_files import leads_out

if TYPE_CHECKING:
    from torch import Tensor


WEIGHTS = (".safetensors", ".distcp", ".bin", ".pt", ".pth")
BRIEF_BYTES = 256 * 1024**2
MAX_HEADER_BYTES = 100_000_000


def content_hash(path: str | Path, *, full: bool = False) -> str:
    """Return the SHA-256 of a file's bytes, or of everything in a directory, as 64 hexadecimal digits.

    In a directory, weight files and files above BRIEF_BYTES are hashed by size, and safetensors files also by their
    header. Two steps of one run therefore have the same hash, unless `full` reads every byte. A link out of the
    directory is hashed by its target path. Temporary files (`.tmp-…`) and a model's README.md are ignored. Raises
    SettingsError if `path` does not exist.
    """
    path = Path(path)
    if path.is_file():
        return _file_hash(path)
    if not path.is_dir():
        raise SettingsError(f"{path}: no such file or directory")
    combined = hashlib.sha256()
    for file in sorted(p for p in path.rglob("*") if p.is_symlink() or p.is_file()):
        name = file.relative_to(path)
        if any(part.startswith(".tmp-") for part in name.parts) or name.name == "README.md":
            continue
        if digest := _entry_hash(file, full=full):
            combined.update(f"{name.as_posix()}\0{digest}\n".encode(errors="surrogateescape"))
    return combined.hexdigest()


def _entry_hash(file: Path, *, full: bool) -> str | None:
    """Return the hash of one directory entry, or None if it is not a file."""
    try:
        if leads_out(file):
            return hashlib.sha256(os.fsencode(os.readlink(file))).hexdigest()
    except (OSError, RuntimeError):
        return None
    if not file.is_file():
        return None
    brief = (file.suffix in WEIGHTS or file.stat().st_size > BRIEF_BYTES) and not full
    return _weights_hash(file) if brief else _file_hash(file)


def _file_hash(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _weights_hash(file: Path) -> str:
    digest = hashlib.sha256(str(file.stat().st_size).encode())
    if file.suffix == ".safetensors":
        with file.open("rb") as stream:
            header_bytes = int.from_bytes(stream.read(8), "little")
            # Limited by the file size, so that a damaged length cannot allocate all memory.
            digest.update(stream.read(min(header_bytes, file.stat().st_size, MAX_HEADER_BYTES)))
    return digest.hexdigest()


def tensor_checksum(tensor: Tensor) -> str:
    """Return the BLAKE2b hash of dtype, shape and bytes, as 32 hexadecimal digits: the same in every process.

    Compares bit patterns: -0.0 differs from 0.0, and a NaN equals itself. Weights on a GPU are copied first.
    """
    import torch

    form = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}\n"
    digest = hashlib.blake2b(form.encode(), digest_size=16)
    # A scalar cannot be viewed as bytes, so every tensor is flattened first.
    digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


Digest = tuple[str, str]
"""Name of a hash algorithm, and its hexadecimal digest."""
SHA256, XXH3 = "sha256", "xxh3_128"
"""Algorithms of manifests. Both detect damage. XXH3 is faster (10 GB/s, not 2), and SHA-256 also resists forgery."""


def damage_hash() -> tuple[str, Any]:
    """Return the name of the fastest installed algorithm that detects damage, and a new hash object."""
    try:
        return XXH3, new_hash(XXH3)
    except MissingExtraError:
        return SHA256, new_hash(SHA256)


def new_hash(algorithm: str) -> Any:
    """Return a new hash of SHA256 or XXH3, with `update` and `hexdigest`. Raises MissingExtraError."""
    if algorithm == SHA256:
        return hashlib.sha256()
    with requiring("xxhash", extra="torch", wanted_by="a manifest with XXH3 checksums"):
        import xxhash
    return xxhash.xxh3_128()


def sample_seed(run_seed: int, prompt: str, sample_index: int) -> int:
    """Return a seed in [0, 2^63) for one sample: the same in every process and on every machine.

    It uses blake2b, because Python salts `hash()` differently in each process. Fields are joined by a byte that numbers
    cannot contain, with the prompt last, so no two triples give the same bytes.
    """
    key = b"\0".join([str(run_seed).encode(), str(sample_index).encode(), prompt.encode("utf-8", "surrogatepass")])
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1
