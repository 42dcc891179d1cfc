"""Finds, reads, creates and converts model directories."""

from __future__ import annotations

import datetime
import shlex
from functools import cache
from pathlib import Path
from typing import Any

from slimectl.architectures import cards
from slimectl.architectures.config import raw_config, read_config
from slimectl.architectures.config_checks import check_config
from slimectl.architectures.image_tokens import MODEL_TYPES
from slimectl.chats.tokenizer import load_tokenizer
from slimectl.data.hugging_face import hub_name, or_fetch, snapshot
from slimectl.data.manifest import check_integrity
from slimectl.data.template_check import check_template
from slimectl.errors import CheckpointError, SettingsError, SlimectlError, missing_library
from slimectl.settings import Settings
from slimectl.settings.engine import EngineSettings, ModelSettings
from slimectl.settings.rollout import RolloutSettings
from slimectl.system.model_files import (
    adapter_remedy,
    check_model_files,
    follow_links,
    policy_folder,
    read_json,
    trainer_folder,
)
from slimectl.system.stdio import logger

TEMPLATES = ("chat_template.*", "tokenizer_config.json", "additional_chat_templates/*")
"""Files that may contain chat templates in a model's folder."""


def model_folder(path: str | None, *, setting: str = "model.path", verify: bool = False, weights: bool = True) -> Path:
    """Return the model directory of a setting, after checking its files, their manifest and its `weights`.

    The layout is Hugging Face's, or torch_dist with a config.json. `verify` hashes weights of any size. Raises
    SettingsError or CheckpointError.
    """
    if path is None:
        remedies = {"algorithm.opd_teacher_load": "Set the teacher's directory, or algorithm.opd_teacher_url."}
        remedy = remedies.get(setting, "Add --model DIR, a Hugging Face checkpoint directory.")
        raise SettingsError(f"{setting}: no model is given. {remedy}")
    folder = follow_links(Path(path))
    if is_gguf(path) and folder.exists():
        raise CheckpointError(
            f"{path}: is a GGUF file. Convert it first: slimectl convert {shlex.quote(path)} DIR --to hf"
        )
    if not folder.exists():
        folder = hub_model(path) or folder
    if not folder.is_dir():
        raise CheckpointError(
            f"{path}: no such model directory. Use a Hugging Face checkpoint directory{or_fetch(path)}"
        )
    folder = policy_folder(folder)
    if folder.parent.parent == Path(path):
        _announce_newest(path, folder.parent.name)
    if not (folder / "config.json").exists():
        raise CheckpointError(f"{path}: no config.json. {_without_config(folder)}")
    check_model_files(folder)
    config = raw_config(folder)
    if is_torch_dist(folder):
        from slimectl.checkpoints.torch_dist.metadata import weight_bytes

        check_config(config, str(folder / "config.json"), weight_bytes=weight_bytes(folder))
    check_integrity(folder, full=verify)
    if weights:
        from slimectl.checkpoints.hf_weights import check_weights

        check_weights(folder)
    return folder


def served_model(engine: EngineSettings, model: Path) -> Path:
    """Return the checkpoint that engines load: engine.load, or the policy's `model`."""
    return model_folder(engine.load, setting="engine.load") if engine.load else model


def hub_model(name: str) -> Path | None:
    """Return the folder of a model on the hub, cached or downloaded, or None if the hub has no such model."""
    repository = hub_name(name)
    return None if repository is None or repository[1] else snapshot(repository[0], "model")


@cache
def _announce_newest(run: str, step: str) -> None:
    """Log once which checkpoint of a run is used, although checks before a start open the folder too."""
    logger.info(f"{run} is a run. Using its newest checkpoint, {step}.")


def is_torch_dist(folder: Path) -> bool:
    """Return whether a model directory is in Megatron's torch_dist layout. Raises CheckpointError."""
    from slimectl.checkpoints.torch_dist import metadata

    return metadata.is_torch_dist(folder)


def _without_config(folder: Path) -> str:
    """Return the second sentence of the message for a directory without config.json, with the remedy."""
    if not is_torch_dist(folder):
        return adapter_remedy(folder) or "This is not a Hugging Face checkpoint."
    return (
        "This is a torch_dist checkpoint. Copy config.json, tokenizer.json and tokenizer_config.json of its Hugging"
        " Face model into it."
    )


