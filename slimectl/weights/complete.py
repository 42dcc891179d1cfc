"""config.json made whole: the keys that it leaves to its class's defaults filled in."""

from __future__ import annotations

import json
from pathlib import Path

from slimectl.errors import CheckpointError
from slimectl.weights.architecture import Config

STAND_INS = {"kimi_k2": "deepseek_v3", "mimo": "qwen2"}
"""Architectures whose own class travels with the checkpoint, and the class of transformers that has their defaults."""


def completed(raw: Config) -> Config:
    """The configuration with every key of its class; `model_type` stays what it was. Raises CheckpointError."""
    from transformers import AutoConfig

    given = raw.get("model_type", "")
    try:
        whole = AutoConfig.for_model(**{**raw, "model_type": STAND_INS.get(given, given)}).to_dict()
    except Exception as error:
        line = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"config.json: model_type {given!r} cannot be used ({line})") from error
    return {**whole, "model_type": given}


def read_config(folder: Path) -> Config:
    """The complete configuration of a Hugging Face directory. Raises CheckpointError."""
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder}: no config.json; give a Hugging Face checkpoint directory") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON ({error}); copy it again") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: not a JSON object; copy it again")
    return completed(raw)
