"""Which conversions there are, each put together from its parts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from slimectl.checkpoints.accounts import Accounted, Apart
from slimectl.checkpoints.hf import Cast, HFWeights, write_hf
from slimectl.checkpoints.locate import resolve_source
from slimectl.checkpoints.quantize import Quantized, Scheme
from slimectl.checkpoints.quantize_fp8 import Fp8Blocks
from slimectl.checkpoints.quantize_int4 import Int4Groups
from slimectl.checkpoints.torch_dist.weights import TorchDistWeights, chunks_of, extra_states
from slimectl.checkpoints.torch_dist.writer import write_torch_dist
from slimectl.conversions.proof import check_logits
from slimectl.conversions.sources import DTYPES, Source, open_source
from slimectl.data.hashing import content_hash
from slimectl.data.integrity import check_integrity, integrity_error
from slimectl.data.manifest import Manifest, settings_hash
from slimectl.errors import SettingsError
from slimectl.model_files import check_model_files
from slimectl.ports import Weights
from slimectl.stages.convert import convert

LAYOUTS = ("hf", "torch_dist")
SCHEMES = ("fp8", "int4")
VERIFIED_BYTES = 2_000_000_000
"""Models up to this size are read back unless told otherwise."""
LOGITS_BYTES = 1_000_000_000
"""Models up to this size are also run, where they are verified."""


@dataclass(frozen=True)
class Options:
    """What is asked of a conversion, checked. Raises SettingsError."""

    to: str = "hf"
    dtype: str | None = None
    quantize: str | None = None
    block: tuple[int, int] = (128, 128)
    group: int = 128

    def __post_init__(self) -> None:
        _known("--to", self.to, LAYOUTS)
        _known("--dtype", self.dtype, tuple(DTYPES))
        _known("--quantize", self.quantize, SCHEMES)
        if self.quantize and self.to != "hf":
            raise SettingsError(
                f"--quantize {self.quantize}: Megatron trains on whole numbers; leave it out or use --to hf"
            )
        if min(self.block) < 1:
            raise SettingsError(f"--block {self.block[0]} {self.block[1]}: rows and columns are at least 1")
        if self.quantize == "int4" and (self.group < 8 or self.group % 8):
            raise SettingsError(f"--group {self.group}: not a multiple of 8; engines know 32 and 128")

    @property
    def scheme(self) -> Scheme | None:
        if self.quantize is None:
            return None
        return Fp8Blocks(*self.block) if self.quantize == "fp8" else Int4Groups(self.group)

    @property
    def needs_numbers(self) -> bool:
        """Whether quantized sources have to be dequantized."""
        return bool(self.to == "torch_dist" or self.dtype or self.quantize)


def _known(flag: str, value: str | None, values: tuple[str, ...]) -> None:
    if value is not None and value not in values:
        raise SettingsError(f"{flag} {value}: not among those known: {', '.join(values)}")


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
    progress: Callable[[str], None] | None = None,
    max_shard_bytes: int | None = None,
) -> dict[str, Any]:
    """Make the model at `source` a checkpoint directory at `target`; a summary for a person.

    `source` as in `resolve_source`. `dtype` None keeps each tensor as it is (GGUF is dequantized to float32). `config`
    is a Hugging Face directory, `card` the name of a card: either says what a torch_dist folder does not say itself,
    and no two may contradict each other. `verify` reads the result back; None does so for models below 2 GB. `logits`
    is on how many tokens a verified result is run, against the source; None is 16 for models below 1 GB. A source with
    a manifest is hashed whole before anything is read from it.

    The same conversion once more does nothing and says so (`"unchanged"`), unless `force`; one that was interrupted
    goes on with the files it had finished. Raises SettingsError for what is not among the conversions, else as
    `stages.convert.convert` does.
    """
    options = Options(to, dtype, quantize, block, group)
    path = resolve_source(source)
    settings = {
        "to": to, "dtype": dtype, "quantize": quantize, "max_shard_bytes": max_shard_bytes,
        **({"block": list(block)} if quantize == "fp8" else {}), **({"group": group} if quantize == "int4" else {}),
        **({"config": str(config)} if config else {}), **({"card": card} if card else {}),
    }  # fmt: skip
    if path.is_dir():
        check_model_files(path)
    has_manifest = path.is_dir() and check_integrity(path, full=True)
    # A run's step is known by its manifest, which lies above the policy: two steps' headers are alike.
    hashed = path.parent if path.name == "policy" else path
    manifest = Manifest("convert", settings, {str(source): content_hash(hashed)})
    if not force and manifest.unchanged(target) and integrity_error(target) is None:
        return {**json.loads((target / "manifest.json").read_text())["counts"], "unchanged": True}
    found = open_source(path, numbers=options.needs_numbers, dtype=DTYPES.get(dtype or ""), config=config, card=card)
    given, read, write = _ends(found, options, max_shard_bytes)
    numbers = {"parameters": _numbers(found.weights)}
    size = sum(_bytes(form) for form in given.forms().values())
    verify = size <= VERIFIED_BYTES if verify is None else verify
    tokens = logits if logits is not None else 16 if size <= LOGITS_BYTES else 0
    said: dict[str, Any] = {}

    def check(_: Weights, staged: Path) -> None:
        said.update(check_logits(found, staged, read(staged), options.to, tokens, exact=_is_exact(options)))

    counts = convert(
        given,
        target,
        write=write,
        companions=partial(_companions, found, options, given),
        reread=read if verify else None,
        check=check if verify and tokens else None,
        force=force,
        sign=lambda counts: manifest.signed({**counts, **numbers}, parents=[str(hashed)]),
        resume=settings_hash({**manifest.facts["settings"], **manifest.facts["inputs"], "files": _stamps(path)}),
        progress=progress,
    )
    said_dtype = dtype or ("float32" if path.suffix == ".gguf" else "as it was")
    source_facts = {"source": "as its manifest says"} if has_manifest else {}
    return {**counts, **numbers, "dtype": quantize or said_dtype, "verified": verify, **source_facts, **said}


Ends = tuple[Weights, Callable[[Path], Weights], Callable[[Path, Weights], Mapping[str, str]]]


def _ends(found: Source, options: Options, max_bytes: int | None) -> Ends:
    """What goes into the target, how it is read back, and how it is written."""
    weights = found.weights
    if options.to == "torch_dist":
        model = found.needed_model()
        accounted = Accounted(weights, model, found.where)
        cast: Weights = Cast(accounted, DTYPES[options.dtype]) if options.dtype else accounted

        def write(path: Path, given: Weights) -> Mapping[str, str]:
            chunks = chunks_of(given, model, accounted.carried)
            return write_torch_dist(path, chunks, max_file_bytes=max_bytes, objects=extra_states(model))

        return cast, lambda path: TorchDistWeights(path, model), write
    if found.model and found.kind != "torch_dist" and not found.quantized:
        found.model.account(Apart(weights).forms(), found.where)
    if options.dtype:
        weights = Cast(weights, DTYPES[options.dtype])
    if options.scheme:
        weights = Quantized(weights, options.scheme)
    return weights, HFWeights, partial(write_hf, max_shard_bytes=max_bytes)


def _companions(found: Source, options: Options, given: Weights, into: Path) -> None:
    """Config, tokenizer and templates; the config says what became of the weights."""
    found.companions(into)
    config = dict(found.config)
    if options.dtype or found.dequantized:
        config.pop("torch_dtype", None)  # the key's name before transformers 5
        config["dtype"] = options.dtype or "bfloat16"
    if isinstance(given, Quantized):
        config["quantization_config"] = given.config()
    file = into / "config.json"
    if not file.exists() or config != json.loads(file.read_text(encoding="utf-8")):
        file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _numbers(weights: Weights) -> int:
    return sum(torch.Size(shape).numel() for shape, _ in weights.forms().values())


def _bytes(form: tuple[tuple[int, ...], torch.dtype]) -> int:
    return torch.Size(form[0]).numel() * form[1].itemsize


def _is_exact(options: Options) -> bool:
    return not (options.dtype or options.quantize)


def _stamps(path: Path) -> list[Any]:
    """What tells a source from another one under the same name, at no cost."""
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
