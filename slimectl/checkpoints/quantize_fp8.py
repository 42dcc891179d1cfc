"""fp8 weights in the format of DeepSeek-V3: float8_e4m3fn with one float32 scale per block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from slimectl.checkpoints.safetensors_file import Form

LARGEST = 448.0
"""The largest number of float8_e4m3fn."""


@dataclass(frozen=True)
class Fp8Blocks:
    """Blocks of `rows` x `columns`; `weight = weight_fp8 * weight_scale_inv` of its block.

    e4m3 has 3 mantissa bits, so the error of a value is at most 1/16 of it, or, for values that are tiny beside the
    largest of their block, 2^-10 of the block's scale.
    """

    rows: int = 128
    columns: int = 128
    parts = ("weight", "weight_scale_inv")

    def forms(self, form: Form) -> dict[str, Form]:
        """Forms of the stored parts of a weight of `form`."""
        (rows, columns), _ = form
        scales = (-(-rows // self.rows), -(-columns // self.columns))
        return {"weight": ((rows, columns), torch.float8_e4m3fn), "weight_scale_inv": (scales, torch.float32)}

    def refusal(self, form: Form) -> str | None:
        """Reason why a weight of `form` cannot be stored in this scheme; None if it can."""
        return None

    def quantized(self, weight: Tensor) -> dict[str, Tensor]:
        R, C = weight.shape
        down, right = -R % self.rows, -C % self.columns
        blocks = pad(weight.float(), (0, right, 0, down)).view(
            (R + down) // self.rows, self.rows, (C + right) // self.columns, self.columns
        )
        scales = blocks.abs().amax(dim=(1, 3)) / LARGEST
        scales[scales == 0] = 1.0
        small = (blocks / scales[:, None, :, None]).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        return {"weight": small.view(R + down, C + right)[:R, :C].contiguous(), "weight_scale_inv": scales}

    def weight_form(self, forms: Mapping[str, Form], dtype: torch.dtype) -> Form:
        return forms["weight"][0], dtype

    def weight(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Dequantize a weight. Raises ValueError if there is not one scale per block."""
        small, scales = parts["weight"], parts["weight_scale_inv"]
        scales_shape = self.forms((tuple(small.shape), dtype))["weight_scale_inv"][0]
        if tuple(scales.shape) != scales_shape:
            raise ValueError(f"scales of shape {list(scales.shape)}, blocks ask for {list(scales_shape)}")
        R, C = small.shape
        expanded = scales.float().repeat_interleave(self.rows, 0)[:R].repeat_interleave(self.columns, 1)[:, :C]
        return expanded.mul_(small.float()).to(dtype)

    def config(self, untouched: Sequence[str]) -> dict[str, Any]:
        """Build `quantization_config` of config.json; `untouched` are the linear layers that are not quantized."""
        blocks = [self.rows, self.columns]
        config = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": blocks, "activation_scheme": "dynamic"}
        return {**config, "modules_to_not_convert": list(untouched)} if untouched else config
