"""Reads and writes `.metadata` of a torch_dist folder: tensors, their chunks and byte offsets."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

from slimectl.errors import CheckpointError
from slimectl.system.model_files import check_file, open_file, plain_name, read_json

METADATA = ".metadata"
COMMON = "common.pt"
LAYOUT = "metadata.json"
LAYOUT_FACTS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
TRACKER = "latest_checkpointed_iteration.txt"
"""File with the name of the latest iteration's folder: a number, or "release"."""

MAX_METADATA_BYTES = 128 * 1024**2
"""A model of 120 000 expert tensors and their moments has about 95 MB."""
MAX_LAYOUT_BYTES = 1024**2
MAX_TRACKER_BYTES = 64


def is_torch_dist(folder: Path) -> bool:
    """Return whether a folder is a torch_dist checkpoint, possibly damaged. Raises CheckpointError."""
    if any((folder / name).exists() for name in (METADATA, TRACKER)) or any(folder.glob("*.distcp")):
        return True
    # In a folder with safetensors, a file of that name is an unrelated file of any size.
    return not any(folder.glob("*.safetensors")) and "sharded_backend" in _read_layout(folder)


def newest(folder: Path) -> Path:
    """Return the folder itself, or the iteration given in Megatron's tracker file. Raises CheckpointError."""
    tracker = folder / TRACKER
    if (folder / METADATA).exists() or not tracker.exists():
        return folder
    with open_file(tracker) as file:
        iteration = file.read(MAX_TRACKER_BYTES).decode(errors="replace").strip()
    name = f"iter_{int(iteration):07d}" if iteration.isascii() and iteration.isdigit() else iteration
    if not plain_name(name):
        raise CheckpointError(
            f"{tracker}: lists {name!r}, which is not a folder next to it. Copy the checkpoint again."
        )
    if not (folder / name).is_dir():
        raise CheckpointError(f"{tracker}: lists {name}, which does not exist. Give the folder of an iteration.")
    return folder / name


def weight_bytes(folder: Path) -> int:
    """Return the bytes of all .distcp files of a checkpoint. Raises CheckpointError."""
    return sum(check_file(path).st_size for path in newest(folder).glob("*.distcp"))


def _read_layout(folder: Path) -> dict[str, Any]:
    """Read metadata.json, or return {} if there is none. Raises CheckpointError."""
    try:
        return read_json(folder / LAYOUT, max_bytes=MAX_LAYOUT_BYTES)
    except FileNotFoundError:
        return {}


def read_metadata(folder: Path) -> Any:
    """Read torch's Metadata of the folder. Raises CheckpointError.

    pickle_tree reads the pickle, and tables builds torch's objects. No name in it is looked up or called.
    """
    # Imported here, because commands without torch use the other functions of this module.
    from slimectl.checkpoints.torch_dist.pickle_tree import parse_pickle
    from slimectl.checkpoints.torch_dist.tables import METADATA_NAMES, metadata_of

    path = folder / METADATA
    try:
        with open_file(path) as file:
            data = file.read(MAX_METADATA_BYTES + 1)
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder}: a torch_dist checkpoint without {METADATA}. Saving it was interrupted, or it was copied without"
            " hidden files. Copy or save it again."
        ) from None
    layout = _read_layout(folder) or LAYOUT_FACTS
    try:
        if layout.get("sharded_backend") != "torch_dist":
            raise ValueError(f"{LAYOUT} has {layout.get('sharded_backend')!r:.40}, not 'torch_dist'")
        if len(data) > MAX_METADATA_BYTES:
            raise ValueError(f"more than {MAX_METADATA_BYTES} bytes")
        return metadata_of(parse_pickle(data, allowed=METADATA_NAMES, placeholders=("megatron",)))
    except ValueError as error:
        raise CheckpointError(f"{path}: cannot be read ({error}). Copy or save the checkpoint again.") from error


def write_metadata(folder: Path, metadata: Any, common: dict[str, Any]) -> None:
    """Write all files except the .distcp files."""
    import torch

    torch.save(common, folder / COMMON)
    (folder / LAYOUT).write_text(json.dumps(LAYOUT_FACTS))
    with (folder / METADATA).open("wb") as file:
        pickle.dump(metadata, file)
