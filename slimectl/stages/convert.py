"""Converts weights from one checkpoint layout to another and verifies the result."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from slimectl.errors import CheckpointError, SettingsError
from slimectl.protocols import NO_PROGRESS, Progress

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from slimectl.data.hashing import Digest
    from slimectl.protocols import Weights

    Hashes = Mapping[str, Digest]
    """Digest by file name."""

DTYPES = ("float32", "bfloat16", "float16")
LAYOUTS = ("hf", "torch_dist")
SCHEMES = ("fp8", "fp8_tensor", "fp8_channel", "int4")


@dataclass(frozen=True)
class ConvertOptions:
    """What a conversion writes, from which config, and how it is verified. The texts are the help of the command.

    `dtype` None keeps the dtype of each tensor (GGUF is dequantized to float32). `config` and `card` supply the config
    that a torch_dist folder may lack. They must not contradict each other. Raises SettingsError.
    """

    to: Annotated[str, "Layout to write: hf or torch_dist"] = "hf"
    dtype: Annotated[str | None, "Data type: float32, bfloat16 or float16. Default: unchanged"] = None
    quantize: Annotated[str | None, "Quantize to fp8 (blocks), fp8_tensor, fp8_channel (rows) or int4 (groups)"] = None
    block: Annotated[tuple[int, int], "Rows and columns of an fp8 block"] = (128, 128)
    group: Annotated[int, "Columns of an int4 group"] = 128
    config: Annotated[Path | None, "Hugging Face directory with the config and tokenizer"] = None
    card: Annotated[str | None, "Model card that the model must match"] = None
    verify: Annotated[bool | None, "Read the result back and compare. Default: for models below 2 GB"] = None
    logits: Annotated[int | None, "Compare logits on this many tokens. Default: 16 for models below 1 GB"] = None
    max_shard_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.to not in LAYOUTS:
            raise SettingsError(f"--to {self.to}: not a layout that can be written. Choose {' or '.join(LAYOUTS)}")
        for flag, value, values in (("dtype", self.dtype, DTYPES), ("quantize", self.quantize, SCHEMES)):
            if value is not None and value not in values:
                raise SettingsError(f"--{flag} {value}: not a known value. Known values: {', '.join(values)}")
        if self.quantize and self.to != "hf":
            raise SettingsError(
                f"--quantize {self.quantize}: Megatron does not train on quantized weights. Leave it out or use --to hf"
            )
        if min(self.block) < 1:
            raise SettingsError(f"--block {self.block[0]} {self.block[1]}: rows and columns must be at least 1")
        if self.quantize == "int4" and (self.group < 8 or self.group % 8):
            raise SettingsError(f"--group {self.group}: must be a multiple of 8. Engines support 32 and 128")

    @property
    def needs_numbers(self) -> bool:
        """Whether quantized sources have to be dequantized."""
        return bool(self.to == "torch_dist" or self.dtype or self.quantize)

    @property
    def facts(self) -> dict[str, Any]:
        """The options that determine the result, for its manifest."""
        return {
            "to": self.to, "dtype": self.dtype, "quantize": self.quantize, "max_shard_bytes": self.max_shard_bytes,
            **({"block": list(self.block)} if self.quantize == "fp8" else {}),
            **({"group": self.group} if self.quantize == "int4" else {}),
            **({"config": str(self.config)} if self.config else {}), **({"card": self.card} if self.card else {}),
        }  # fmt: skip


@dataclass(frozen=True)
class Output:
    """How the folder of converted weights is written and verified.

    `companions` copies the files that belong to the weights (config, tokenizer), then `write` writes the tensors.
    With `reread`, the written folder is read back: every tensor must exist, with equal shape, dtype and bits.
    `check(folder)` may verify more.
    """

    write: Callable[[Path, Weights], Hashes | None]
    companions: Callable[[Path], None]
    reread: Callable[[Path], Weights] | None = None
    check: Callable[[Path], None] | None = None


class HashingWeights:
    """Wraps weights, counts the tensors that are read, and records the SHA-256 of each."""

    def __init__(self, weights: Weights, *, hashing: bool, progress: Progress = NO_PROGRESS) -> None:
        self._weights = weights
        self._hashing = hashing
        self._progress = progress
        self._names: set[str] = set()
        self._digests: dict[str, str] = {}

    def forms(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        return self._weights.forms()

    def get(self, name: str) -> Tensor:
        tensor = self._weights.get(name)
        if self._hashing:
            self._digests[name] = digest(tensor)
        self._names.add(name)
        self._progress.reach(len(self._names))
        return tensor

    def hash(self, name: str) -> str:
        """Return the SHA-256 of a tensor. Reads the tensor if it was not read before (its shard already existed)."""
        return self._digests.get(name) or digest(self._weights.get(name))


def convert(
    source: Weights,
    target: Path,
    output: Output,
    *,
    force: bool = False,
    sign: Callable[[dict[str, int]], dict[str, Any]] | None = None,
    resume: str | None = None,
    progress: Progress = NO_PROGRESS,
) -> dict[str, int]:
    """Write the tensors of `source` into the folder `target`. Return counts of tensors, parameters and bytes.

    `output` verifies the written folder before it is renamed to `target`. `sign` turns the counts into further fields
    of the manifest. `progress` counts the tensors in each phase. `resume` identifies the conversion, so that a later
    call continues an interrupted one.

    `target` is complete or does not exist. Raises SettingsError if `target` is not empty and `force` is not set,
    CheckpointError if the written tensors differ, StorageError if writing fails.
    """
    from slimectl.data.atomic_replace import refuse_existing
    from slimectl.data.run_dir import write_folder

    refuse_existing(target, force=force)
    witness = HashingWeights(source, hashing=output.reread is not None, progress=progress)
    forms = source.forms()
    counts = {
        "tensors": len(forms),
        "parameters": sum(prod(shape) for shape, _ in forms.values()),
        "bytes": sum(prod(shape) * dtype.itemsize for shape, dtype in forms.values()),
    }
    manifest_fields: dict[str, Any] = {}

    def fill(staged: Path) -> Hashes | None:
        output.companions(staged)
        with progress.phase("writing"):
            progress.expect(len(forms))
            hashes = output.write(staged, witness)
            progress.reach(len(forms))  # tensors of an interrupted conversion were not read again
        if output.reread:
            with progress.phase("verifying"):
                progress.expect(len(forms))
                compare(witness, output.reread(staged), progress=progress)
        if output.check:
            with progress.phase("comparing logits"):
                output.check(staged)
        manifest_fields.update(sign(counts) if sign else {"counts": counts})
        return hashes

    write_folder(target, fill, manifest_fields=manifest_fields, resume=resume)
    return counts


def compare(expected: HashingWeights, actual: Weights, *, progress: Progress = NO_PROGRESS) -> None:
    """Raise CheckpointError unless `actual` has exactly the expected tensors, equal to the last bit."""
    expected_forms, actual_forms = expected.forms(), actual.forms()
    if actual_forms.keys() != expected_forms.keys():
        mismatched = sorted(actual_forms.keys() ^ expected_forms.keys())
        raise CheckpointError(
            f"verifying: {mismatched[0]} and {len(mismatched) - 1} others are not in both. No output was kept"
        )
    for count, (name, (shape, dtype)) in enumerate(actual_forms.items()):
        progress.reach(count)
        if (tuple(shape), dtype) != expected_forms[name] or digest(actual.get(name)) != expected.hash(name):
            raise CheckpointError(
                f"verifying: {name}, {dtype} {tuple(shape)}, differs from what was read. No output was kept. "
                f"Check the disk"
            )


def digest(tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes."""
    import torch

    values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return hashlib.sha256(values).hexdigest()
