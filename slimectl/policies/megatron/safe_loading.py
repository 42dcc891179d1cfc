"""megatron-core's reader of checkpoints without Python's unpickler.

mcore (0.16.1) and torch (2.13) read `.metadata` by pickle.load and objects that are no tensors by torch.load with
weights_only=False: either runs what a stranger's file says. While a checkpoint is loaded, `.metadata` is read by us,
and every torch.load takes plain data only, from the same bytes that it looked at. Delete when both read safely.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.utils import _ReaderView

from slimectl.checkpoints.torch_dist.archive import FileRange, check_stored
from slimectl.checkpoints.torch_dist.metadata import read_metadata
from slimectl.model_files import check_file, check_model_files, open_file

MAX_OBJECT_BYTES = 1024**3
"""Of an object that is no tensor: schedules, random states, the state of fp8 modules."""


@contextmanager
def plain_data_only(folder: Path) -> Iterator[None]:
    """Let mcore load `folder` without running anything in it. Raises CheckpointError for files that lead elsewhere."""
    check_model_files(folder)
    load, reads = torch.load, FileSystemReader.read_metadata

    def load_plain(source: Any, *args: Any, **options: Any) -> Any:
        view, length = _view(source)
        check_stored(view, length)
        return load(view, *args, **{**options, "weights_only": True, "pickle_module": None})

    def read_plain(reader: FileSystemReader, *_: Any, **__: Any) -> Any:
        metadata = read_metadata(Path(reader.path))
        for name in {place.relative_path for place in metadata.storage_data.values()}:
            check_file(Path(reader.path) / name)
        return metadata

    torch.load, FileSystemReader.read_metadata = load_plain, read_plain
    try:
        # TransformerEngine keeps a module's state as bytes.
        with torch.serialization.safe_globals([io.BytesIO]):
            yield
    finally:
        torch.load, FileSystemReader.read_metadata = load, reads


def _view(source: Any) -> tuple[FileRange, int]:
    """What mcore asks torch to load, and its length: a file's name, a part of an open file, or bytes."""
    if isinstance(source, _ReaderView):
        return FileRange(source.base_stream, source.offset, source.len), source.len
    if isinstance(source, str | os.PathLike):
        with open_file(Path(source)) as file:
            source = io.BytesIO(file.read(MAX_OBJECT_BYTES + 1))
    length = source.seek(0, os.SEEK_END)
    if length > MAX_OBJECT_BYTES:
        raise ValueError(f"an object of over {MAX_OBJECT_BYTES} bytes")
    return FileRange(source, 0, length), length
