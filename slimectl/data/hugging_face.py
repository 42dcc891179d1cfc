"""Finds data sets and models of Hugging Face's libraries: cached snapshots, saved folders, names of data files."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any, Literal

from slimectl.data.jsonl import parse_line
from slimectl.errors import SettingsError, first_line
from slimectl.stdio import logger

PARQUET = (".parquet", ".pq")
ARROW = (".arrow", ".arrows", ".feather", ".ipc")
DELIMITERS = {".csv": ",", ".tsv": "\t"}
JSON = (".json", ".jsonl", ".ndjson")
DATA_FILE = re.compile(
    f".*({'|'.join(map(re.escape, [*PARQUET, *ARROW, *DELIMITERS, *JSON]))})(\\.gz|\\.zst)?", re.IGNORECASE
)
HUB_NAME = re.compile(r"(?P<repository>[\w-][\w.-]*/[\w-][\w.-]*)(/(?P<files>.+))?")
MODEL_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
"""Files of a model that are of use; its weights in other formats are not downloaded."""
TRAIN = re.compile(r"(^|[/_.-])train([/_.-]|$)")


def hub_name(name: str) -> tuple[str, str | None] | None:
    """Return (repository, files in it) of a name such as `openai/gsm8k/main/train*`; None for what is a path here."""
    match = HUB_NAME.fullmatch(name)
    if match is None or Path(name.partition("/")[0]).exists() or DATA_FILE.fullmatch(match["repository"]):
        return None
    return match["repository"], match["files"]


@cache  # one failure is said once
def snapshot(repository: str, kind: Literal["dataset", "model"]) -> Path | None:
    """Return the folder of a repository of the hub: from the cache, or downloaded; None where neither can be had.

    Nothing is asked of the network with HF_HUB_OFFLINE=1.
    """
    from huggingface_hub import constants, snapshot_download

    files = MODEL_FILES if kind == "model" else None
    try:
        return Path(snapshot_download(repository, repo_type=kind, local_files_only=True))
    except (OSError, ValueError):
        if constants.HF_HUB_OFFLINE:
            return None
    try:
        logger.info(f"{repository}: neither a path here nor in Hugging Face's cache; asking the hub")
        return Path(snapshot_download(repository, repo_type=kind, allow_patterns=files))
    except (OSError, ValueError) as error:
        logger.warning(f"{repository}: cannot be downloaded: {first_line(error)}")
        return None


def fetch_command(repository: str, kind: Literal["dataset", "model"]) -> str:
    """Return the command that puts a repository into the cache."""
    return f"hf download {repository}" + (" --repo-type dataset" if kind == "dataset" else "")


def or_fetch(model: str) -> str:
    """Return the end of a message about a missing model: how to fetch it, if it may be the name of one of the hub."""
    name = hub_name(model)
    return f", or fetch one of the hub: {fetch_command(model, 'model')}" if name and not name[1] else ""


def hub_files(source: str) -> list[Path]:
    """Return the data files that a name of the hub stands for; none if it is no such name.

    `org/name` are the files of its training split, if it has one; `org/name/GLOB` are files of the repository. Raises
    SettingsError if it cannot be had, or has several parts and none is named.
    """
    name = hub_name(source)
    if name is None:
        return []
    repository, pattern = name
    folder = snapshot(repository, "dataset")
    if folder is None:
        raise SettingsError(
            f"{source}: no such prompt file, and no data set of this name in Hugging Face's cache; fetch it, where the "
            f"hub can be reached: {fetch_command(repository, 'dataset')}"
        )
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if DATA_FILE.fullmatch(path.name))
    matches = [
        file for file in names if pattern is None or fnmatch(file, pattern) or Path(pattern) in Path(file).parents
    ]
    if pattern is None:
        matches = [file for file in names if TRAIN.search(file)] or names
    if not matches:
        raise SettingsError(f"{source}: no data file of {repository} matches; it has {', '.join(names[:12]) or 'none'}")
    if pattern is None and len({Path(file).parent for file in matches}) > 1:
        some = ", ".join(f"{repository}/{file}" for file in matches[:6])
        raise SettingsError(f"{source}: has several parts; name one of them: {some}")
    return [folder / file for file in matches]


def saved_files(folder: Path) -> list[Path]:
    """Return the Arrow files of a folder that `save_to_disk` wrote; none if it is none.

    Raises SettingsError for a folder of several splits.
    """
    splits = folder / "dataset_dict.json"
    if splits.is_file():
        names = [str(name) for name in _object(splits).get("splits", [])]
        if len(names) != 1:
            raise SettingsError(
                f"{folder}: has the splits {', '.join(names)}; name one: {folder / (names or ['?'])[0]}"
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
