"""Builds torch's checkpoint metadata from a parsed pickle, and checks types and bounds of every field."""

from __future__ import annotations

from typing import Any

import torch

from slimectl.checkpoints.torch_dist.pickle_tree import Construction, UnsafePickleError, reference_of
from slimectl.system.model_files import plain_name

_METADATA = "torch.distributed.checkpoint.metadata"
_PLANNER = "torch.distributed.checkpoint.planner"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"

DTYPES = {
    name: getattr(torch, name)
    for name in (
        "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "int32", "int16", "int8",
        "uint8", "bool",
    )
}  # fmt: skip
"""Supported dtypes by their name in a pickle."""

METADATA_NAMES = frozenset({
    *((_METADATA, name) for name in (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    )),
    *((_PLANNER, name) for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")),
    (_FILESYSTEM, "_StorageInfo"), ("torch", "Size"), ("torch.serialization", "_get_layout"),
    *(("torch", name) for name in (*DTYPES, "strided", "contiguous_format")),
    ("collections", "OrderedDict"), ("collections", "defaultdict"), ("builtins", "set"), ("builtins", "dict"),
    ("pathlib", "Path"), ("pathlib", "PosixPath"), ("pathlib", "PurePosixPath"),
})  # fmt: skip
"""All names in the `.metadata` files of torch 2.x and megatron-core 0.8 to 0.16."""

MAX_DIMENSIONS = 16
MAX_SIZE = 2**48
"""Limit on elements along an axis, and on bytes in a file."""


def metadata_of(tree: Any) -> Any:
    """Build torch's Metadata from a parsed `.metadata`, without the save plans. Raises UnsafePickleError."""
    from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

    state = _state(tree, _METADATA, "Metadata")
    tensors = {_text(key, "a key"): _entry(entry) for key, entry in _dict(state.get("state_dict_metadata")).items()}
    locations = {_index(index): _location(location) for index, location in _dict(state.get("storage_data")).items()}
    return Metadata(tensors, storage_data=locations, storage_meta=StorageMeta())


def _state(tree: Any, module: str, name: str) -> dict[Any, Any]:
    """Return the fields of an object, which must be of the class `name`."""
    if not isinstance(tree, Construction) or tree.reference != (module, name):
        raise UnsafePickleError(f"something else instead of a {name}")
    return _dict({} if tree.state is None else tree.state)


def _dict(value: Any) -> dict[Any, Any]:
    if isinstance(value, Construction) and value.reference.name in ("OrderedDict", "defaultdict", "dict"):
        return value.items
    if not isinstance(value, dict):
        raise UnsafePickleError("something else instead of a dictionary")
    return value


def _text(value: Any, description: str) -> str:
    if not isinstance(value, str):
        raise UnsafePickleError(f"{description} that is not a string")
    return value


def _number(value: Any, description: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_SIZE:
        raise UnsafePickleError(f"{description} that is not a number from 0 to {MAX_SIZE}")
    return value


def _size(value: Any) -> torch.Size:
    if isinstance(value, Construction) and value.reference == ("torch", "Size") and len(value.arguments) == 1:
        value = value.arguments[0]
    if not isinstance(value, tuple | list) or len(value) > MAX_DIMENSIONS:
        raise UnsafePickleError(f"a shape that is not a list of up to {MAX_DIMENSIONS} numbers")
    return torch.Size([_number(size, "a size") for size in value])


def _entry(tree: Any) -> Any:
    """Build the metadata of one key: a tensor, or the bytes of an object."""
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorProperties, TensorStorageMetadata

    if isinstance(tree, Construction) and tree.reference != (_METADATA, "TensorStorageMetadata"):
        return BytesStorageMetadata()
    state = _state(tree, _METADATA, "TensorStorageMetadata")
    size = _size(state.get("size"))
    chunks = state.get("chunks")
    if not isinstance(chunks, list):
        raise UnsafePickleError("chunks that are not a list")
    properties = TensorProperties(dtype=_dtype(state.get("properties")))
    return TensorStorageMetadata(properties, size, [_chunk(chunk, size) for chunk in chunks])


def _dtype(properties: Any) -> torch.dtype:
    """Return the dtype of a tensor: the first entry of its properties, which are pickled as a tuple."""
    if not isinstance(properties, Construction) or properties.reference != (_METADATA, "TensorProperties"):
        raise UnsafePickleError("something else instead of TensorProperties")
    state = properties.state
    reference = reference_of(state[0] if isinstance(state, tuple) and state else _dict(state).get("dtype"))
    if reference is None or reference.module != "torch" or reference.name not in DTYPES:
        raise UnsafePickleError("a dtype that is not one of " + ", ".join(DTYPES))
    dtype: torch.dtype = DTYPES[reference.name]
    return dtype


def _chunk(tree: Any, tensor_size: torch.Size) -> Any:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    state = _state(tree, _METADATA, "ChunkStorageMetadata")
    offsets, sizes = _size(state.get("offsets")), _size(state.get("sizes"))
    if not len(offsets) == len(sizes) == len(tensor_size):
        raise UnsafePickleError(f"a chunk of {len(sizes)} dimensions in a tensor of {len(tensor_size)}")
    if any(start + size > end for start, size, end in zip(offsets, sizes, tensor_size, strict=True)):
        raise UnsafePickleError(f"a chunk {list(sizes)} at {list(offsets)} of a tensor {list(tensor_size)}")
    return ChunkStorageMetadata(offsets, sizes)


def _index(tree: Any) -> Any:
    from torch.distributed.checkpoint.metadata import MetadataIndex

    state = _state(tree, _METADATA, "MetadataIndex")
    offset, number = state.get("offset"), state.get("index")
    return MetadataIndex(
        _text(state.get("fqn"), "a key"),
        None if offset is None else _size(offset),
        None if number is None else _number(number, "an index"),
    )


def _location(tree: Any) -> Any:
    """Build the storage location of a chunk. Its file must be in the folder itself."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    state = _state(tree, _FILESYSTEM, "_StorageInfo")
    name = state.get("relative_path")
    if not plain_name(name):
        raise UnsafePickleError(f"a chunk in {name!r:.80}, which is not a file of the folder")
    offset, length = (_number(state.get(key), f"an {key}") for key in ("offset", "length"))
    transforms = state.get("transform_descriptors")
    if transforms is not None and not (isinstance(transforms, list | tuple) and all(map(_is_short_text, transforms))):
        raise UnsafePickleError("transform_descriptors that are not a list of names")
    return _StorageInfo(name, offset, length, transforms)


def _is_short_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) < 100
