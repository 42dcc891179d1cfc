"""The configuration of a causal language model, as transformers reads it from a model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slimectl.architectures.config import check_known, raw_config
from slimectl.architectures.image_tokens import MODEL_TYPES
from slimectl.errors import CheckpointError, first_line


def causal_config(folder: Path) -> Any:
    """Return transformers' configuration of a causal language model, or of a vision model that is trained here.

    Raises CheckpointError, with what to do, for models that the installed transformers cannot build.
    """
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder}: no config.json. Give a Hugging Face checkpoint directory.")
    check_known(raw_config(folder), str(folder))
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise cannot_build(folder, error) from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and config.model_type not in MODEL_TYPES:
        raise CheckpointError(
            f"{folder}: {config.model_type} is not a causal language model in transformers. Give a model that continues"
            " text."
        )
    return config


def cannot_build(folder: Path, error: Exception) -> CheckpointError:
    """Return the error for a model that transformers cannot build."""
    return CheckpointError(
        f"{folder}: transformers cannot build this model ({first_line(error):.300}). Upgrade transformers,"
        " or give a checkpoint of a known architecture."
    )