def reads_images(model: ModelSettings) -> bool:
    """Return whether the model of the settings reads images. False if it is missing or on a server."""
    path, card = model.path, model.card
    try:
        if path is None:
            config = {} if card is None else cards.load(card)["config"]
        else:
            folder = Path(path) if Path(path).exists() else hub_model(path) or Path(path)
            config = read_json(policy_folder(folder) / "config.json")
    except (CheckpointError, OSError):  # reported when the model is loaded
        return False
    return config.get("model_type") in MODEL_TYPES


def is_gguf(path: str) -> bool:
    """Return whether a model source must be converted before use."""
    return path.startswith("package:") or path.endswith(".gguf")


def source_of(source: str) -> Path:
    """Resolve a model source to a directory or file."""
    from slimectl.checkpoints.conversion.sources import resolve_source

    return resolve_source(source if Path(source).exists() else hub_model(source) or source)


def tokenizer(folder: Path) -> Any:
    """Load the tokenizer of a model directory and check its chat template. Raises CheckpointError."""
    loaded = load_tokenizer(folder)
    check_template(loaded, folder)
    return loaded


def with_template_date(settings: Settings) -> Settings:
    """Set the date of the model's chat template to today, if the template prints a date and none is set."""
    path = settings.model.path
    if path is None or settings.rollout.template_date is not None:
        return settings
    if not is_gguf(path):  # a GGUF's template is known only after conversion
        try:
            folder = model_folder(path)
        except SlimectlError:  # raised again when the model is loaded
            return settings
        files = [file for pattern in TEMPLATES for file in folder.glob(pattern)]
        if not any(b"strftime_now" in file.read_bytes() for file in files if file.is_file()):
            return settings
    rollout = settings.rollout.model_copy(update={"template_date": datetime.date.today().isoformat()})
    return settings.model_copy(update={"rollout": rollout})


def context_length(rollout: RolloutSettings, folder: Path) -> int | None:
    """Return the maximum tokens of prompt plus response: rollout.max_context_len, or the model's limit."""
    if rollout.max_context_len is not None:
        return rollout.max_context_len
    config = read_config(folder)
    length = config.get("text_config", config).get("max_position_embeddings")
    return length if isinstance(length, int) else None


def create_model(card: str, into: Path, *, seed: int) -> None:
    """Create a model with random weights, config and tokenizer from a model card in the folder `into`."""
    from slimectl.checkpoints.create import create_model

    spec = cards.load(card)
    create_model(
        spec["config"],
        into,
        seed=seed,
        tokenizer=spec.get("tokenizer", "byte"),
        image_processor=spec.get("image_processor"),
    )


def create_tiny_model(config: dict[str, Any], into: Path, *, seed: int, tokenizer: Path | None) -> None:
    """Create a model with random weights, and the given folder's tokenizer or one with a token per byte."""
    from slimectl.checkpoints.create import create_model
    from slimectl.checkpoints.hf import copy_companions

    create_model(config, into, seed=seed)
    if tokenizer is not None:
        config_bytes = (into / "config.json").read_bytes()
        for file in [*into.glob("tokenizer*"), *into.glob("*.jinja"), *into.glob("special_tokens_map.json")]:
            file.unlink()
        copy_companions(tokenizer, into)
        (into / "config.json").write_bytes(config_bytes)


def device(requested: str) -> str:
    """Return cpu or cuda. `auto` is cuda if there is a GPU. Raises SettingsError if cuda is requested but absent."""
    try:
        import torch
    except ModuleNotFoundError as error:
        raise missing_library(error, wanted_by="a model") or error from None

    if requested == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if requested == "cuda" and not torch.cuda.is_available():
        raise SettingsError("device: cuda is requested, but torch sees no GPU. Use auto or cpu.")
    return requested


def version_of(folder: Path) -> str:
    """Return the weight version of a checkpoint from training, or "0" for any other model."""
    file = trainer_folder(folder) / "trainer.json"
    return str(read_json(file).get("step", 0))[:20] if file.exists() else "0"
