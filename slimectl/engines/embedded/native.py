"""CPU kernels in C: compiled once by the system compiler, stored in the cache folder, and called through ctypes.

N rows · I inputs · O outputs · E hidden size · H query heads · K key-value heads · D head dimension · T tokens.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from slimectl.engines.embedded.prefix_tree import CachedSpan
from slimectl.system.compiler import FLOAT, LONG, POINTER, load_library

SOURCE = Path(__file__).parent / "kernels" / "kernels.c"
DTYPES = {torch.float32: (), torch.bfloat16: ("-DBFLOAT16",)}

_SIGNATURES = {
    "rms_norm": [*[POINTER] * 3, *[LONG] * 2, *[FLOAT] * 2],
    "norm_heads": [*[POINTER] * 2, *[LONG] * 4, *[FLOAT] * 2],
    "rotate": [*[POINTER] * 3, *[LONG] * 5],
    "silu_product": [*[POINTER] * 2, *[LONG] * 2],
    "attend": [*[POINTER] * 6, FLOAT, *[LONG] * 8],
    "pack": [POINTER, LONG, POINTER, *[LONG] * 5],
    "unpack": [*[POINTER] * 2, *[LONG] * 5],
    "gather": [*[POINTER] * 3, *[LONG] * 3],
    "repack": [*[POINTER] * 3, *[LONG] * 5],
    "product": [*[POINTER] * 5, *[LONG] * 5],
    "delta_net": [*[POINTER] * 7, FLOAT],
    "decode": [*[POINTER] * 10, FLOAT],
}


@dataclass(frozen=True, slots=True)
class BlockShape:
    """Sizes of a dense block and the epsilon of its norms."""

    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    eps: float


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """The weights of a delta net between its projections, and the epsilon of its norm.

    W channels and S taps of the convolution, H value heads, V value width.
    """

    key_heads: int
    kernel_W1S: Tensor
    decay_log_H: Tensor
    decay_bias_H: Tensor
    norm_V: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Panels:
    """A weight [O, I] and its optional bias in the layout that the `product` of the kernels reads.

    If `gated`, the first half of the outputs gates the second half.
    """

    kernels: Kernels
    numbers: Tensor
    bias: Tensor | None
    outputs: int
    inputs: int
    gated: bool


class SpanTable:
    """The spans that each row reads before its slot, in ascending order. The layout is `Spans` in attention.h."""

    def __init__(self, spans: Sequence[CachedSpan], rows: int) -> None:
        spans_of: list[list[list[int]]] = [[] for _ in range(rows if spans else 0)]
        for span in sorted(spans, key=lambda span: span.start):
            keys = span.keys_values
            assert keys.stride(-1) == 1
            assert keys.stride(-2) == keys.shape[-1]
            entry = [keys.data_ptr(), span.end - span.start, keys.stride(2)]
            for row in range(rows)[span.rows] if isinstance(span.rows, slice) else span.rows.tolist():
                spans_of[row].append(entry)
        ends = accumulate(map(len, spans_of), initial=0)
        self._first = torch.tensor(list(ends))
        self._entries = torch.tensor([entry for entries in spans_of for entry in entries])
        self.tokens = max((span.end for span in spans), default=0)
        """Largest number of tokens that a row reads from spans."""
        addresses = (self._entries.data_ptr(), self._first.data_ptr()) if spans else (0, 0)
        self.numbers = torch.tensor([*addresses, self.tokens])


class Kernels:
    """The kernels for one dtype. All tensors must be contiguous and on the CPU.

    `multiplies` is true if packed products are faster than oneDNN's: always, except for bfloat16 on a CPU with AMX. A
    panel has `panel_outputs` outputs. A layer's inputs must be a multiple of `step`.
    """

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        self._library = library
        self._dtype = dtype
        names = ("panel_outputs", "inputs_a_step", "input_size", "multiplies")
        self.panel_outputs, self.step, input_size, multiplies = (
            ctypes.c_long.in_dll(library, name).value for name in names
        )
        self._input_dtype = dtype if input_size == dtype.itemsize else torch.float32
        self.multiplies = bool(multiplies)

    def rms_norm(self, rows_NE: Tensor, weight_E: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        """Return rows / rms(rows) * (weight + offset)."""
        rows, width = rows_NE.shape
        out_NE = torch.empty_like(rows_NE)
        self._library.rms_norm(rows_NE.data_ptr(), weight_E.data_ptr(), out_NE.data_ptr(), rows, width, eps, offset)
        return out_NE

    def norm_heads(self, qkv_NHD: Tensor, weight_HD: Tensor, eps: float, offset: float = 0.0) -> None:
        """Normalize in place the first heads of every row, one for each head of the weight."""
        rows, heads, head_dim = qkv_NHD.shape
        self._library.norm_heads(
            qkv_NHD.data_ptr(), weight_HD.data_ptr(), rows, weight_HD.shape[0], heads, head_dim, eps, offset
        )

    def rotate(self, qkv_NHD: Tensor, rotated: int, cos_N1R: Tensor, sin_N1R: Tensor) -> None:
        """Rotate in place the first `rotated` heads of every row. The first half of the sines is negated.

        Only the first R dimensions of a head rotate. R is a multiple of 16.
        """
        rows, heads, head_dim = qkv_NHD.shape
        cos, sin, width = cos_N1R.data_ptr(), sin_N1R.data_ptr(), cos_N1R.shape[-1]
        self._library.rotate(qkv_NHD.data_ptr(), cos, sin, rows, rotated, heads, head_dim, width)

    def silu_product(self, rows_NI: Tensor) -> Tensor:
        """Return silu(first half of each row) * second half."""
        rows, width = rows_NI.shape
        out = rows_NI.new_empty(rows, width // 2)
        self._library.silu_product(rows_NI.data_ptr(), out.data_ptr(), rows, width // 2)
        return out

    def attend(
        self, layer: int, qkv_NHD: Tensor, cache_2SKTD: Tensor, positions_N: Tensor, shared: SpanTable, scratch: Tensor
    ) -> Tensor:
        """Write the keys and values of each row to its slot. Return attention [N, H * D] over its spans and slot."""
        rows, all_heads, head_dim = qkv_NHD.shape
        _, slots, kv_heads, tokens, _ = cache_2SKTD.shape
        heads = all_heads - 2 * kv_heads
        out = qkv_NHD.new_empty(rows, heads * head_dim)
        self._library.attend(
            qkv_NHD.data_ptr(),
            cache_2SKTD.data_ptr(),
            positions_N.data_ptr(),
            shared.numbers.data_ptr(),
            out.data_ptr(),
            scratch.data_ptr(),
            head_dim**-0.5,
            layer,
            rows,
            heads,
            kv_heads,
            head_dim,
            tokens,
            slots * kv_heads * tokens * head_dim,
            torch.get_num_threads(),
        )
        return out

    def decode(
        self,
        blocks_LA: Tensor,
        shape: BlockShape,
        stream_NE: Tensor,
        slab_L2SKTD: Tensor,
        positions_N: Tensor,
        shared: SpanTable,
        rope: tuple[Tensor, Tensor],
    ) -> None:
        """Run dense blocks on the residual stream, in place. `blocks_LA` has the addresses of `Block` in kernels.c."""
        cos_N1D, sin_N1D = rope
        rows, width = stream_NE.shape
        layers, _, slots, kv_heads, tokens, head_dim = slab_L2SKTD.shape
        heads, values_at = shape.heads, slots * kv_heads * tokens * head_dim
        sizes = [layers, rows, width, heads, kv_heads, head_dim, shape.inner, tokens, values_at, 2 * values_at]
        numbers = torch.tensor([*sizes, torch.get_num_threads()])
        row_width = width + 2 * (heads + kv_heads) * head_dim + shape.inner
        memory = stream_NE.new_empty(rows * row_width)
        scratch = self.attention_scratch(slab_L2SKTD[0], heads, shared)
        if len(scratch) < (inputs := rows * max(width, heads * head_dim, shape.inner)):
            scratch = torch.empty(inputs)
        self._library.decode(
            blocks_LA.data_ptr(),
            numbers.data_ptr(),
            stream_NE.data_ptr(),
            slab_L2SKTD.data_ptr(),
            positions_N.data_ptr(),
            shared.numbers.data_ptr(),
            cos_N1D.data_ptr(),
            sin_N1D.data_ptr(),
            memory.data_ptr(),
            scratch.data_ptr(),
            shape.eps,
        )

    def delta_net(
        self, projected_NO: Tensor, ends_B: Sequence[int], net: DeltaWeights, inputs_BSW: Tensor, memory_BHKV: Tensor
    ) -> Tensor:
        """Run a delta net on new tokens, and update the inputs and memories of their sequences.

        The rows of a sequence follow those of the previous one, and end before `ends_B`. `inputs_BSW` has one tap less
        than the convolution. Returns the normalized and gated outputs [N, H * V].
        """
        batch, heads, key_dim, value_dim = memory_BHKV.shape
        kernel_SW = net.kernel_W1S[:, 0].T.float().contiguous()
        out = projected_NO.new_empty(len(projected_NO), heads * value_dim)
        weights = (kernel_SW, net.decay_log_H, net.decay_bias_H, net.norm_V)
        sizes = (batch, net.key_heads, heads, key_dim, value_dim, len(kernel_SW), torch.get_num_threads())
        first, addresses, numbers = map(torch.tensor, ([0, *ends_B], [part.data_ptr() for part in weights], sizes))
        self._library.delta_net(
            projected_NO.data_ptr(),
            first.data_ptr(),
            inputs_BSW.data_ptr(),
            memory_BHKV.data_ptr(),
            addresses.data_ptr(),
            numbers.data_ptr(),
            out.data_ptr(),
            net.eps,
        )
        return out

    def attention_scratch(self, cache_2SKTD: Tensor, heads: int, shared: SpanTable) -> Tensor:
        """Allocate scratch memory for `attend`."""
        kv_heads, tokens, head_dim = cache_2SKTD.shape[2:]
        return torch.empty(torch.get_num_threads() * (heads // kv_heads) * (head_dim + shared.tokens + tokens + 8))

    def new_panels(self, outputs: int, inputs: int, *, bias: bool, gated: bool) -> Panels:
        """Allocate panels of a weight, with or without a bias."""
        padded = -(-outputs // self.panel_outputs) * self.panel_outputs
        bias_O = torch.zeros(padded, dtype=self._dtype) if bias else None
        return Panels(self, torch.zeros(padded * inputs, dtype=self._dtype), bias_O, outputs, inputs, gated)

    def pack(self, rows_RI: Tensor, panels: Panels, first: int = 0) -> None:
        """Write rows of a weight, starting at output `first`. The rows are in this dtype or float32."""
        rows_RI = rows_RI.contiguous()
        rows, inputs = rows_RI.shape
        wide, cells = rows_RI.dtype != self._dtype, inputs // self.step
        source, target = rows_RI.data_ptr(), panels.numbers.data_ptr()
        self._library.pack(source, wide, target, first, rows, panels.outputs, cells, panels.gated)

    def unpack(self, panels: Panels, first: int, rows: int) -> Tensor:
        """Return rows [R, I] of a weight, starting at output `first`."""
        rows_RI = panels.numbers.new_empty(rows, panels.inputs)
        source, target, cells = panels.numbers.data_ptr(), rows_RI.data_ptr(), panels.inputs // self.step
        self._library.unpack(source, target, first, rows, panels.outputs, cells, panels.gated)
        return rows_RI

    def gather(self, panels: Panels, outputs_N: Tensor) -> Tensor:
        """Return the weights [N, I] of some outputs. The panels must not be gated."""
        rows_NI = panels.numbers.new_empty(len(outputs_N), panels.inputs)
        cells = panels.inputs // self.step
        source, target = panels.numbers.data_ptr(), rows_NI.data_ptr()
        self._library.gather(source, outputs_N.data_ptr(), target, len(outputs_N), panels.outputs, cells)
        return rows_NI

    def repack(self, rows_RI: Tensor, places_C: Tensor, panels: Panels, first: int = 0) -> None:
        """Write only the numbers at `places_C`, ascending. The first row belongs to output `first`."""
        numbers, count, inputs = panels.numbers.data_ptr(), len(places_C), panels.inputs
        places = places_C.data_ptr()
        self._library.repack(rows_RI.data_ptr(), numbers, places, count, first, panels.outputs, inputs, panels.gated)

    def pack_bias(self, bias_O: Tensor, panels: Panels) -> None:
        """Write a bias in panel order."""
        half = self.panel_outputs // 2
        assert panels.bias is not None
        if panels.gated:
            panels.bias.view(-1, 2, half).transpose(0, 1).copy_(bias_O.view(2, -1, half))
        else:
            panels.bias[: len(bias_O)] = bias_O

    def product(self, rows_NI: Tensor, panels: Panels, residual_NO: Tensor | None = None) -> Tensor:
        """Return rows · weightᵀ + bias + residual.

        Gated panels return silu(first half) * second half of rows · weightᵀ + bias.
        """
        rows, inputs = rows_NI.shape
        out = panels.numbers.new_empty(rows, panels.outputs // 2 if panels.gated else panels.outputs)
        rows_NI = rows_NI.to(self._input_dtype, memory_format=torch.contiguous_format)
        self._library.product(
            rows_NI.data_ptr(),
            panels.numbers.data_ptr(),
            None if panels.bias is None else panels.bias.data_ptr(),
            None if residual_NO is None else residual_NO.data_ptr(),
            out.data_ptr(),
            rows,
            inputs,
            panels.outputs,
            panels.gated,
            torch.get_num_threads(),
        )
        return out


@functools.cache
def load_kernels(dtype: torch.dtype) -> Kernels | None:
    """Return the kernels for a dtype, or None without a compiler or on an unsupported platform."""
    if dtype not in DTYPES:
        return None
    without = "the embedded engine runs without its own kernels"
    library = load_library(SOURCE, _SIGNATURES, flags=DTYPES[dtype], without=without)
    return None if library is None else Kernels(library, dtype)
