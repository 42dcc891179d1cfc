"""Quantized weights: fp8 (float8_e4m3fn) with a scale per block, matrix or row, and int4 in groups of columns."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from slimectl.checkpoints.safetensors_io import TensorSpec
from slimectl.errors import CheckpointError
from slimectl.protocols import NamedTensors, Weights

LARGEST = 448.0
"""The largest number of float8_e4m3fn."""


@dataclass(frozen=True)
class Fp8Blocks:
    """fp8 with one scale per block of `rows` x `columns`: `weight = weight_fp8 * weight_scale_inv`.

    e4m3 has 3 mantissa bits, so the error of a value is at most 1/16 of it. For values that are tiny compared to the
    largest of their block, it is at most 2^-10 of the block's scale.
    """

    rows: int = 128
    columns: int = 128
    parts = ("weight", "weight_scale_inv")

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
        return {**config, "modules_to_not_convert": list(untouched)} if untouched else config


@dataclass(frozen=True)
class Fp8Scale:
    """fp8 with one scale per matrix, or per row with `per_row`: `weight = weight_fp8 * weight_scale`.

    This is vLLM's and SGLang's per-tensor and per-channel fp8. Errors are the same as for Fp8Blocks.
    """

    per_row: bool = False
    parts = ("weight", "weight_scale")

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
        """Build `quantization_config` of config.json. `untouched` are the linear layers that are not quantized."""
        if not self.per_row:
            config = {"quant_method": "fp8", "activation_scheme": "dynamic"}
            return {**config, "ignored_layers": list(untouched)} if untouched else config
        fp8 = {"num_bits": 8, "type": "float", "symmetric": True}
        weights, inputs = {**fp8, "strategy": "channel"}, {**fp8, "strategy": "token", "dynamic": True}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
        return {
            "quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed",
            "config_groups": {"group_0": group}, "ignore": list(untouched), "kv_cache_scheme": None,
        }  # fmt: skip


PER_INT32 = 8


@dataclass(frozen=True)
class Int4Groups:
    """int4 with one scale per group of `size` consecutive columns of a row.

    Values are -8 to 7, and the scale is the largest magnitude / 7.5. Eight values, each plus 8, are packed into one
    int32, the first in the lowest bits. The error is at most half a scale.
    """

    size: int = 128
    parts = ("weight_packed", "weight_scale", "weight_shape")

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
        group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": list(untouched),
            "kv_cache_scheme": None,
        }


Scheme = Fp8Blocks | Fp8Scale | Int4Groups

KEPT = re.compile(
    r"norm|(^|\.)visual\.|"
    r"(^|\.)(embed_tokens|pos_embed|lm_head|gate|router|shared_expert_gate|eh_proj|head|in_proj_(ba|a|b))\.weight$"
)
"""Matrices that stay in full precision, because they are small and sensitive to quantization. A router is `gate`, not
`gate_proj`. A vision tower also stays in full precision, as in published checkpoints."""
TABLES = re.compile(r"norm|embed_tokens|pos_embed")
"""Matrices among them that are not layers, so a configuration does not list them."""


HEAD = "lm_head"


class Quantized:
    """Linear layers of `weights`, quantized by `scheme`. Layers in KEPT and other tensors are unchanged."""

    def __init__(self, weights: Weights, scheme: Scheme) -> None:
        self._weights = weights
        self._scheme = scheme
        self._last: tuple[str, dict[str, Tensor]] = ("", {})

    @cached_property
    def _stored(self) -> dict[str, tuple[str, str, TensorSpec]]:
        """Return source tensor, part of its quantized form, and form, by stored name."""
        stored: dict[str, tuple[str, str, TensorSpec]] = {}
        for name, form in self._weights.forms().items():
            if not _is_linear(name, form) or KEPT.search(name):
                stored[name] = name, "", form
                continue
            if refusal := self._scheme.refusal(form):
                raise CheckpointError(f"{name}: {refusal}. Choose another --group, or --quantize fp8.")
            module = name.removesuffix("weight")
            stored |= {module + part: (name, part, part_form) for part, part_form in self._scheme.forms(form).items()}
        return stored

    def forms(self) -> Mapping[str, TensorSpec]:
        return {name: form for name, (_, _, form) in self._stored.items()}

    def get(self, name: str) -> Tensor:
        source, part, _ = self._stored[name]
        if not part:
            return self._weights.get(name)
        if self._last[0] != source:
            self._last = source, self._scheme.quantized(self._weights.get(source))
        return self._last[1][part]

    def config(self) -> dict[str, Any]:
        """Build `quantization_config` of config.json."""
        forms = self._weights.forms()
        full_precision = [name for name, form in forms.items() if _is_linear(name, form) and KEPT.search(name)]
        layers = [name.removesuffix(".weight") for name in full_precision if not TABLES.search(name)]
        # A tied head has no tensor, but transformers builds a layer for it.
        return self._scheme.config(layers if HEAD in layers else [*layers, HEAD])


def _is_linear(name: str, form: TensorSpec) -> bool:
    return name.endswith(".weight") and len(form[0]) == 2 and form[1].is_floating_point


class Dequantized:
    """Weights of `scheme`, dequantized to `dtype`. All other tensors are unchanged."""

    def __init__(self, weights: Weights, scheme: Scheme, dtype: torch.dtype) -> None:
        self._weights = weights
        self._scheme = scheme
        self._dtype = dtype

    @cached_property
    def _parts_by_weight(self) -> dict[str, dict[str, str]]:
        """Return the names of the stored parts of each quantized weight."""
        forms = self._weights.forms()
        first, scale = self._scheme.parts[:2]
        parts_by_weight = {}
        for name, (_, dtype) in forms.items():
            module, _, part = name.rpartition(".")
            if part == scale or (part == first and dtype in (torch.float8_e4m3fn, torch.int32)):
                parts_by_weight[f"{module}.weight"] = {part: f"{module}.{part}" for part in self._scheme.parts}
        for parts in parts_by_weight.values():
            for name in parts.values():
                if name not in forms:
                    raise CheckpointError(f"no tensor for {name}. Download the quantized checkpoint again.")
        return parts_by_weight

    def forms(self) -> Mapping[str, TensorSpec]:
        inner, parts_by_weight = self._weights.forms(), self._parts_by_weight
        stored_names = {name for parts in parts_by_weight.values() for name in parts.values()}
        forms: dict[str, TensorSpec] = {}
        for name, form in inner.items():
            weight = name.rpartition(".")[0] + ".weight"
            if name not in stored_names:
                forms[name] = form
            elif weight not in forms:
                parts = {part: inner[stored] for part, stored in parts_by_weight[weight].items()}
                forms[weight] = self._scheme.weight_form(parts, self._dtype)
        return forms

    def get(self, name: str) -> Tensor:
        parts = self._parts_by_weight.get(name)
        if parts is None:
            return self._weights.get(name)
        try:
            return self._scheme.weight({part: self._weights.get(stored) for part, stored in parts.items()}, self._dtype)
        except ValueError as error:
            raise CheckpointError(f"{name}: {error}. Download the quantized checkpoint again.") from error


def scheme_of(config: Mapping[str, Any]) -> Scheme | None:
    """Read the quantization scheme from config.json, or return None. Raises CheckpointError."""
    quantization = config.get("quantization_config")
    if not quantization:
        return None
    method = quantization.get("quant_method")
    if method == "fp8" and quantization.get("scale_fmt", "float") == "float":
        block = quantization.get("weight_block_size")
        if block is not None and len(block) == 2:
            return Fp8Blocks(*block)
        if block is None and quantization.get("activation_scheme", "dynamic") == "dynamic":
            return Fp8Scale()
    if method == "compressed-tensors":
        groups = [group.get("weights") or {} for group in quantization.get("config_groups", {}).values()]
        schemes = [(w.get("num_bits"), w.get("type"), w.get("strategy"), w.get("symmetric")) for w in groups]
        layout = quantization.get("format")
        if layout == "pack-quantized" and schemes == [(4, "int", "group", True)] and not groups[0].get("actorder"):
            return Int4Groups(groups[0]["group_size"])
        if layout == "float-quantized" and schemes in [[(8, "float", kind, True)] for kind in ("tensor", "channel")]:
            return Fp8Scale(per_row=schemes[0][2] == "channel")
    layout = quantization.get("format") or quantization.get("fmt") or "plain"
    raise CheckpointError(
        f"config.json: weights quantized as {method or 'unknown'} ({layout}) are not supported."
        " Supported: fp8 with weight_block_size or one scale per matrix, compressed-tensors' fp8 and symmetric int4."
    )


class QuantizedStream:
    """Converts a stream of full-precision weights into the parts of an engine's fp8 checkpoint, in its scheme.

    It is picklable, because it runs in the process that holds the weights.
    """

    def __init__(self, stored: Mapping[str, TensorSpec], scheme: Fp8Blocks | Fp8Scale, dtype: torch.dtype) -> None:
        """`stored` are the forms of the tensors in the engine's checkpoint, `dtype` the type of its other weights."""
        self.scheme, self.dtype = scheme, dtype
        scale = scheme.parts[1]
        self.forms = {
            name: (shape, stored[name.removesuffix("weight") + scale][0])
            for name, (shape, stored_dtype) in stored.items()
            if name.endswith(".weight") and stored_dtype == torch.float8_e4m3fn
        }
        """Shapes of weight and scale of every fp8 weight, by name."""

    def __call__(self, tensors: NamedTensors) -> Iterator[tuple[str, Tensor]]:
        """Yield fp8 weights followed by their scales, and all other tensors unchanged.

        Raises CheckpointError if the policy's weights do not match the engine's checkpoint.
        """
        remaining = set(self.forms)
        for name, tensor in tensors:
            if name not in self.forms:
                yield name, tensor
                continue
            remaining.discard(name)
            shape, scale_shape = self.forms[name]
            weight, scale = self.scheme.quantized(tensor.detach()).values()
            if tuple(weight.shape) != shape or scale.numel() != math.prod(scale_shape):
                raise CheckpointError(
                    f"engine.load: {name} has shape {list(shape)} and {math.prod(scale_shape)} scales, but the policy's"
                    f" has {list(weight.shape)} and {scale.numel()}. Convert the policy's model again."
                )
            yield name, weight
            yield name.removesuffix("weight") + self.scheme.parts[1], scale.view(scale_shape)
        if remaining:
            raise CheckpointError(
                f"engine.load: the policy has no {min(remaining)}, which the engine holds in fp8. Use a checkpoint of"
                " the same model."
            )
