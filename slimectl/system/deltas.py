"""Passes over weights for deltas, in C if there is a compiler: compare with rounding, and change in place.

N numbers · C changed numbers.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from slimectl.system.compiler import LONG, POINTER, load_library

SOURCE = Path(__file__).with_name("deltas.c")
_SIGNATURES = {
    "round_and_compare": [*[POINTER] * 3, *[LONG] * 2, *[POINTER] * 2],
    "change_numbers": [POINTER, LONG, POINTER, LONG, POINTER, LONG, POINTER],
}
WIDTHS, GAP_WIDTHS = (2, 4), (1, 2, 4)
"""Element sizes in bytes that change_numbers supports in C."""


class RoundingComparer:
    """Rounds up to `most` float32 numbers at a time, and compares them with bfloat16 numbers.

    `exists` is False without a compiler or on an unsupported platform. Then `compare` cannot be called.
    """

    def __init__(self, most: int) -> None:
        self._library = _library()
        self.exists = self._library is not None
        if self.exists:
            self._arrays = [np.empty(most, dtype) for dtype in ("<u2", "<i8", "<u2")]
            self._pointers = [array.ctypes.data for array in self._arrays]

    def compare(self, numbers_N: Tensor, old_N: Any, *, first: int) -> tuple[Any, Any, Any]:
        """Return the new bits [N], the indices [C] of changed numbers, and the xor [C] of their old and new bits.

        `numbers_N` must be contiguous and on the CPU. `first` is the index of its first number. The next call
        overwrites all returned arrays.
        """
        count = numbers_N.numel()
        new, indices, xors = self._arrays
        assert len(old_N) == count <= len(new)
        pointers, old = self._pointers, old_N.ctypes.data
        changed = self._library.round_and_compare(numbers_N.data_ptr(), old, pointers[0], count, first, *pointers[1:])
        return new[:count], indices[:changed], xors[:changed]


def change_numbers(numbers_N: Any, gaps_C: Any, bits_C: Any) -> Any:
    """Change numbers in place by xor with `bits_C`. Return their indices [C].

    `gaps_C` counts the unchanged numbers before each one, and must not lead past the end. All arrays are contiguous and
    of unsigned integers. `numbers_N` and `bits_C` have the same element size.
    """
    library = _library()
    width, gap_width = numbers_N.itemsize, gaps_C.itemsize
    if library is None or width not in WIDTHS or gap_width not in GAP_WIDTHS:
        indices_C = indices(gaps_C)
        numbers_N[indices_C] ^= bits_C
        return indices_C
    indices_C = np.empty(len(gaps_C), np.int64)
    numbers, gaps, bits, places = (array.ctypes.data for array in (numbers_N, gaps_C, bits_C, indices_C))
    library.change_numbers(numbers, width, gaps, gap_width, bits, len(gaps_C), places)
    return indices_C


def indices(gaps_C: Any) -> Any:
    """Return the indices [C] of the numbers that the gaps precede."""
    indices_C = np.add(gaps_C, 1, dtype=np.int64)
    np.cumsum(indices_C, out=indices_C)
    indices_C -= 1
    return indices_C


@functools.cache
def _library() -> Any:
    """Return the compiled functions, or None without a compiler or on an unsupported platform."""
    library = load_library(SOURCE, _SIGNATURES, without="deltas are computed without slimectl's kernels")
    if library is not None:
        library.round_and_compare.restype = LONG
    return library
