"""Loads the tokenizer of a model folder: tokenizer.json decides how text becomes tokens."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from slimectl.errors import CheckpointError, first_line
from slimectl.system.model_files import policy_folder, read_json
from slimectl.system.stdio import logger

FILE, CONFIG = "tokenizer.json", "tokenizer_config.json"
TOKEN_FILES = ("special_tokens_map.json", "added_tokens.json")
VOCABULARIES = ("tokenizer.*", "vocab.*", "*.tiktoken", "*.model", "tekken.json")
"""Files that hold the vocabulary of a model."""
TEMPLATE = "chat_template.json"
"""Chat template of a vision model's processor, for checkpoints whose tokenizer has none."""
ROLES = ("bos_token", "eos_token", "pad_token")
"""Special tokens that the class of a tokenizer may name if no file does."""
TOKENIZER_REMEDY = "copy tokenizer.json and tokenizer_config.json of its Hugging Face model into it"
PANIC = "PanicException"
"""Name of the error that the tokenizers library raises for some broken files. It is not an Exception."""
PROBES = (
    "The capital of France is 1234\n\nand  Élise's été.\tfi ﬁ",
    " def f(x):\n    return {'a': x}  # 日本語 🙂",
    "A<s>b</s> C",
)
"""Texts with which two tokenizers are compared: blanks, digits, line breaks, accents, ligatures, code, bytes."""


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer of a model folder, without running code of the model.

    transformers 5 lets the class that tokenizer_config.json names replace the pre-tokenizer, normalizer and decoder of
    tokenizer.json. So if that file exists, it is loaded directly, and the class only adds the special tokens that no
    file defines. Raises CheckpointError.
    """
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        with without_panics():
            tokenizer = _loaded(folder, transformers)
    except BaseException as error:
        _pass_on_interrupts(error)
        if not has_tokenizer(folder):
            raise CheckpointError(f"{folder}: no tokenizer; {TOKENIZER_REMEDY}") from error
        for name in (FILE, CONFIG, *TOKEN_FILES):
            if (folder / name).is_file():
                read_json(folder / name)  # reports the broken file
        raise CheckpointError(
            f"{folder}: the tokenizer cannot be loaded: {first_line(error, 300)}. Download its files again"
        ) from error
    if not tokenizer.chat_template and (folder / TEMPLATE).is_file():
        template = read_json(folder / TEMPLATE).get("chat_template")
        tokenizer.chat_template = template if isinstance(template, str) else None
    return tokenizer


def token_decoder(folder: Path) -> Any:
    """Load a decoder of a model folder's tokens, without transformers where the files allow it.

    Importing transformers takes seconds of CPU time, which a viewer would take from a run on the same machine.
    """
    import tokenizers

    try:
        with without_panics():
            decoder = tokenizers.Tokenizer.from_file(str(folder / FILE))
        if all(decoder.token_to_id(token) is not None for token in _named_tokens(folder)):
            return decoder
    except BaseException as error:
        _pass_on_interrupts(error)
    return load_tokenizer(folder)


def tokenizer_of(name_or_path: str) -> Any:
    """Load the tokenizer of a model folder or of a model in Hugging Face's cache. Raises CheckpointError."""
    folder = Path(name_or_path)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        try:
            folder = Path(snapshot_download(name_or_path, local_files_only=True))
        except (OSError, ValueError):
            raise CheckpointError(f"{name_or_path}: no such model folder") from None
    return load_tokenizer(policy_folder(folder))


def has_tokenizer(folder: Path) -> bool:
    """Return whether a model folder has a vocabulary."""
    return any(any(folder.glob(pattern)) for pattern in VOCABULARIES)


def _loaded(folder: Path, transformers: Any) -> Any:
    options = {"local_files_only": True, "trust_remote_code": False}
    if not (folder / FILE).is_file():
        return _from_vocabulary(folder, transformers.AutoTokenizer, options)
    by_class: Any = None
    try:
        by_class = transformers.AutoTokenizer.from_pretrained(folder, **options)
        if "__init__" not in vars(type(by_class)) or type(by_class) is transformers.PreTrainedTokenizerFast:
            return by_class  # a class without a constructor uses the file unchanged
    except BaseException as error:  # a class of the model's own code, or one that cannot read the file
        _pass_on_interrupts(error)
        logger.debug(f"{folder}: {first_line(error, 300)}")
    named = {} if by_class is None else by_class.special_tokens_map
    by_file = transformers.PreTrainedTokenizerFast.from_pretrained(folder, **options)
    vocabulary = by_file.get_vocab()
    defaults = {role: named[role] for role in ROLES if named.get(role) in vocabulary and getattr(by_file, role) is None}
    if defaults:
        by_file = transformers.PreTrainedTokenizerFast.from_pretrained(folder, **options, **defaults)
    if by_class is not None and not _agree(by_class, by_file):
        by_file.replaced_class = type(by_class).__name__
        _announce_file(str(folder), by_file.replaced_class)
    return by_file


