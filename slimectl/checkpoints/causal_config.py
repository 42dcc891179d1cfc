"""The configuration of a causal language model, as transformers reads it from a model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slimectl.architectures.config import raw_config
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
    check_known(folder)
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


def check_known(folder: Path) -> None:
    """Raise CheckpointError for a model that the installed transformers does not know."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = raw_config(folder)
    model_type = config.get("model_type")
    if model_type in CONFIG_MAPPING:
        return
    remedy = f"transformers {transformers.__version__} does not know it. Upgrade transformers, or give another model"
    if config.get("auto_map"):
        remedy = (
            "it needs Python code of its checkpoint (auto_map), which slimectl does not run. Upgrade transformers to"
            " a version that has this model, or give another model"
        )
    raise CheckpointError(f"{folder}: model_type {str(model_type)!r:.80}: {remedy}.")


def cannot_build(folder: Path, error: Exception) -> CheckpointError:
    """Return the error for a model that transformers cannot build."""
    return CheckpointError(
        f"{folder}: transformers cannot build this model ({first_line(error):.300}). Upgrade transformers,"
        " or give a checkpoint of a known architecture."
    )
