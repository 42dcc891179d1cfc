"""megatron-core's reader of checkpoints without Python's unpickler.

mcore (0.16.1) and torch (2.13) read `.metadata` by pickle.load and objects that are no tensors by torch.load with
weights_only=False: either runs what a stranger's file says. While a checkpoint is loaded, `.metadata` is read by us,
and every torch.load takes plain data only, from the same bytes that it looked at. Delete when both read safely.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

from slimectl.checkpoints.torch_dist.metadata import COMMON, read_metadata
from slimectl.model_files import check_file, check_model_files

MAX_OBJECT_BYTES = 1024**3
"""Of an object that is no tensor: schedules, random states, the state of fp8 modules."""


@contextmanager
def plain_data_only(folder: Path) -> Iterator[None]:
    """Let mcore load `folder` without running anything in it. Raises CheckpointError for files that lead elsewhere."""
    check_model_files(folder)
    if check_file(folder / COMMON).st_size > MAX_OBJECT_BYTES:
        raise ValueError(f"{COMMON} has over {MAX_OBJECT_BYTES} bytes")
    load, reads = torch.load, FileSystemReader.read_metadata

    def load_plain(file: Any, *args: Any, **options: Any) -> Any:
        return load(file, *args, **{**options, "weights_only": True, "pickle_module": None})

    def read_plain(reader: FileSystemReader, *_: Any, **__: Any) -> Any:
        return read_metadata(Path(reader.path))

    torch.load, FileSystemReader.read_metadata = load_plain, read_plain
    try:
        # TransformerEngine keeps a module's state as bytes.
        with torch.serialization.safe_globals([io.BytesIO]):
            yield
    finally:
        torch.load, FileSystemReader.read_metadata = load, reads
