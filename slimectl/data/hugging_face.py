"""Finds data sets and models in Hugging Face's formats: cached snapshots, saved folders, data files on the hub."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any, Literal

from slimectl.data.jsonl import parse_line
from slimectl.errors import SettingsError, first_line
from slimectl.system.stdio import logger

PARQUET = (".parquet", ".pq")
ARROW = (".arrow", ".arrows", ".feather", ".ipc")
DELIMITERS = {".csv": ",", ".tsv": "\t"}
JSON = (".json", ".jsonl", ".ndjson")
DATA_FILE = re.compile(
    f".*({'|'.join(map(re.escape, [*PARQUET, *ARROW, *DELIMITERS, *JSON]))})(\\.gz|\\.zst)?", re.IGNORECASE
)
HUB_NAME = re.compile(r"(?P<repository>[\w-][\w.-]*/[\w-][\w.-]*)(/(?P<files>.+))?")
MODEL_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "README.md"]
"""Files of a model to download. Weights in other formats are left out."""
TRAIN = re.compile(r"(^|[/_.-])train([/_.-]|$)")


def hub_name(name: str) -> tuple[str, str | None] | None:
    """Return (repository, files in it) of a name such as `openai/gsm8k/main/train*`, or None for a local path."""
    match = HUB_NAME.fullmatch(name)
    if match is None or Path(name.partition("/")[0]).exists() or DATA_FILE.fullmatch(match["repository"]):
        return None
    return match["repository"], match["files"]


@cache  # a failure is reported once
def snapshot(repository: str, kind: Literal["dataset", "model"]) -> Path | None:
    """Return the folder of a hub repository, from the cache or downloaded, or None if neither is possible.

    With HF_HUB_OFFLINE=1 the network is not used.
    """
    from huggingface_hub import constants, snapshot_download

    files = MODEL_FILES if kind == "model" else None
    try:
        return Path(snapshot_download(repository, repo_type=kind, local_files_only=True))
    except (OSError, ValueError):
        if constants.HF_HUB_OFFLINE:
            return None
    try:
        logger.info(f"{repository}: not found locally or in the Hugging Face cache. Downloading from the hub.")
        return Path(snapshot_download(repository, repo_type=kind, allow_patterns=files))
    except (OSError, ValueError) as error:
        logger.warning(f"{repository}: cannot be downloaded: {first_line(error)}")
        return None


def fetch_command(repository: str, kind: Literal["dataset", "model"]) -> str:
    """Return the command that downloads a repository into the cache."""
    return f"hf download {repository}" + (" --repo-type dataset" if kind == "dataset" else "")


def or_fetch(model: str) -> str:
    """Return the end of a message about a missing model: how to download it, if the name may be a hub repository."""
    name = hub_name(model)
    return f", or download it from the hub: {fetch_command(model, 'model')}" if name and not name[1] else ""


def hub_files(source: str) -> list[Path]:
    """Return the data files of a hub name, or none if it is not a hub name.

    `org/name` gives the files of the training split, if there is one. `org/name/GLOB` gives files of the repository.
    Raises SettingsError if it cannot be downloaded, or if it has several parts and none is chosen.
    """
    name = hub_name(source)
    if name is None:
        return []
    repository, pattern = name
    folder = snapshot(repository, "dataset")
    if folder is None:
        raise SettingsError(
            f"{source}: no such prompt file, and no data set of this name in the Hugging Face cache. Download it where "
            f"the hub can be reached: {fetch_command(repository, 'dataset')}"
        )
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if DATA_FILE.fullmatch(path.name))
    matches = [
        file for file in names if pattern is None or fnmatch(file, pattern) or Path(pattern) in Path(file).parents
    ]
    if pattern is None:
        matches = [file for file in names if TRAIN.search(file)] or names
    if not matches:
        raise SettingsError(f"{source}: no data file of {repository} matches. It has {', '.join(names[:12]) or 'none'}")
    if pattern is None and len({Path(file).parent for file in matches}) > 1:
        some = ", ".join(f"{repository}/{file}" for file in matches[:6])
        raise SettingsError(f"{source}: has several parts. Choose one of them: {some}")
    return [folder / file for file in matches]


def saved_files(folder: Path) -> list[Path]:
    """Return the Arrow files of a folder written by `save_to_disk`, or none for other folders.

    Raises SettingsError for a folder with several splits.
    """
    splits = folder / "dataset_dict.json"
    if splits.is_file():
        names = [str(name) for name in _object(splits).get("splits", [])]
        if len(names) != 1:
            raise SettingsError(
                f"{folder}: has the splits {', '.join(names)}. Choose one: {folder / (names or ['?'])[0]}"
            )
        folder = folder / Path(names[0]).name
    state = folder / "state.json"
    if not state.is_file():
        return []
    files = _object(state).get("_data_files", [])
    return [
        folder / Path(str(file["filename"])).name for file in files if isinstance(file, dict) and "filename" in file
    ]


def _object(path: Path) -> dict[str, Any]:
    return parse_line(path.read_bytes(), location=str(path))
