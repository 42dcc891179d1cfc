"""Program that reads a torch.save file in a sandbox, without torch, and without running pickled code.

It reads the file in base64 from stdin and writes the samples as JSON Lines to stdout.
"""

from __future__ import annotations

import base64
import io
import json
import math
import pickle
import struct
import sys
import zipfile
from collections import OrderedDict
from typing import Any

CODES = {
    "DoubleStorage": "d", "FloatStorage": "f", "HalfStorage": "e", "BFloat16Storage": "H", "LongStorage": "q",
    "IntStorage": "i", "ShortStorage": "h", "CharStorage": "b", "ByteStorage": "B", "BoolStorage": "?",
}  # fmt: skip
"""Format of `struct` by torch storage class. A bfloat16 is the upper half of a float."""

ARRAY_CODES = {"f8": "d", "f4": "f", "f2": "e", "i8": "q", "i4": "i", "i2": "h", "i1": "b", "u1": "B", "b1": "?"}
"""Format of `struct` by numpy type name."""

LEFT_OUT = ("multimodal_inputs", "multimodal_train_inputs", "rollout_routed_experts")
"""Keys of a sample whose arrays are not written as JSON."""


class Inert:
    """Replaces any class that is not supported. It keeps its arguments and does nothing."""

    def __new__(cls, *arguments: Any, **_: Any) -> Inert:
        instance = super().__new__(cls)
        instance.arguments, instance.state = arguments, {}
        return instance

    arguments: tuple[Any, ...]
    state: Any

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, item: Any) -> None: ...

    def __setitem__(self, key: Any, value: Any) -> None: ...


class Dtype(Inert):
    """A numpy type: its name, and whether its byte order is reversed."""

    def numbers(self, data: bytes) -> list[Any]:
        order = self.state[1] if self.state else "<"
        code = ARRAY_CODES[self.arguments[0]]
        return numbers(data, code, ">" if order == ">" else "<")


class Array(Inert):
    """A numpy array. Its state is (version, shape, type, column order, bytes)."""

    def plain(self) -> Any:
        _, shape, dtype, columns, data = self.state
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        if columns:
            strides = [math.prod(shape[:i]) for i in range(len(shape))]
        return nested(dtype.numbers(data), 0, shape, strides)


class Tensor:
    """A tensor: a storage with an offset, a size and strides."""

    def __init__(self, values: list[Any], offset: int, size: tuple[int, ...], strides: tuple[int, ...], *_: Any):
        self.values, self.offset, self.size, self.strides = values, offset, size, strides

    def plain(self) -> Any:
        return nested(self.values, self.offset, self.size, self.strides)


def numbers(data: bytes, code: str, order: str = "<") -> list[Any]:
    """Unpack the numbers of a format from bytes."""
    count = len(data) // struct.calcsize(order + code)
    return list(struct.unpack(f"{order}{count}{code}", data[: count * struct.calcsize(order + code)]))


def nested(values: list[Any], offset: int, size: Any, strides: Any) -> Any:
    """Return the numbers of an array as nested lists, or one number for an array without dimensions."""
    if not size:
        return values[offset]
    return [nested(values, offset + i * strides[0], size[1:], strides[1:]) for i in range(size[0])]


class Reader(pickle.Unpickler):
    """Unpickler that supports containers, tensors and arrays. Every other class becomes Inert."""

    def __init__(self, archive: zipfile.ZipFile, folder: str) -> None:
        super().__init__(io.BytesIO(archive.read(f"{folder}/data.pkl")))
        self._archive, self._folder = archive, folder

    def find_class(self, module: str, name: str) -> Any:
        readable = {
            ("collections", "OrderedDict"): OrderedDict,
            ("builtins", "set"): set,
            ("__builtin__", "set"): set,
            ("_codecs", "encode"): str.encode,
            ("torch._utils", "_rebuild_tensor_v2"): Tensor,
            ("numpy", "dtype"): Dtype,
            ("numpy", "ndarray"): Array,
        }
        if name == "_reconstruct" and module.endswith("core.multiarray"):
            return lambda *_: Array()
        if name == "scalar" and module.endswith("core.multiarray"):
            return lambda dtype, data: dtype.numbers(data)[0]
        if name in CODES and module == "torch":
            return CODES[name]
        return readable.get((module, name)) or type(name, (Inert,), {})

    def persistent_load(self, pid: Any) -> list[Any]:
        _, code, key, *_ = pid
        data = self._archive.read(f"{self._folder}/data/{key}")
        values = numbers(data, code)
        if code == "H":
            values = [struct.unpack("<f", struct.pack("<I", value << 16))[0] for value in values]
        return values


def plain(value: Any) -> Any:
    """Return a value in JSON form: the value of an enum, or the attributes of another object."""
    if isinstance(value, Tensor | Array):
        return value.plain()
    if isinstance(value, Inert):
        if isinstance(value.state, dict) and value.state:
            return plain(value.state)
        return plain(value.arguments[0]) if value.arguments else None
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items() if key not in LEFT_OUT}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else None


def main() -> None:
    """Print the samples of the file on stdin, one per line."""
    archive = zipfile.ZipFile(io.BytesIO(base64.b64decode(sys.stdin.read())))
    [folder] = {name.partition("/")[0] for name in archive.namelist()}
    content = Reader(archive, folder).load()
    samples = content.get("samples") if isinstance(content, dict) else content
    if not isinstance(samples, list):
        raise ValueError("the file has no list of samples")
    for sample in samples:
        print(json.dumps(plain(sample)))
