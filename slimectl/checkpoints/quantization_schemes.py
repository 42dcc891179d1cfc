"""Schemes of quantized weights: fp8 (float8_e4m3fn) with a scale per block, matrix or row, and int4 in groups."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from slimectl.checkpoints.safetensors_io import TensorSpec

LARGEST = 448.0
"""The largest number of float8_e4m3fn."""


@dataclass(frozen=True)
class Fp8Blocks:
    """fp8 with one scale per block of `rows` x `columns`: `weight = weight_fp8 * weight_scale_inv`.

    e4m3 has 3 mantissa bits, so the error of a value is at most 1/16 of it. For values that are tiny compared to the
    largest of their block, it is at most 2^-10 of the block's scale. Scales that are powers of two ("ue8m0", as in
    DeepSeek-V3.1) are rounded up, which doubles these bounds at most.
    """

    rows: int = 128
    columns: int = 128
    powers_of_two: bool = False
    parts = ("weight", "weight_scale_inv")
    joint = "."
    suffix = ".weight"

    def forms(self, form: TensorSpec) -> dict[str, TensorSpec]:
        """Return the forms of the stored parts of a weight of `form`."""
        (rows, columns), _ = form
        scales = (-(-rows // self.rows), -(-columns // self.columns))
        return {"weight": ((rows, columns), torch.float8_e4m3fn), "weight_scale_inv": (scales, torch.float32)}

    def refusal(self, form: TensorSpec) -> str | None:
        """Return why a weight of `form` cannot be stored in this scheme, or None if it can."""
        return None

    def quantized(self, weight: Tensor) -> dict[str, Tensor]:
        R, C = weight.shape
        down, right = -R % self.rows, -C % self.columns
        blocks = pad(weight.float(), (0, right, 0, down)).view(
            (R + down) // self.rows, self.rows, (C + right) // self.columns, self.columns
        )
        scales = blocks.abs().amax(dim=(1, 3)) / LARGEST
        scales[scales == 0] = 1.0
        if self.powers_of_two:
            scales = scales.log2().ceil().exp2()
        small = (blocks / scales[:, None, :, None]).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        return {"weight": small.view(R + down, C + right)[:R, :C].contiguous(), "weight_scale_inv": scales}

    def weight_form(self, forms: Mapping[str, TensorSpec], dtype: torch.dtype) -> TensorSpec:
        return forms["weight"][0], dtype

    def weight(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Dequantize a weight. Raises ValueError if there is not one scale per block."""
        small, scales = parts["weight"], parts["weight_scale_inv"]
        scales_shape = self.forms((tuple(small.shape), dtype))["weight_scale_inv"][0]
        if tuple(scales.shape) != scales_shape:
            raise ValueError(f"scales of shape {list(scales.shape)}, expected {list(scales_shape)} for these blocks")
        R, C = small.shape
        expanded = scales.float().repeat_interleave(self.rows, 0)[:R].repeat_interleave(self.columns, 1)[:, :C]
        return expanded.mul_(small.float()).to(dtype)

    def config(self, untouched: Sequence[str]) -> dict[str, Any]:
        """Build `quantization_config` of config.json. `untouched` are the linear layers that are not quantized."""
        blocks = [self.rows, self.columns]
        config = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": blocks, "activation_scheme": "dynamic"}
        scale = {"scale_fmt": "ue8m0"} if self.powers_of_two else {}
        return config | scale | ({"modules_to_not_convert": list(untouched)} if untouched else {})


