"""Converts checkpoints between formats, dtypes and quantization schemes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from slimectl.checkpoints.hf import CastWeights, write_hf
from slimectl.checkpoints.hf_weights import HFWeights
from slimectl.checkpoints.quantization import Fp8Blocks, Fp8Scale, Int4Groups, Quantized, Scheme
from slimectl.checkpoints.torch_dist.mapping import TorchDistWeights, chunks_of, extra_states
from slimectl.checkpoints.torch_dist.writer import write_torch_dist
from slimectl.checkpoints.validate import UnfusedExperts, ValidatedWeights
from slimectl.conversions.logit_check import check_logits
from slimectl.conversions.sources import DTYPES, Source, open_source, resolve_source
from slimectl.data.hashing import Digest, content_hash
from slimectl.data.manifest import Manifest, check_integrity, integrity_error, settings_hash
from slimectl.errors import SettingsError
from slimectl.model_files import check_model_files
from slimectl.protocols import NO_PROGRESS, Progress, Weights
from slimectl.stages.convert import convert

LAYOUTS = ("hf", "torch_dist")
SCHEMES = ("fp8", "fp8_tensor", "fp8_channel", "int4")
VERIFIED_BYTES = 2_000_000_000
"""Models up to this size are verified by default."""
LOGITS_BYTES = 1_000_000_000
"""Models up to this size are also run to verify them."""


@dataclass(frozen=True)
class ConvertOptions:
    """Validated options of a conversion. Raises SettingsError."""

    to: str = "hf"
    dtype: str | None = None
    quantize: str | None = None
    block: tuple[int, int] = (128, 128)
    group: int = 128

    def __post_init__(self) -> None:
        _check_choice("--to", self.to, LAYOUTS)
        _check_choice("--dtype", self.dtype, tuple(DTYPES))
        _check_choice("--quantize", self.quantize, SCHEMES)
        if self.quantize and self.to != "hf":
            raise SettingsError(
                f"--quantize {self.quantize}: Megatron does not train on quantized weights. Leave it out or use --to hf"
            )
        if min(self.block) < 1:
            raise SettingsError(f"--block {self.block[0]} {self.block[1]}: rows and columns must be at least 1")
        if self.quantize == "int4" and (self.group < 8 or self.group % 8):
            raise SettingsError(f"--group {self.group}: must be a multiple of 8. Engines support 32 and 128")

    @property
    def scheme(self) -> Scheme | None:
        if self.quantize is None:
            return None
        if self.quantize in ("fp8_tensor", "fp8_channel"):
            return Fp8Scale(per_row=self.quantize == "fp8_channel")
        return Fp8Blocks(*self.block) if self.quantize == "fp8" else Int4Groups(self.group)

    @property
    def needs_numbers(self) -> bool:
        """Whether quantized sources have to be dequantized."""
        return bool(self.to == "torch_dist" or self.dtype or self.quantize)


def _check_choice(flag: str, value: str | None, values: tuple[str, ...]) -> None:
    if value is not None and value not in values:
        raise SettingsError(f"{flag} {value}: not a known value. Known values: {', '.join(values)}")


def convert_checkpoint(
    source: str | Path,
    target: Path,
    *,
    to: str = "hf",
    dtype: str | None = None,
    quantize: str | None = None,
    block: tuple[int, int] = (128, 128),
    group: int = 128,
    config: Path | None = None,
    card: str | None = None,
    force: bool = False,
    verify: bool | None = None,
    logits: int | None = None,
    progress: Progress = NO_PROGRESS,
    max_shard_bytes: int | None = None,
) -> dict[str, Any]:
    """Convert the model at `source` to a checkpoint directory at `target`. Returns a readable summary.

    `source` as in `resolve_source`. `dtype` None keeps the dtype of each tensor (GGUF is dequantized to float32).
    `config` is a Hugging Face directory, `card` the name of a model card. Either supplies the config that a torch_dist
    folder may lack. They must not contradict each other. `verify` reads the result back. None does so for models below
    2 GB. `logits` is the number of tokens on which a verified result is compared with the source. None is 16 for models
    below 1 GB. A source with a manifest is hashed completely before it is read.

    Repeating the same conversion does nothing and reports `"unchanged"`, unless `force`. An interrupted one resumes
    with its finished files. Raises SettingsError for unknown conversions, and the errors of
    `stages.convert.convert`.
    """
    options = ConvertOptions(to, dtype, quantize, block, group)
    path = resolve_source(source)
    settings = {
        "to": to, "dtype": dtype, "quantize": quantize, "max_shard_bytes": max_shard_bytes,
        **({"block": list(block)} if quantize == "fp8" else {}), **({"group": group} if quantize == "int4" else {}),
        **({"config": str(config)} if config else {}), **({"card": card} if card else {}),
    }  # fmt: skip
    if path.is_dir():
        check_model_files(path)
    has_manifest = path.is_dir() and check_integrity(path, full=True)
    # A run's step is identified by its manifest in the policy's parent, because the headers of two steps are equal.
    hashed = path.parent if path.name == "policy" else path
    with progress.phase("reading"):
        manifest = Manifest("convert", settings, {str(source): content_hash(hashed)})
    if not force and manifest.unchanged(target) and integrity_error(target) is None:
        return {**json.loads((target / "manifest.json").read_text())["counts"], "unchanged": True}
    opened = open_source(path, numbers=options.needs_numbers, dtype=DTYPES.get(dtype or ""), config=config, card=card)
    target_weights, read, write = _reader_and_writer(opened, options, max_shard_bytes)
    numbers = {"parameters": _numbers(opened.weights)}
    size = sum(_bytes(form) for form in target_weights.forms().values())
    verify = size <= VERIFIED_BYTES if verify is None else verify
    tokens = logits if logits is not None else 16 if size <= LOGITS_BYTES else 0
    check_result: dict[str, Any] = {}

    def check(_: Weights, staged: Path) -> None:
        check_result.update(check_logits(opened, staged, read(staged), options.to, tokens, exact=_is_exact(options)))

    counts = convert(
        target_weights,
        target,
        write=write,
        companions=partial(_write_companions, opened, options, target_weights),
        reread=read if verify else None,
        check=check if verify and tokens else None,
        force=force,
        sign=lambda counts: manifest.signed({**counts, **numbers}, parents=[str(hashed)]),
        resume=settings_hash({**manifest.facts["settings"], **manifest.facts["inputs"], "files": _stamps(path)}),
        progress=progress,
    )
    shown_dtype = dtype or ("float32" if path.suffix == ".gguf" else "as it was")
    source_facts = {"source": "as its manifest says"} if has_manifest else {}
    return {**counts, **numbers, "dtype": quantize or shown_dtype, "verified": verify, **source_facts, **check_result}


Ends = tuple[Weights, Callable[[Path], Weights], Callable[[Path, Weights], Mapping[str, Digest]]]


def _reader_and_writer(source: Source, options: ConvertOptions, max_bytes: int | None) -> Ends:
    """Weights for the target, and their reader and writer."""
    weights = source.weights
    if options.to == "torch_dist":
        model = source.needed_model()
        accounted = ValidatedWeights(weights, model, source.location)
        cast: Weights = CastWeights(accounted, DTYPES[options.dtype]) if options.dtype else accounted

        def write(path: Path, target_weights: Weights) -> Mapping[str, Digest]:
            chunks = chunks_of(target_weights, model, accounted.carried)
            return write_torch_dist(path, chunks, max_file_bytes=max_bytes, objects=extra_states(model))

        return cast, lambda path: TorchDistWeights(path, model), write
    if source.model and source.kind != "torch_dist" and not source.quantized:
        source.model.account(UnfusedExperts(weights).forms(), source.location)
    if options.dtype:
        weights = CastWeights(weights, DTYPES[options.dtype])
    if options.scheme:
        weights = Quantized(weights, options.scheme)
    return weights, HFWeights, partial(write_hf, max_shard_bytes=max_bytes)


def _write_companions(source: Source, options: ConvertOptions, target_weights: Weights, into: Path) -> None:
    """Write config, tokenizer and templates. The config has the dtype and quantization of the new weights."""
    source.companions(into)
    config = dict(source.config)
    if options.dtype or source.dequantized:
        config.pop("torch_dtype", None)  # the key's name before transformers 5
        config["dtype"] = options.dtype or "bfloat16"
    if isinstance(target_weights, Quantized):
        config["quantization_config"] = target_weights.config()
    file = into / "config.json"
    if not file.exists() or config != json.loads(file.read_text(encoding="utf-8")):
        file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _numbers(weights: Weights) -> int:
    return sum(torch.Size(shape).numel() for shape, _ in weights.forms().values())


def _bytes(form: tuple[tuple[int, ...], torch.dtype]) -> int:
    return torch.Size(form[0]).numel() * form[1].itemsize


def _is_exact(options: ConvertOptions) -> bool:
    return not (options.dtype or options.quantize)


def _stamps(path: Path) -> list[Any]:
    """Names, sizes and modification times of a source's files, to detect a change without reading them."""
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
