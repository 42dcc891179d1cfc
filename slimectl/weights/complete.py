"""Completes config.json with the defaults of its class."""

from __future__ import annotations

import os
from pathlib import Path

from slimectl.errors import CheckpointError
from slimectl.model_files import MAX_CONFIG_BYTES, open_file, read_json
from slimectl.weights.architecture import Config
from slimectl.weights.config_checks import check_config

STAND_INS = {"kimi_k2": "deepseek_v3", "mimo": "qwen2"}
"""Architectures with a class in the checkpoint only, and the class of transformers with the same defaults."""


def completed(raw: Config) -> Config:
    """Return the configuration with every key of its class; `model_type` is unchanged. Raises CheckpointError."""
    from transformers import AutoConfig

    model_type = raw.get("model_type", "")
    try:
        complete = AutoConfig.for_model(**{**raw, "model_type": STAND_INS.get(model_type, model_type)}).to_dict()
    except Exception as error:
        line = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"config.json: model_type {model_type!r} cannot be used ({line})") from error
    return {**complete, "model_type": model_type}


def read_config(folder: Path) -> Config:
    """Read the complete configuration of a Hugging Face directory. Raises CheckpointError."""
    return completed(raw_config(folder))


def raw_config(folder: Path) -> Config:
    """Read config.json unchanged, and check it against the size of the weights beside it. Raises CheckpointError."""
    path = folder / "config.json"
    try:
        raw = read_json(path, max_bytes=MAX_CONFIG_BYTES)
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: no config.json; this is not a Hugging Face checkpoint; give one") from None
    check_config(raw, str(path), weight_bytes=_weight_bytes(folder))
    return raw


def _weight_bytes(folder: Path) -> int | None:
    """Bytes of all safetensors in the folder; None without any (they will be pushed), or if a header is cut short."""
    sizes = []
    for path in folder.glob("*.safetensors"):
        with open_file(path) as file:
            sizes.append(os.fstat(file.fileno()).st_size)
            if 8 + int.from_bytes(file.read(8), "little") > sizes[-1]:
                return None
    return sum(sizes) if sizes else None
