"""Converts checkpoints between formats, dtypes and quantization schemes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from slimectl.checkpoints.conversion.hf_modules import linear_weights
from slimectl.checkpoints.conversion.logit_check import check_logits
from slimectl.checkpoints.conversion.sources import DTYPES, Source, open_source, resolve_source
from slimectl.checkpoints.hf import CastWeights, write_hf
from slimectl.checkpoints.hf_weights import HFWeights
from slimectl.checkpoints.quantization import Quantized
from slimectl.checkpoints.quantization_schemes import Fp8Blocks, Fp8Scale, Int4Groups, WritableScheme
from slimectl.checkpoints.torch_dist.mapping import TorchDistWeights, chunks_of, extra_states
from slimectl.checkpoints.torch_dist.writer import write_torch_dist
from slimectl.checkpoints.validate import StackedExperts, UnfusedExperts, ValidatedWeights
from slimectl.data.convert_options import ConvertOptions
from slimectl.data.hashing import Digest, content_hash
from slimectl.data.manifest import Manifest, check_integrity, integrity_error, settings_hash
from slimectl.data.model_card import convert_card
from slimectl.protocols import NO_PROGRESS, Progress, Weights
from slimectl.stages.convert import Output, convert
from slimectl.system.model_files import check_model_files

VERIFIED_BYTES = 2_000_000_000
"""Models up to this size are verified by default."""
LOGITS_BYTES = 1_000_000_000
"""Models up to this size are also run to verify them."""


def convert_checkpoint(
    source: str | Path,
    target: Path,
    options: ConvertOptions = ConvertOptions(),
    *,
    force: bool = False,
    progress: Progress = NO_PROGRESS,
) -> dict[str, Any]:
    """Convert the model at `source` to a checkpoint directory at `target`. Returns a readable summary.

    `source` as in `resolve_source`. A source with a manifest is hashed completely before it is read.

    Repeating the same conversion does nothing and reports `"unchanged"`, unless `force`. An interrupted one resumes
    with its finished files. Raises SettingsError for unknown conversions, and the errors of `stages.convert.convert`.
    """
    path = resolve_source(source)
    if path.is_dir():
        check_model_files(path)
    has_manifest = path.is_dir() and check_integrity(path, full=True)
    # A run's step is identified by its manifest in the policy's parent, because the headers of two steps are equal.
    hashed = path.parent if path.name == "policy" else path
    with progress.phase("reading"):
        manifest = Manifest("convert", options.facts, {str(source): content_hash(hashed)})
    if not force and manifest.unchanged(target) and integrity_error(target) is None:
        return {**json.loads((target / "manifest.json").read_text())["counts"], "unchanged": True}
    opened = open_source(path, options)
    target_weights, read, write = _reader_and_writer(opened, options)
    numbers = {"parameters": _numbers(opened.weights)}
    size = sum(_bytes(form) for form in target_weights.forms().values())
    verify = size <= VERIFIED_BYTES if options.verify is None else options.verify
    tokens = options.logits if options.logits is not None else 16 if size <= LOGITS_BYTES else 0
    check_result: dict[str, Any] = {}

    def check(staged: Path) -> None:
        check_result.update(
            check_logits(
                opened, staged, read(staged), options.to, tokens, exact=not (options.dtype or options.quantize)
            )
        )

    counts = convert(
        target_weights,
        target,
        Output(
            write=write,
            companions=partial(_write_companions, opened, options, target_weights),
            reread=read if verify else None,
            check=check if verify and tokens else None,
        ),
        force=force,
        sign=lambda counts: manifest.signed({**counts, **numbers}, parents=[str(hashed)]),
        resume=settings_hash({**manifest.facts["settings"], **manifest.facts["inputs"], "files": _stamps(path)}),
        progress=progress,
    )
    shown_dtype = options.quantize or options.dtype or ("float32" if path.suffix == ".gguf" else "as it was")
    source_facts = {"source": "as its manifest says"} if has_manifest else {}
    return {
        **counts,
        **numbers,
        "dtype": shown_dtype,
        "verified": verify,
        **source_facts,
        **check_result,
    }


Ends = tuple[Weights, Callable[[Path], Weights], Callable[[Path, Weights], Mapping[str, Digest]]]


def _reader_and_writer(source: Source, options: ConvertOptions) -> Ends:
    """Weights for the target, and their reader and writer."""
    weights = source.weights
    if options.to == "torch_dist":
        model = source.needed_model()
        accounted = ValidatedWeights(weights, model, source.location)
        cast: Weights = CastWeights(accounted, DTYPES[options.dtype]) if options.dtype else accounted

        def write(path: Path, target_weights: Weights) -> Mapping[str, Digest]:
            chunks = chunks_of(target_weights, model, accounted.carried)
            return write_torch_dist(path, chunks, max_file_bytes=options.max_shard_bytes, objects=extra_states(model))

        return cast, lambda path: TorchDistWeights(path, model), write
    if source.model and source.kind != "torch_dist" and not source.quantized:
        source.model.account(UnfusedExperts(weights, source.model.family).forms(), source.location)
    if options.dtype:
        weights = CastWeights(weights, DTYPES[options.dtype])
    if options.quantize:
        # Readers of quantized models know single experts, and not every family's layout of fused ones.
        linear = None if source.model else linear_weights(source.config, weights.forms())
        if source.model:
            weights = StackedExperts(UnfusedExperts(weights, source.model.family))
        weights = Quantized(weights, _scheme(options), linear)
    return weights, HFWeights, partial(write_hf, max_shard_bytes=options.max_shard_bytes)


def _scheme(options: ConvertOptions) -> WritableScheme:
    if options.quantize in ("fp8_tensor", "fp8_channel"):
        return Fp8Scale(per_row=options.quantize == "fp8_channel")
    return Fp8Blocks(*options.block) if options.quantize == "fp8" else Int4Groups(options.group)


def _write_companions(source: Source, options: ConvertOptions, target_weights: Weights, into: Path) -> None:
    """Write config, tokenizer and templates. The config has the dtype and quantization of the new weights."""
    source.companions(into)
    convert_card(Path(source.location), into, quantize=options.quantize)
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


def _stamps(path: Path) -> list[Any]:
    """Names, sizes and modification times of a source's files, to detect a change without reading them."""
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
