"""Validates the header of a GGUF file before it is read.

gguf (0.19) makes an array of every element and treats elements past the end of the file as empty. A file of 100 bytes
that claims 2^60 elements is read until memory is exhausted. Delete this file when gguf checks lengths.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import BinaryIO

from slimectl.system.model_files import open_file

MAX_FIELDS = 10_000
MAX_TENSORS = 200_000
MAX_ELEMENTS = 8_000_000
"""Limit over all arrays. Tokens, scores, kinds and merges of a vocabulary of 262 144 are 1.3 million elements."""
MAX_TEXT_BYTES = 16 * 1024**2
MAX_DIMENSIONS = 8

_SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Size in bytes of a value by its type."""
_STRING, _ARRAY = 8, 9


def check_gguf(path: Path) -> None:
    """Raise ValueError for a header that is truncated or larger than any real header."""
    with open_file(path) as file:
        header = _Header(file)
        header.walk()


class _Header:
    """Parses the header, at a position in the file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._size = os.fstat(file.fileno()).st_size
        self._order = "<"
        self._elements = 0

    def walk(self) -> None:
        if self._file.read(4) != b"GGUF":
            raise ValueError("the file does not begin with GGUF")
        if self._number("I") & 0xFFFF == 0:
            self._order = ">"  # written on a big-endian machine
        tensors, fields = self._number("Q"), self._number("Q")
        if fields > MAX_FIELDS or tensors > MAX_TENSORS:
            raise ValueError(f"{fields} fields and {tensors} tensors")
        for _ in range(fields):
            self._text()
            self._value(self._number("I"))
        for _ in range(tensors):
            self._text()
            dimensions = self._number("I")
            if dimensions > MAX_DIMENSIONS:
                raise ValueError(f"a tensor of {dimensions} dimensions")
            self._skip(8 * dimensions + 4 + 8)

    def _value(self, kind: int) -> None:
        if kind in _SCALARS:
            self._skip(_SCALARS[kind])
        elif kind == _STRING:
            self._text()
        elif kind == _ARRAY:
            self._array()
        else:
            raise ValueError(f"a value of kind {kind}")

    def _array(self) -> None:
        kind, length = self._number("I"), self._number("Q")
        self._elements += length
        if self._elements > MAX_ELEMENTS:
            raise ValueError(f"an array of {length} values")
        if kind in _SCALARS:
            self._skip(_SCALARS[kind] * length)
        elif kind == _STRING:
            for _ in range(length):
                self._text()
        else:
            raise ValueError(f"an array of values of kind {kind}")

    def _text(self) -> None:
        length = self._number("Q")
        if length > MAX_TEXT_BYTES:
            raise ValueError(f"a text of {length} bytes")
        self._skip(length)

    def _number(self, form: str) -> int:
        layout = struct.Struct(self._order + form)
        data = self._file.read(layout.size)
        if len(data) < layout.size:
            raise ValueError("truncated")
        return int(layout.unpack(data)[0])

    def _skip(self, count: int) -> None:
        if self._file.tell() + count > self._size:
            raise ValueError("truncated")
        self._file.seek(count, os.SEEK_CUR)
