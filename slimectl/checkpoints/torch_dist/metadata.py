"""`.metadata`: which tensors a torch_dist folder holds, in which chunks, at which bytes."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import torch

from slimectl.errors import CheckpointError

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
"""Names the newest of the folders beside it: a number, or "release"."""

OPEN_MODULES = ("torch.distributed.checkpoint.", "torch.distributed._shard.", "torch.distributed.tensor.")
PLAIN = {
    ("builtins", "set"), ("builtins", "frozenset"), ("builtins", "slice"), ("builtins", "complex"),
    ("collections", "OrderedDict"), ("collections", "defaultdict"), ("torch", "Size"), ("torch", "device"),
    ("torch.serialization", "_get_layout"), ("pathlib", "PosixPath"), ("pathlib", "Path"), ("datetime", "timedelta"),
    ("torch.storage", "_get_dtype_from_pickle_storage_type"), ("torch._C", "_get_dtype"),
}  # fmt: skip


class _Foreign:
    """Stands for a class of another library: its contents are not needed."""

    def __init__(self, *_: Any) -> None: ...

    def __setstate__(self, _: Any) -> None: ...


class _Unpickler(pickle.Unpickler):
    """Makes objects of torch's checkpoint classes only: a pickle from elsewhere must not run what it likes."""

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] == "megatron":
            return type(name, (_Foreign,), {})
        if module == "torch" and isinstance(
            getattr(torch, name, None), torch.dtype | torch.memory_format | torch.layout
        ):
            return getattr(torch, name)
        if (module, name) in PLAIN:
            return super().find_class(module, name)
        if module.startswith(OPEN_MODULES):
            found = super().find_class(module, name)
            if isinstance(found, type):
                return found
        raise pickle.UnpicklingError(f"{module}.{name} has no business in checkpoint metadata")


def is_torch_dist(folder: Path) -> bool:
    """Whether a folder is meant to be of this layout, damaged ones included."""
    if any((folder / name).exists() for name in (METADATA, TRACKER)) or any(folder.glob("*.distcp")):
        return True
    return (folder / LAYOUT).exists() and "sharded_backend" in (folder / LAYOUT).read_text(errors="replace")


def newest(folder: Path) -> Path:
    """The folder itself, or the one of its iterations that Megatron's tracker file names. Raises CheckpointError."""
    tracker = folder / TRACKER
    if (folder / METADATA).exists() or not tracker.exists():
        return folder
    said = tracker.read_text().strip()
    named = folder / (f"iter_{int(said):07d}" if said.isdigit() else said)
    if not named.is_dir():
        raise CheckpointError(f"{tracker}: names {named.name}, which is not there; give the iteration's folder itself")
    return named


def read_metadata(folder: Path) -> Any:
    """torch's Metadata of the folder. Raises CheckpointError."""
    path = folder / METADATA
    if not path.exists():
        raise CheckpointError(
            f"{folder}: a torch_dist checkpoint without {METADATA}; saving it was interrupted or it was copied without"
            " hidden files: copy or save it again"
        )
    try:
        layout = json.loads((folder / LAYOUT).read_text()) if (folder / LAYOUT).exists() else LAYOUT_FACTS
        if layout.get("sharded_backend") != "torch_dist":
            raise ValueError(f"{LAYOUT} says {layout.get('sharded_backend')!r}, not 'torch_dist'")
        with path.open("rb") as file:
            metadata = _Unpickler(file).load()
        metadata.state_dict_metadata.items(), metadata.storage_data.items()
    except Exception as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); copy or save the checkpoint again") from error
    return metadata


def write_metadata(folder: Path, metadata: Any, common: dict[str, Any]) -> None:
    """Write all that is no .distcp file."""
    torch.save(common, folder / COMMON)
    (folder / LAYOUT).write_text(json.dumps(LAYOUT_FACTS))
    with (folder / METADATA).open("wb") as file:
        pickle.dump(metadata, file)
