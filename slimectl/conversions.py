"""Which conversions there are, each put together from its parts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slimectl.checkpoints.hf import HFCheckpoint, copy_companions
from slimectl.checkpoints.locate import resolve_source
from slimectl.data.hashing import content_hash
from slimectl.data.manifest import Manifest
from slimectl.data.rundir import damage
from slimectl.errors import CheckpointError, SettingsError
from slimectl.ports import NamedTensors
from slimectl.stages.convert import convert

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CONVERSIONS = ("gguf to hf", "hf to hf (another precision, other shards)")


@dataclass(frozen=True)
class Parts:
    """How one source is read; GGUF and Hugging Face differ in nothing else."""

    tensors: Callable[[], NamedTensors]
    companions: Callable[[Path], None]
    dtype: torch.dtype | None


def convert_checkpoint(
    source: str | Path,
    target: Path,
    *,
    to: str = "hf",
    dtype: str | None = None,
    force: bool = False,
    verify: bool = True,
    progress: Callable[[str], None] | None = None,
    max_shard_bytes: int = 4 * 1024**3,
) -> dict[str, Any]:
    """Make the model at `source` a checkpoint directory at `target`; a summary for a person.

    `source` as in `resolve_source`. `dtype` None keeps each tensor as it is (GGUF is dequantized to float32). The same
    conversion once more does nothing and says so (`"unchanged"`), unless `force`. Raises SettingsError for a
    conversion that is not among those known, else as `convert` does.
    """
    if to != "hf":
        raise SettingsError(f"--to {to}: not among the conversions that exist: {', '.join(CONVERSIONS)}")
    if dtype is not None and dtype not in DTYPES:
        raise SettingsError(f"--dtype {dtype}: not among those known: {', '.join(DTYPES)}")
    path = resolve_source(source)
    settings = {"to": to, "dtype": dtype, "max_shard_bytes": max_shard_bytes}
    manifest = Manifest("convert", settings, {str(source): content_hash(path)})
    if not force and manifest.unchanged(target) and damage(target) is None:
        return {**json.loads((target / "manifest.json").read_text())["counts"], "unchanged": True}
    parts = _parts(path, DTYPES.get(dtype or ""))
    files = HFCheckpoint(max_shard_bytes=max_shard_bytes)
    counts = convert(
        parts.tensors(),
        target,
        write=files.write,
        companions=parts.companions,
        reread=files.read if verify else None,
        dtype=parts.dtype,
        force=force,
        sign=lambda counts: manifest.signed(counts, parents=[str(path)]),
        progress=progress,
    )
    return {**counts, "dtype": dtype or ("float32" if path.suffix == ".gguf" else "as it was"), "verified": verify}


def _parts(path: Path, dtype: torch.dtype | None) -> Parts:
    if path.suffix == ".gguf":
        from slimectl.checkpoints.gguf import GGUFFile

        file, kept = GGUFFile(path), dtype or torch.float32
        return Parts(lambda: file.read(kept), lambda into: file.write_companions(into, kept), kept)
    _refuse_quantized(path)
    return Parts(lambda: HFCheckpoint().read(path), lambda into: _companions(path, into, dtype), dtype)


def _refuse_quantized(path: Path) -> None:
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        kind = "a torch_dist checkpoint" if (path / ".metadata").exists() else "not a Hugging Face checkpoint"
        raise CheckpointError(f"{path}: no config.json; this is {kind}; known are {', '.join(CONVERSIONS)}") from None
    except ValueError as error:
        raise CheckpointError(f"{path}/config.json: not JSON ({error}); download it again") from None
    if "quantization_config" in config:
        method = config["quantization_config"].get("quant_method", "quantized")
        raise CheckpointError(f"{path}: its weights are {method}; casting them would lose their scales")


def _companions(source: Path, into: Path, dtype: torch.dtype | None) -> None:
    copy_companions(source, into)
    if dtype is not None:
        file = into / "config.json"
        config = json.loads(file.read_text(encoding="utf-8"))
        config.pop("torch_dtype", None)  # the key's name before transformers 5
        file.write_text(json.dumps({**config, "dtype": str(dtype).removeprefix("torch.")}, indent=2) + "\n")