@dataclass(frozen=True)
class Fp8Scale:
    """fp8 with one scale per matrix, or per row with `per_row`: `weight = weight_fp8 * weight_scale`.

    This is vLLM's and SGLang's per-tensor and per-channel fp8. Errors are the same as for Fp8Blocks.
    """

    per_row: bool = False
    parts = ("weight", "weight_scale")
    joint = "."
    suffix = ".weight"

    def forms(self, form: TensorSpec) -> dict[str, TensorSpec]:
        """Return the forms of the stored parts of a weight of `form`."""
        (rows, columns), _ = form
        scale = (rows, 1) if self.per_row else (1,)
        return {"weight": ((rows, columns), torch.float8_e4m3fn), "weight_scale": (scale, torch.float32)}

    def refusal(self, form: TensorSpec) -> str | None:
        """Return why a weight of `form` cannot be stored in this scheme, or None if it can."""
        return None

    def quantized(self, weight: Tensor) -> dict[str, Tensor]:
        values = weight.float()
        scale = (values.abs().amax(dim=1, keepdim=True) if self.per_row else values.abs().amax().view(1)) / LARGEST
        scale[scale == 0] = 1.0
        small = (values / scale).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        return {"weight": small, "weight_scale": scale}

    def weight_form(self, forms: Mapping[str, TensorSpec], dtype: torch.dtype) -> TensorSpec:
        return forms["weight"][0], dtype

    def weight(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Dequantize a weight. Raises ValueError if there is not one scale for it, or for each row."""
        small, scale = parts["weight"], parts["weight_scale"].float()
        count = small.shape[0] if self.per_row else 1
        if scale.numel() != count:
            raise ValueError(f"scales of shape {list(scale.shape)}, expected {count}")
        return (small.float() * scale.view(-1, 1)).to(dtype)

    def config(self, untouched: Sequence[str]) -> dict[str, Any]:
        """Build `quantization_config` of config.json. `untouched` are the linear layers that are not quantized.

        Readers scale each token (with a scale per row) or all of a layer's inputs to fp8 as they compute.
        """
        fp8 = {"num_bits": 8, "type": "float", "symmetric": True}
        weights, inputs = ("channel", "token") if self.per_row else ("tensor", "tensor")
        activations = {**fp8, "strategy": inputs, "dynamic": True}
        return _compressed_tensors("float-quantized", {**fp8, "strategy": weights}, activations, untouched)


PER_INT32 = 8


@dataclass(frozen=True)
class Int4Groups:
    """int4 with one scale per group of `size` consecutive columns of a row.

    Values are -8 to 7, and the scale is the largest magnitude / 7.5. Eight values, each plus 8, are packed into one
    int32, the first in the lowest bits. The error is at most half a scale.
    """

    size: int = 128
    parts = ("weight_packed", "weight_scale", "weight_shape")
    joint = "."
    suffix = ".weight"

    def forms(self, form: TensorSpec) -> dict[str, TensorSpec]:
        """Return the forms of the stored parts of a weight of `form`."""
        (rows, columns), dtype = form
        return {
            "weight_packed": ((rows, columns // PER_INT32), torch.int32),
            "weight_scale": ((rows, columns // self.size), dtype),
            "weight_shape": ((2,), torch.int64),
        }

    def refusal(self, form: TensorSpec) -> str | None:
        """Return why a weight of `form` cannot be stored in this scheme, or None if it can."""
        columns = form[0][1]
        return f"{columns} columns cannot be split into groups of {self.size}" if columns % self.size else None

    def quantized(self, weight: Tensor) -> dict[str, Tensor]:
        R, C = weight.shape
        groups = weight.float().view(R, C // self.size, self.size)
        # Round to the weight's precision first, because values must be multiples of the stored scale.
        scales = (groups.abs().amax(-1) / 7.5).to(weight.dtype)
        scales[scales == 0] = 1.0
        numbers = (groups / scales.float()[..., None]).round_().clamp_(-8, 7).to(torch.int32) + 8
        nibbles = numbers.view(R, C // PER_INT32, PER_INT32)
        packed = torch.zeros(R, C // PER_INT32, dtype=torch.int32)
        for i in range(PER_INT32):
            packed |= nibbles[..., i] << (4 * i)
        return {"weight_packed": packed, "weight_scale": scales, "weight_shape": torch.tensor([R, C])}

    def weight_form(self, forms: Mapping[str, TensorSpec], dtype: torch.dtype) -> TensorSpec:
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
        """Build `quantization_config` of config.json. `untouched` are the linear layers that are not quantized."""
        weights = {
            "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": self.size,
            "dynamic": False, "actorder": None, "block_structure": None, "observer": "minmax", "observer_kwargs": {},
        }  # fmt: skip
        return _compressed_tensors("pack-quantized", weights, None, untouched)


def _compressed_tensors(
    layout: str, weights: dict[str, Any], inputs: dict[str, Any] | None, untouched: Sequence[str]
) -> dict[str, Any]:
    """Build the `quantization_config` that compressed-tensors reads, in transformers, vLLM and SGLang.

    Readers compare `ignore` with their modules' names, whose prefixes differ from those of the checkpoint (`visual.` is
    `model.visual.` in transformers). Patterns match all of them.
    """
    ignore = list(dict.fromkeys(map(_pattern, untouched)))
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": layout, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ignore, "kv_cache_scheme": None,
    }  # fmt: skip


PREFIXES = re.compile(r"^((model|language_model)\.)+")


def _pattern(name: str) -> str:
    """Return what matches a layer's name with any prefix and layer number. A top-level name is its own pattern.

    >>> print(_pattern("model.layers.3.mlp.gate"))
    re:(.*\\.)?layers\\.\\d+\\.mlp\\.gate$
    """
    parts = [r"\d+" if part.isdecimal() else re.escape(part) for part in PREFIXES.sub("", name).split(".")]
    return r"re:(.*\.)?" + r"\.".join(parts) + "$" if len(parts) > 1 else name


@dataclass(frozen=True)
class Mxfp4Experts:
    """Experts of gpt-oss in MXFP4: a scale, a power of two, for 32 inputs of a row in fp4 (e2m1). They are only read.

    OCP Microscaling Formats 1.0. `NAME_blocks` is [E, R, G, 16] with two numbers in each byte, the first in the lower
    half. `NAME_scales` is [E, R, G], exponents plus 127. `NAME` is [E, 32 * G, R]: experts, inputs, outputs.
    """

    parts = ("blocks", "scales")
    joint = "_"
    suffix = ""

    def weight_form(self, forms: Mapping[str, TensorSpec], dtype: torch.dtype) -> TensorSpec:
        experts, rows, groups, _ = forms["blocks"][0]
        return (experts, 32 * groups, rows), dtype

    def weight(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Dequantize a weight with transformers' function. Raises ValueError if there is not one scale per block."""
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

        blocks, scales = parts["blocks"], parts["scales"]
        if tuple(blocks.shape) != (*scales.shape, 16):
            raise ValueError(f"scales of shape {list(scales.shape)} for blocks of shape {list(blocks.shape)}")
        weight: Tensor = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
        return weight


WritableScheme = Fp8Blocks | Fp8Scale | Int4Groups
Scheme = WritableScheme | Mxfp4Experts