@functools.cache
def corrected_config(folder: Path) -> dict[str, Any] | None:
    """Return a tokenizer_config.json with which transformers encodes text as tokenizer.json does.

    None if the model's own does so.
    """
    if not (folder / FILE).is_file():
        return None
    tokenizer = load_tokenizer(folder)
    if not hasattr(tokenizer, "replaced_class"):
        return None
    config = read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    named = {role: getattr(tokenizer, role) for role in ROLES if getattr(tokenizer, role) is not None}
    return {**named, **config, "tokenizer_class": "PreTrainedTokenizerFast"}


def _from_vocabulary(folder: Path, auto: Any, options: Mapping[str, Any]) -> Any:
    """Load a tokenizer without tokenizer.json. A SentencePiece file must be read as sentencepiece reads it."""
    pieces = next(folder.glob("*.model"), None)
    if pieces is not None and find_spec("sentencepiece") is None:
        raise CheckpointError(f"{pieces.name} needs the package sentencepiece. Install it, or {TOKENIZER_REMEDY}")
    tokenizer = auto.from_pretrained(folder, **options)
    # A class that finds no file of its own builds a vocabulary of its special tokens.
    if not tokenizer.get_vocab().keys() - tokenizer.added_tokens_encoder.keys():
        raise CheckpointError(f"{type(tokenizer).__name__} finds no vocabulary; {TOKENIZER_REMEDY}")
    if pieces is not None:
        from sentencepiece import SentencePieceProcessor

        processor = SentencePieceProcessor(model_file=str(pieces))
        # transformers 5 writes one blank at the start of a text where sentencepiece writes two.
        for text in (probe.strip() for probe in PROBES[:2]):
            tokens = tokenizer.encode(text, add_special_tokens=False)
            if tokenizer.convert_ids_to_tokens(tokens) != processor.id_to_piece(processor.encode(text)):
                name = type(tokenizer).__name__
                raise CheckpointError(f"{name} encodes text differently from {pieces.name}; {TOKENIZER_REMEDY}")
    return tokenizer


def _pass_on_interrupts(error: BaseException) -> None:
    if not isinstance(error, Exception) and type(error).__name__ != PANIC:
        raise error


def _agree(first: Any, second: Any) -> bool:
    """Return whether two tokenizers encode and decode the probes alike."""

    def results(tokenizer: Any) -> list[tuple[list[int], str]]:
        tokens = [tokenizer.encode(text, add_special_tokens=False) for text in PROBES]
        return [(each, tokenizer.backend_tokenizer.decode(each)) for each in tokens]

    try:
        return results(first) == results(second)
    except Exception:  # a class that loads the file may still fail to encode with it
        return False


@functools.cache
def _announce_file(folder: str, name: str) -> None:
    """Log, once, that the class of transformers is not used."""
    logger.warning(
        f"{folder}: {FILE} encodes text. transformers' {name}, which the model's configuration names, encodes some "
        "text differently. So do servers that you start yourself, if you send them text."
    )


def _named_tokens(folder: Path) -> set[str]:
    """Return the added and special tokens that the other files of a tokenizer name."""
    tokens: set[str] = set()
    for name in (CONFIG, *TOKEN_FILES):
        values = read_json(folder / name) if (folder / name).is_file() else {}
        if name == "added_tokens.json":
            tokens |= values.keys()
            continue
        added = values.get("added_tokens_decoder")
        texts = [*added.values()] if isinstance(added, dict) else []
        for key, value in values.items():
            if key.endswith("_token"):
                texts.append(value)
            elif key in ("additional_special_tokens", "extra_special_tokens") and isinstance(value, list | dict):
                texts += value.values() if isinstance(value, dict) else value
        contents = (text.get("content") if isinstance(text, Mapping) else text for text in texts)
        tokens |= {text for text in contents if isinstance(text, str)}
    return tokens


@contextmanager
def without_panics() -> Iterator[None]:
    """Suppress what the tokenizers library (0.22) writes to stderr when it panics at a broken file.

    It writes to the descriptor itself. Other output in the meantime is passed on.
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
                if text := captured.read():
                    with suppress(OSError):  # stderr is on a full disk
                        os.write(2, text)
