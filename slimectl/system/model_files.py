"""Safe access to the files of a model folder: file checks, symbolic links, size limits, JSON.

A folder may come from an untrusted source, so no file in it is opened before these rules are checked:

- A file is a regular file. Opening a FIFO would wait for a writer that never comes. A device never ends.
- A symbolic link leads to a file of the same folder, or to a blob of a Hugging Face cache (models--NAME/blobs/HASH, to
  which the files of its snapshots are links). Any other link could copy a private file of this machine.
- JSON is bounded in size before it is parsed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

from slimectl.errors import CheckpointError

TRAINER_STATE = "trainer"
"""Folder of a trainer's optimizer and counts: not among the files of the model, which other programs load."""

MAX_JSON_BYTES = 64 * 1024**2
"""The largest known shard index has 12 MB."""
MAX_CONFIG_BYTES = 4 * 1024**2
MAX_TEXT_BYTES = 512 * 1024**2
"""For files that libraries read whole: tokenizer.json of a vocabulary of 262 144 tokens has 34 MB."""

_READ = re.compile(
    r"tokenizer.*|vocab.*|merges\.txt|\.metadata|latest_checkpointed_iteration\.txt"
    r"|.*\.(json|jinja|model|safetensors|distcp|pt|tiktoken)"
)
"""Names that slimectl or a library below it opens."""
_WEIGHTS = (".safetensors", ".distcp")
_SMALL = re.compile(r"(config|generation_config|tokenizer_config|adapter_config|special_tokens_map)\.json")
_BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_KINDS = {
    stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
}  # fmt: skip


def check_model_files(folder: Path) -> None:
    """Check all model files of a folder with `check_file` and size limits.

    Raises CheckpointError. The folder itself may be a link (runs/NAME/latest).
    """
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be listed ({error.strerror}). Give a model directory.") from error
    for name in names:
        path = folder / name
        if name.endswith("chat_templates") and path.is_dir():
            _check_link(path)
            check_model_files(path)
        elif _READ.fullmatch(name) and not (path.is_dir() and not path.is_symlink() and "." not in name):
            _check_bounds(path, check_file(path))


def check_file(path: Path) -> os.stat_result:
    """Return the status of a file that may be opened. Raises CheckpointError, or FileNotFoundError if there is none."""
    try:
        _check_link(path)
        status = path.stat()
    except FileNotFoundError:
        if path.is_symlink():
            raise CheckpointError(
                f"{path}: a broken link. Copy the folder again, including the linked files."
            ) from None
        raise
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}). Copy the folder again.") from error
    _check_kind(path, status)
    return status


