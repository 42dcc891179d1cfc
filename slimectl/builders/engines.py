"""Builds the embedded engine from settings."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimectl.builders.models import device, first_line, version_of
from slimectl.errors import CheckpointError, SlimectlError
from slimectl.model_files import MAX_CONFIG_BYTES, read_json
from slimectl.settings import Settings

if TYPE_CHECKING:
    from slimectl.engines.embedded.engine import EmbeddedEngine


def engine(settings: Settings, folder: Path, text: Any, *, load: bool = True) -> EmbeddedEngine:
    """Build the engine for a model directory; with `load`, read its weights, else the first push brings them."""
    import torch
    from transformers import AutoConfig

    from slimectl.checkpoints.hf import HFCheckpoint
    from slimectl.engines.embedded.engine import EmbeddedEngine

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        embedded = EmbeddedEngine(
            config,
            text,
            dtype=getattr(torch, settings.engine.dtype),
            device=device(settings.engine.device),
            max_running=settings.engine.max_running_requests,
            max_context=settings.rollout.max_context_len,
            end_token_ids=_end_tokens(folder),
        )
    except SlimectlError:
        raise
    except Exception as error:
        raise CheckpointError(f"{folder}: config.json cannot be used: {first_line(error)}") from error
    if load:
        embedded.load_weights(HFCheckpoint().read(folder), version=version_of(folder))
    return embedded


def _end_tokens(folder: Path) -> list[int]:
    """Return the end tokens that generation_config.json adds to the config's: chat models often have several."""
    file = folder / "generation_config.json"
    value = read_json(file, max_bytes=MAX_CONFIG_BYTES).get("eos_token_id") if file.exists() else None
    tokens = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) and 0 <= token < 2**31 for token in tokens):
        raise CheckpointError(f"{file}: eos_token_id is not a token or a list of tokens; copy the file again")
    return tokens
