"""Settings to engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimectl.errors import CheckpointError
from slimectl.settings import Settings
from slimectl.wiring.models import device, first_line, version_of

if TYPE_CHECKING:
    from slimectl.engines.embedded.engine import EmbeddedEngine
    from slimectl.ports import Engine, Executor


def engine(settings: Settings, folder: Path, text: Any, *, load: bool = True) -> EmbeddedEngine:
    """The engine for a model directory, with its weights unless the first push brings them."""
    import torch
    from transformers import AutoConfig

    from slimectl.checkpoints.hf import HFCheckpoint
    from slimectl.engines.embedded.engine import EmbeddedEngine

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise CheckpointError(f"{folder}: config.json cannot be used: {first_line(error)}") from error
    made = EmbeddedEngine(
        config,
        text,
        dtype=getattr(torch, settings.engine.dtype),
        device=device(settings.engine.device),
        max_running=settings.engine.max_running_requests,
        max_context=settings.rollout.max_context_len,
        end_token_ids=_end_tokens(folder),
    )
    if load:
        made.load_weights(HFCheckpoint().read(folder), version=version_of(folder))
    return made


def _end_tokens(folder: Path) -> list[int]:
    """The end tokens that generation_config.json adds to those of the config: chat models often have several."""
    import json

    file = folder / "generation_config.json"
    given = json.loads(file.read_text()).get("eos_token_id") if file.exists() else None
    return [given] if isinstance(given, int) else list(given or [])


def engine_gpus(settings: Settings) -> float:
    """GPUs that an engine in an actor of its own asks for."""
    return 1.0 if device(settings.engine.device) == "cuda" else 0.0


def fleet(settings: Settings, model: Path, *, executor: Executor, folder: Path) -> Any:
    """The servers that the settings ask for, up and waiting for weights; None where an engine needs no server."""
    return None


def client(settings: Settings, model: Path, addresses: Sequence[str], workers: Sequence[str]) -> Any:
    """An engine that is reached over HTTP."""
    raise NotImplementedError


@contextmanager
def engines(settings: Settings, model: Path, text: Any) -> Iterator[Engine]:
    """An engine with the model's own weights, for a stage that stands alone; its servers end with the block."""
    yield engine(settings, model, text)
