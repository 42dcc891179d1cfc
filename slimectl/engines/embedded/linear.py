"""Linear layers whose weights are packed for the CPU.

N rows · O outputs · I inputs · R outputs of a part of the weight · C changed numbers in that part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from slimectl.engines.embedded.native import Kernels, Panels

SMALL = 1 << 18
"""Weights with fewer elements are faster unpacked when multiplied by a single float32 row."""

SPARSE = 16
"""A weight is repacked as a whole if more than one in this many numbers changed."""


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN's packed products are available. They are 1.2 to 2.4 times faster at 8 to 64 rows."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    try:
        _product(torch.zeros(2, 8, dtype=dtype), _pack(torch.zeros(8, 8, dtype=dtype)), None)
    except (AttributeError, NotImplementedError, RuntimeError):  # another torch, or no kernel for this dtype
        return False
    return True


def _pack(weight_OI: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight_OI, None)  # type: ignore[no-any-return]


def _product(rows_NI: Tensor, packed_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(rows_NI, packed_OI, bias_O, "none", [], "")  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Storage:
    """Where weights are kept, and what multiplies them."""

    dtype: torch.dtype
    device: torch.device
    kernels: Kernels | None = None
    packs: bool = False
    """Whether linear layers keep a copy packed by oneDNN."""

    @classmethod
    def of(cls, dtype: torch.dtype, device: torch.device, kernels: Kernels | None) -> Storage:
        """Return the fastest storage with these kernels."""
        multiplies = kernels is not None and kernels.multiplies
        return cls(dtype, device, kernels, packs=not multiplies and can_pack(dtype, device))

    def tensor(self, *shape: int) -> Tensor:
        return torch.empty(*shape, dtype=self.dtype, device=self.device)


class Linear:
    """One product for several stacked weights (q, k and v, or gate and up) with concatenated outputs.

    Weights are written and read by rows, one row per output. `bias_parts` are views of the bias. Call `refresh` after
    changing weights or bias. If the storage's kernels multiply, the weights exist only in their panels. Otherwise they
    are in one tensor, and oneDNN may have a packed copy. A layer that `gates` must be called through `gated`.
    """

    def __init__(
        self, inputs: int, outputs: Sequence[int], storage: Storage, *, bias: bool = False, gates: bool = False
    ) -> None:
        self.inputs, self.outputs = inputs, sum(outputs)
        self.starts = [sum(outputs[:i]) for i in range(len(outputs))]
        """First output of each of the stacked weights."""
        self.bias_O = storage.tensor(self.outputs) if bias else None
        self.bias_parts = () if self.bias_O is None else torch.split(self.bias_O, list(outputs))
        kernels = self._kernels = storage.kernels
        self._gates, self._packs = gates, storage.packs
        self._small = storage.dtype == torch.float32 and self.outputs * inputs < SMALL
        self._panels: Panels | None = None
        self._packed: Tensor | None = None
        if kernels is not None and kernels.multiplies and inputs % kernels.step == 0:
            gates = gates and outputs[0] % (kernels.panel_outputs // 2) == 0
            self._panels = kernels.new_panels(self.outputs, inputs, bias=bias, gated=gates)
        else:
            self._weight_OI = storage.tensor(self.outputs, inputs)

    @property
    def count(self) -> int:
        """Number of tensors in the layer."""
        return len(self.starts) + len(self.bias_parts)

    @property
    def addresses(self) -> tuple[int, int] | None:
        """Fixed addresses of panels and bias (0 without one), or None if the kernels do not compute the layer."""
        if self._panels is None or self._panels.gated != self._gates:
            return None
        bias = 0 if self._panels.bias is None else self._panels.bias.data_ptr()
        return self._panels.numbers.data_ptr(), bias

    def write(self, first: int, rows_RI: Tensor) -> None:
        """Write the weights of R outputs starting at `first`."""
        if self._panels is None:
            self._weight_OI[first : first + len(rows_RI)].copy_(rows_RI)
            return
        if rows_RI.dtype not in (self._panels.numbers.dtype, torch.float32):
            rows_RI = rows_RI.to(self._panels.numbers.dtype)
        self._panels.kernels.pack(rows_RI.cpu(), self._panels, first)

    def read(self, first: int, rows: int) -> Tensor:
        """Return the weights [R, I] of `rows` outputs starting at `first`, as a copy or a view."""
        if self._panels is None:
            return self._weight_OI[first : first + rows]
        return self._panels.kernels.unpack(self._panels, first, rows)

    def change(self, first: int, rows_RI: Tensor, places_C: Tensor) -> None:
        """Write back rows from `read` after changing the numbers at `places_C`, which are ascending."""
        if self._panels is None:  # the rows are a view
            return
        if len(places_C) * SPARSE > rows_RI.numel():
            self._panels.kernels.pack(rows_RI, self._panels, first)
        else:
            self._panels.kernels.repack(rows_RI, places_C, self._panels, first)

    def refresh(self) -> None:
        """Update everything derived from weights and bias."""
        if self._panels is not None:
            if self.bias_O is not None:
                self._panels.kernels.pack_bias(self.bias_O, self._panels)
        elif self._packs:
            self._packed = None  # free it before allocating the next one
            self._packed = _pack(self._weight_OI)

    def rows(self, outputs_N: Tensor) -> Tensor:
        """Return the weights [N, I] of some outputs. The layer must not gate."""
        if self._panels is None:
            return F.embedding(outputs_N, self._weight_OI)
        return self._panels.kernels.gather(self._panels, outputs_N)

    def __call__(self, rows_NI: Tensor) -> Tensor:
        if self._panels is not None:
            return self._panels.kernels.product(rows_NI, self._panels)
        if self._packed is None or (self._small and rows_NI.shape[0] == 1):
            return F.linear(rows_NI, self._weight_OI, self.bias_O)
        return _product(rows_NI, self._packed, self.bias_O)

    def added_to(self, residual_NO: Tensor, rows_NI: Tensor) -> Tensor:
        """Return residual + self(rows), in one pass if packed."""
        if self._panels is not None:
            return self._panels.kernels.product(rows_NI, self._panels, residual_NO)
        if self._packed is None or (self._small and rows_NI.shape[0] == 1):
            return F.linear(rows_NI, self._weight_OI, self.bias_O).add_(residual_NO)
        sum_NO: Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            rows_NI, residual_NO, self._packed, self.bias_O, "add"
        )
        return sum_NO

    def gated(self, rows_NI: Tensor) -> Tensor:
        """Return silu(first half of the outputs) * second half."""
        outputs_NO = self(rows_NI)
        if self._panels is not None and self._panels.gated:
            return outputs_NO
        half = outputs_NO.shape[1] // 2
        if self._kernels is not None and half % 8 == 0:
            return self._kernels.silu_product(outputs_NO)
        return F.silu(outputs_NO[:, :half]).mul_(outputs_NO[:, half:])
