"""Linear layers with weights that are packed once for the CPU.

N rows · O outputs · I inputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from slimectl.engines.embedded.native import Kernels

SMALL = 1 << 18
"""Weights of fewer elements are multiplied with a single float32 row faster unpacked."""

SPARSE = 16
"""A weight is packed anew where at least one number in so many has changed."""


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN's packed products exist here: 1.2 to 2.4 times faster at 8 to 64 rows."""
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


class Linear:
    """One product for several stacked weights (q, k and v; gate and up): `parts` are views, one for each.

    `weight_OI` may be passed to share storage (a tied head). `refresh` repacks weights that were written to the parts.
    `kernels` compute the products if they are the faster ones, else oneDNN if `packs`. Of a layer that `gates`, only
    `gated` is called.
    """

    def __init__(
        self,
        inputs: int,
        outputs: Sequence[int],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        packs: bool,
        kernels: Kernels | None = None,
        gates: bool = False,
        weight_OI: Tensor | None = None,
    ) -> None:
        self.weight_OI = (
            torch.empty(sum(outputs), inputs, dtype=dtype, device=device) if weight_OI is None else weight_OI
        )
        self.bias_O = torch.empty(sum(outputs), dtype=dtype, device=device) if bias else None
        self.parts = torch.split(self.weight_OI, list(outputs))
        self.bias_parts = () if self.bias_O is None else torch.split(self.bias_O, list(outputs))
        can_multiply = kernels is not None and kernels.multiplies and inputs % kernels.step == 0
        self._kernels = kernels
        self._multiplier = kernels if can_multiply else None
        self._gated = gates
        self._gates = self._multiplier is not None and gates and outputs[0] % (self._multiplier.panel_outputs // 2) == 0
        self._packs = packs
        self._packed: Tensor | None = None
        self._panels: Tensor | None = None
        self._bias_panels: Tensor | None = None
        self._small = dtype == torch.float32 and self.weight_OI.numel() < SMALL

    @property
    def count(self) -> int:
        """Number of tensors that the layer consists of."""
        return len(self.parts) + len(self.bias_parts)

    @property
    def addresses(self) -> tuple[int, int] | None:
        """Fixed addresses of panels and bias, 0 without one; None if the kernels do not compute the layer."""
        if self._panels is None or (self._gated and not self._gates):
            return None
        return self._panels.data_ptr(), 0 if self._bias_panels is None else self._bias_panels.data_ptr()

    def refresh(self) -> None:
        if self._multiplier is not None:
            self._panels = self._multiplier.pack(self.weight_OI, self._panels, gated=self._gates)
            self._refresh_bias(self._multiplier)
        elif self._packs:
            self._packed = None  # freed before its successor is allocated
            self._packed = _pack(self.weight_OI)

    def offset(self, part: Tensor) -> int:
        """Return the index of a part's first number in the stacked weight; -1 for a part of the bias."""
        distance, size = part.data_ptr() - self.weight_OI.data_ptr(), self.weight_OI.element_size()
        return distance // size if 0 <= distance < self.weight_OI.nbytes else -1

    def refresh_at(self, indices_C: Tensor) -> None:
        """Repack, where only the numbers of the stacked weight at these indices, ascending, and biases have changed."""
        if self._panels is None or self._multiplier is None or len(indices_C) * SPARSE > self.weight_OI.numel():
            return self.refresh()
        self._multiplier.repack(self.weight_OI, self._panels, indices_C, gated=self._gates)
        return self._refresh_bias(self._multiplier)

    def _refresh_bias(self, multiplier: Kernels) -> None:
        if self.bias_O is not None:
            self._bias_panels = multiplier.pack_bias(self.bias_O, self._bias_panels, gated=self._gates)

    def __call__(self, rows_NI: Tensor) -> Tensor:
        if self._panels is not None:
            return self._product(rows_NI)
        if self._packed is None or (self._small and rows_NI.shape[0] == 1):
            return F.linear(rows_NI, self.weight_OI, self.bias_O)
        return _product(rows_NI, self._packed, self.bias_O)

    def added_to(self, residual_NO: Tensor, rows_NI: Tensor) -> Tensor:
        """Return residual + self(rows), in one pass if packed."""
        if self._panels is not None:
            return self._product(rows_NI, residual_NO)
        if self._packed is None or (self._small and rows_NI.shape[0] == 1):
            return F.linear(rows_NI, self.weight_OI, self.bias_O).add_(residual_NO)
        sum_NO: Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            rows_NI, residual_NO, self._packed, self.bias_O, "add"
        )
        return sum_NO

    def gated(self, rows_NI: Tensor) -> Tensor:
        """Return silu(first half of the outputs) * second half."""
        if self._panels is not None and self._gates:
            return self._product(rows_NI)
        outputs_NO = self(rows_NI)
        half = outputs_NO.shape[1] // 2
        if self._kernels is not None and half % 8 == 0:
            return self._kernels.silu_product(outputs_NO)
        return F.silu(outputs_NO[:, :half]).mul_(outputs_NO[:, half:])

    def _product(self, rows_NI: Tensor, residual_NO: Tensor | None = None) -> Tensor:
        assert self._multiplier is not None
        assert self._panels is not None
        return self._multiplier.product(
            rows_NI,
            self._panels,
            self.weight_OI.shape[0],
            bias=self._bias_panels,
            residual_NO=residual_NO,
            gated=self._gates,
        )
