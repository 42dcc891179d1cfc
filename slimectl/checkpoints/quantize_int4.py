"""int4 weights in groups: the "pack-quantized" layout of compressed-tensors, symmetric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slimectl.checkpoints.safetensors_file import Form

PER_INT32 = 8


@dataclass(frozen=True)
class Int4Groups:
    """Groups of `size` consecutive columns of a row share a scale: largest magnitude / 7.5, numbers from -8 to 7.

    Eight values, each plus 8, are packed in one int32, the first in its lowest bits. The error is at most half a scale.
    """

    size: int = 128
    parts = ("weight_packed", "weight_scale", "weight_shape")

    def forms(self, form: Form) -> dict[str, Form]:
        """Forms of the stored parts of a weight of `form`."""
        (rows, columns), dtype = form
        return {
            "weight_packed": ((rows, columns // PER_INT32), torch.int32),
            "weight_scale": ((rows, columns // self.size), dtype),
            "weight_shape": ((2,), torch.int64),
        }

    def refusal(self, form: Form) -> str | None:
        """Reason why a weight of `form` cannot be stored in this scheme; None if it can."""
        columns = form[0][1]
        return f"{columns} columns are not whole groups of {self.size}" if columns % self.size else None

    def quantized(self, weight: Tensor) -> dict[str, Tensor]:
        R, C = weight.shape
        groups = weight.float().view(R, C // self.size, self.size)
        # Rounded to the weight's precision first: values must be multiples of the stored scale.
        scales = (groups.abs().amax(-1) / 7.5).to(weight.dtype)
        scales[scales == 0] = 1.0
        numbers = (groups / scales.float()[..., None]).round_().clamp_(-8, 7).to(torch.int32) + 8
        nibbles = numbers.view(R, C // PER_INT32, PER_INT32)
        packed = torch.zeros(R, C // PER_INT32, dtype=torch.int32)
        for i in range(PER_INT32):
            packed |= nibbles[..., i] << (4 * i)
        return {"weight_packed": packed, "weight_scale": scales, "weight_shape": torch.tensor([R, C])}

    def weight_form(self, forms: Mapping[str, Form], dtype: torch.dtype) -> Form:
        rows, groups = forms["weight_scale"][0]
        return (rows, groups * self.size), dtype

    def weight(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Dequantize a weight. Raises ValueError if the shapes of the parts do not match."""
        packed, scales = parts["weight_packed"], parts["weight_scale"]
        R, C = (int(size) for size in parts["weight_shape"])
        if tuple(packed.shape) != (R, C // PER_INT32) or tuple(scales.shape) != (R, C // self.size):
            shapes = f"{list(packed.shape)} numbers and {list(scales.shape)} scales"
            raise ValueError(f"{shapes} for a weight of {[R, C]} in groups of {self.size}")
        numbers = torch.empty(R, C // PER_INT32, PER_INT32)
        for i in range(PER_INT32):
            numbers[..., i] = (packed >> (4 * i) & 15) - 8
        return numbers.view(R, -1, self.size).mul_(scales.float()[..., None]).view(R, C).to(dtype)

    def config(self, untouched: Sequence[str]) -> dict[str, Any]:
        """Build `quantization_config` of config.json; `untouched` are the linear layers that are not quantized."""
        weights = {
            "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": self.size,
            "dynamic": False, "actorder": None, "block_structure": None, "observer": "minmax", "observer_kwargs": {},
        }  # fmt: skip
        group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": list(untouched),
            "kv_cache_scheme": None,
        }
