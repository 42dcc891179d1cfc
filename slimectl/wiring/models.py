"""Model directories: found, read, made and converted."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from slimectl import cards
from slimectl.data.integrity import check_integrity
from slimectl.data.template_check import check_template
from slimectl.errors import CheckpointError, SettingsError
from slimectl.model_files import check_model_files, read_json
from slimectl.settings import Settings
from slimectl.weights.complete import raw_config

PANIC = "PanicException"
"""What the tokenizers library raises at some broken files; it is no Exception."""


def model_folder(path: str | None, *, setting: str = "model.path", verify: bool = False) -> Path:
    """The Hugging Face directory that a setting names, once its files may be opened and match their manifest.

    `verify` hashes weights of any size. Raises SettingsError or CheckpointError.
    """
    if path is None:
        way = {"algorithm.opd_teacher_load": "name the teacher's, or its servers by algorithm.opd_teacher_url"}
        found = way.get(setting, "add --model DIR, a Hugging Face checkpoint directory")
        raise SettingsError(f"{setting}: no model is given; {found}")
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
    """The directory or file that a model source names."""
    from slimectl.checkpoints.locate import resolve_source

    return resolve_source(source)


def tokenizer(folder: Path) -> Any:
    """The tokenizer of a model directory; transformers' chatter is kept away from the terminal."""
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
    """Keep what the tokenizers library (0.22) writes to stderr when it panics at a broken file out of the terminal.

    It writes to the descriptor itself; what else is written there in the meantime is passed on.
    """
    try:
        sys.stderr.flush()
        before = os.dup(2)
    except (AttributeError, OSError):
        yield  # stderr is closed
        return
    with ExitStack() as closing, TemporaryFile() as words:
        closing.callback(os.close, before)
        os.dup2(words.fileno(), 2)
        panicked = False
        try:
            yield
        except BaseException as error:
            panicked = type(error).__name__ == PANIC
            raise
        finally:
            sys.stderr.flush()
            os.dup2(before, 2)
            if not panicked:
                words.seek(0)
                os.write(2, words.read())


def context_length(settings: Settings, folder: Path) -> int | None:
    """Tokens of prompt and answer together: rollout.max_context_len, or what the model in a directory was made for."""
    from slimectl.weights.complete import read_config

    if settings.rollout.max_context_len is not None:
        return settings.rollout.max_context_len
    config = read_config(folder)
    length = config.get("text_config", config).get("max_position_embeddings")
    return length if isinstance(length, int) else None


def new_model(card: str, into: Path, *, seed: int) -> None:
    """Random weights for a model card, with config and tokenizer, into the folder `into`."""
    from slimectl.checkpoints.create import create_model

    facts = cards.load(card)
    create_model(facts["config"], into, seed=seed, tokenizer=facts.get("tokenizer", "byte"))


def convert(source: str, target: Path, **options: Any) -> dict[str, Any]:
    """Any readable model source to a Hugging Face directory at `target`."""
    from slimectl.conversions import convert_checkpoint

    return convert_checkpoint(source, target, **options)


def device(wanted: str) -> str:
    """`auto` is the GPU if there is one. Raises SettingsError if cuda is asked for and absent."""
    import torch

    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise SettingsError("device: cuda is asked for, but torch sees no GPU; use auto or cpu")
    return wanted


def version_of(folder: Path) -> str:
    """The weight version of a checkpoint that training wrote; "0" for a model from elsewhere."""
    file = folder / "trainer.json"
    return str(read_json(file).get("step", 0))[:20] if file.exists() else "0"


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