def open_file(path: Path) -> BinaryIO:
    """Open a file that `check_file` accepts. Never blocks. Raises CheckpointError or FileNotFoundError."""
    check_file(path)
    try:
        # Non-blocking, and checked again below: the file may have been replaced since.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}). Check its permissions.") from error
    try:
        _check_kind(path, os.fstat(descriptor))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_json(path: Path, *, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Read the object in a JSON file. Raises CheckpointError, or FileNotFoundError if there is none."""
    with open_file(path) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise CheckpointError(f"{path}: over {max_bytes} bytes, which is too large for this file. Download it again.")
    try:
        value = json.loads(data)
    except RecursionError:
        raise CheckpointError(f"{path}: not JSON (nested too deeply). Download it again.") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON ({error}). Download it again.") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: not a JSON object. Download it again.")
    return value


def adapter_remedy(folder: Path) -> str:
    """Return the end of an error message for a directory with a LoRA adapter instead of a model, else ""."""
    if not (folder / "adapter_config.json").is_file():
        return ""
    if (folder.parent / "config.json").is_file():
        return f"this is a LoRA adapter. The merged model is {folder.parent}"
    config = read_json(folder / "adapter_config.json", max_bytes=MAX_CONFIG_BYTES)
    base, rank = config.get("base_model_name_or_path"), config.get("r")
    return (
        f"this is a LoRA adapter of {base}. Train it with --model {base} -s train.lora_rank={rank}"
        f" -s train.lora_load={folder}, or merge it with peft's merge_and_unload to use it as a model"
    )


def end_token_ids(folder: Path) -> list[int]:
    """Return the end tokens in a model's config.json and generation_config.json. Chat models often have several.

    Raises CheckpointError for anything but tokens.
    """
    tokens: list[int] = []
    for name in ("config.json", "generation_config.json"):
        file = folder / name
        config = read_json(file, max_bytes=MAX_CONFIG_BYTES) if file.exists() else {}
        value, text_config = config.get("eos_token_id"), config.get("text_config")
        if value is None and isinstance(text_config, dict):
            value = text_config.get("eos_token_id")
        listed = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token, int) and not isinstance(token, bool) and 0 <= token < 2**31 for token in listed):
            raise CheckpointError(f"{file}: eos_token_id is not a token or a list of tokens. Copy the file again.")
        tokens += listed
    return tokens


def copy_file(source: Path, target: Path) -> None:
    """Copy a file that `check_file` accepts. Raises CheckpointError."""
    with open_file(source) as file, target.open("wb") as copy:
        shutil.copyfileobj(file, copy)


def plain_name(name: object) -> TypeGuard[str]:
    """Return whether `name` is a plain file name without path separators.

    >>> [plain_name(name) for name in ("__0_0.distcp", "../secret", "/etc/passwd", "..", "", 7)]
    [True, False, False, False, False, False]
    """
    return isinstance(name, str) and name not in ("", ".", "..") and not re.search(r"[/\\\0]", name)


def leads_out(path: Path) -> bool:
    """Return whether a file is a link out of its folder. Links into a Hugging Face cache do not count.

    Raises OSError or RuntimeError for a broken link.
    """
    if not path.is_symlink():
        return False
    target = path.resolve()
    return not target.is_relative_to(path.parent.resolve()) and not _is_cached_blob(target)


def _check_link(path: Path) -> None:
    """Raises CheckpointError for a link out of its folder."""
    try:
        if leads_out(path):
            target = path.resolve()
            raise CheckpointError(
                f"{path}: a link out of its folder, to {target}. Put a copy of the file there instead."
            )
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{path}: a broken link ({error}). Put the file itself there.") from error


def _is_cached_blob(target: Path) -> bool:
    blobs = target.parent
    return blobs.name == "blobs" and blobs.parent.name.startswith("models--") and bool(_BLOB.fullmatch(target.name))


def _check_kind(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise CheckpointError(f"{path}: {kind}, not a file. Put the model's own file there.")


def _check_bounds(path: Path, status: os.stat_result) -> None:
    """Raises CheckpointError for an oversized file of a kind that libraries read into memory whole."""
    if path.suffix in (*_WEIGHTS, ".pt") or path.name == ".metadata":
        return
    limit = MAX_CONFIG_BYTES if _SMALL.fullmatch(path.name) else MAX_TEXT_BYTES
    if status.st_size > limit:
        raise CheckpointError(f"{path}: {status.st_size} bytes, but at most {limit} are expected. Download it again.")


def trainer_folder(model: Path) -> Path:
    """Return the folder with the trainer's state of a model folder: optimizer, steps, value head.

    It is TRAINER_STATE in the model folder, or next to the model in a step of a run. Earlier versions wrote these files
    into the model folder itself.
    """
    candidates = (model / TRAINER_STATE, model.parent / TRAINER_STATE / model.name)
    return next((folder for folder in candidates if folder.is_dir()), model)


def policy_folder(path: Path) -> Path:
    """Return the policy of a run's checkpoint, or of the newest one if `path` is a run, else `path` itself."""
    path = follow_links(path)
    if (path / "policy" / "config.json").exists():
        return path / "policy"
    newest = path / (linked_step(path) or ".") / "policy"
    return newest if (newest / "config.json").exists() and not (path / "config.json").exists() else path


LINKS = ("latest", "best")
"""Links of a run to its checkpoints. Without links, they are files that contain the checkpoint's name."""


def linked_step(run: Path, link: str = "latest") -> str | None:
    """Return the name of the checkpoint that a link of a run points to, or None if there is none."""
    file = run / link
    try:
        name = os.readlink(file) if file.is_symlink() else _first_line(file)
    except OSError:
        return None
    return name if re.fullmatch(r"step_\d+", name) else None  # a link must not leave the run


def _first_line(file: Path) -> str:
    if not file.is_file():
        return ""
    with file.open("rb") as text:
        return text.readline(100).decode(errors="replace").rstrip("\n")


def follow_links(path: Path) -> Path:
    """Return a path in which a run's link that is a file is replaced by the checkpoint that it points to.

    The system follows symbolic links itself.
    """
    for depth, part in enumerate(path.parts):
        run = Path(*path.parts[:depth])
        if part in LINKS and not (run / part).is_symlink() and (step := linked_step(run, part)):
            return run.joinpath(step, *path.parts[depth + 1 :])
    return path
