"""Finds, reads, creates and converts model directories."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from slimectl.architectures import cards
from slimectl.architectures.config import raw_config
from slimectl.data.integrity import check_integrity
from slimectl.data.template_check import check_template
from slimectl.errors import CheckpointError, SettingsError
from slimectl.model_files import check_model_files, read_json
from slimectl.settings import Settings

PANIC = "PanicException"
"""Name of the error that the tokenizers library raises at some broken files; it is no Exception."""


def model_folder(path: str | None, *, setting: str = "model.path", verify: bool = False) -> Path:
    """Return the Hugging Face directory that a setting names, after checking its files and their manifest.

    `verify` hashes weights of any size. Raises SettingsError or CheckpointError.
    """
    if path is None:
        remedies = {"algorithm.opd_teacher_load": "name the teacher's, or its servers by algorithm.opd_teacher_url"}
        remedy = remedies.get(setting, "add --model DIR, a Hugging Face checkpoint directory")
        raise SettingsError(f"{setting}: no model is given; {remedy}")
    folder = Path(path)
    if is_gguf(path):
        raise CheckpointError(f"{path}: is a GGUF; convert it first: slimectl convert {path} DIR --to hf")
    if not folder.is_dir():
        raise CheckpointError(f"{path}: no such model directory; give a Hugging Face checkpoint directory")
    if (folder / "policy" / "config.json").exists():
        folder = folder / "policy"  # a checkpoint of a run: runs/NAME/step_000042, or runs/NAME/latest
    if not (folder / "config.json").exists():
        kind = "a torch_dist checkpoint" if (folder / ".metadata").exists() else "not a Hugging Face checkpoint"
        raise CheckpointError(f"{path}: no config.json; this is {kind}")
    check_model_files(folder)
    raw_config(folder)
    check_integrity(folder, full=verify)
    return folder


def is_gguf(path: str) -> bool:
    """Whether a model source has to be converted before it can be used."""
    return path.startswith("package:") or path.endswith(".gguf")


def source_of(source: str) -> Path:
    """Resolve a model source to a directory or file."""
    from slimectl.conversions.sources import resolve_source

    return resolve_source(source)


def tokenizer(folder: Path) -> Any:
    """Load the tokenizer of a model directory, without transformers' messages on the terminal."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        with _without_panics():
            loaded = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != PANIC:
            raise
        raise CheckpointError(f"{folder}: the tokenizer cannot be loaded: {first_line(error)}") from error
    check_template(loaded, folder)
    return loaded


@contextmanager
def _without_panics() -> Iterator[None]:
    """Suppress what the tokenizers library (0.22) writes to stderr when it panics at a broken file.

    It writes to the descriptor itself; other output in the meantime is passed on.
    """
    try:
        sys.stderr.flush()
        saved_stderr = os.dup(2)
    except (AttributeError, OSError):
        yield  # stderr is closed
        return
    with ExitStack() as closing, TemporaryFile() as captured:
        closing.callback(os.close, saved_stderr)
        os.dup2(captured.fileno(), 2)
        panicked = False
        try:
            yield
        except BaseException as error:
            panicked = type(error).__name__ == PANIC
            raise
        finally:
            sys.stderr.flush()
            os.dup2(saved_stderr, 2)
            if not panicked:
                captured.seek(0)
                os.write(2, captured.read())


def context_length(settings: Settings, folder: Path) -> int | None:
    """Return the maximum tokens of prompt plus answer: rollout.max_context_len, else that of the model's config."""
    from slimectl.architectures.config import read_config

    if settings.rollout.max_context_len is not None:
        return settings.rollout.max_context_len
    config = read_config(folder)
    length = config.get("text_config", config).get("max_position_embeddings")
    return length if isinstance(length, int) else None


def create_model(card: str, into: Path, *, seed: int) -> None:
    """Create a model with random weights from a model card, with config and tokenizer, in the folder `into`."""
    from slimectl.checkpoints.create import create_model

    spec = cards.load(card)
    create_model(spec["config"], into, seed=seed, tokenizer=spec.get("tokenizer", "byte"))


def convert(source: str, target: Path, **options: Any) -> dict[str, Any]:
    """Convert any readable model source to a Hugging Face directory at `target`."""
    from slimectl.conversions import convert_checkpoint

    return convert_checkpoint(source, target, **options)


def device(requested: str) -> str:
    """Return cpu or cuda; `auto` is the GPU if there is one. Raises SettingsError if cuda is requested and absent."""
    import torch

    if requested == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if requested == "cuda" and not torch.cuda.is_available():
        raise SettingsError("device: cuda is asked for, but torch sees no GPU; use auto or cpu")
    return requested


def version_of(folder: Path) -> str:
    """Return the weight version of a checkpoint that training wrote; "0" for a model from elsewhere."""
    file = folder / "trainer.json"
    return str(read_json(file).get("step", 0))[:20] if file.exists() else "0"


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
