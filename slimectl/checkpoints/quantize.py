"""Views of weights: quantized, and dequantized."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from slimectl.checkpoints.quantize_fp8 import Fp8Blocks
from slimectl.checkpoints.quantize_int4 import Int4Groups
from slimectl.checkpoints.safetensors_file import Form
from slimectl.errors import CheckpointError
from slimectl.ports import Weights

Scheme = Fp8Blocks | Int4Groups

KEPT = re.compile(
    r"norm|(^|\.)(embed_tokens|lm_head|gate|router|shared_expert_gate|eh_proj|head|in_proj_(ba|a|b))\.weight$"
)
"""Matrices that stay in full precision: small, but sensitive to quantization. (A router's `gate` is no `gate_proj`.)"""


class Quantized:
    """Linear layers of `weights` quantized by `scheme`; those in KEPT and other tensors are unchanged."""

    def __init__(self, weights: Weights, scheme: Scheme) -> None:
        self._weights = weights
        self._scheme = scheme
        self._last: tuple[str, dict[str, Tensor]] = ("", {})

    @cached_property
    def _stored(self) -> dict[str, tuple[str, str, Form]]:
        """Source tensor, part of its quantized form, and form, by stored name."""
        stored: dict[str, tuple[str, str, Form]] = {}
        for name, form in self._weights.forms().items():
            if not _is_linear(name, form) or KEPT.search(name):
                stored[name] = name, "", form
                continue
            if refusal := self._scheme.refusal(form):
                raise CheckpointError(f"{name}: {refusal}; choose another --group or --quantize fp8")
            module = name.removesuffix("weight")
            stored |= {module + part: (name, part, part_form) for part, part_form in self._scheme.forms(form).items()}
        return stored

    def forms(self) -> Mapping[str, Form]:
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
        layers = [name.removesuffix(".weight") for name in full_precision if not re.search(r"norm|embed_tokens", name)]
        return self._scheme.config(layers)


def _is_linear(name: str, form: Form) -> bool:
    return name.endswith(".weight") and len(form[0]) == 2 and form[1].is_floating_point


class Dequantized:
    """Weights of `scheme` dequantized to `dtype`; all other tensors are unchanged."""

    def __init__(self, weights: Weights, scheme: Scheme, dtype: torch.dtype) -> None:
        self._weights = weights
        self._scheme = scheme
        self._dtype = dtype

    @cached_property
    def _parts_by_weight(self) -> dict[str, dict[str, str]]:
        """Names of the stored parts of each quantized weight."""
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
                    raise CheckpointError(f"no tensor for {name}; download the quantized checkpoint again")
        return parts_by_weight

    def forms(self) -> Mapping[str, Form]:
        inner, parts_by_weight = self._weights.forms(), self._parts_by_weight
        stored_names = {name for parts in parts_by_weight.values() for name in parts.values()}
        forms: dict[str, Form] = {}
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
            raise CheckpointError(f"{name}: {error}; download the quantized checkpoint again") from error


def scheme_of(config: Mapping[str, Any]) -> Scheme | None:
    """Read the quantization scheme from config.json; None if there is none. Raises CheckpointError."""
    quantization = config.get("quantization_config")
    if not quantization:
        return None
    method = quantization.get("quant_method")
    if (
        method == "fp8"
        and len(quantization.get("weight_block_size") or ()) == 2
        and quantization.get("scale_fmt", "float") == "float"
    ):
        return Fp8Blocks(*quantization["weight_block_size"])
    if method == "compressed-tensors" and quantization.get("format") == "pack-quantized":
        groups = [group.get("weights") or {} for group in quantization.get("config_groups", {}).values()]
        schemes = [(w.get("num_bits"), w.get("type"), w.get("strategy"), w.get("symmetric")) for w in groups]
        if schemes == [(4, "int", "group", True)] and not groups[0].get("actorder"):
            return Int4Groups(groups[0]["group_size"])
    layout = quantization.get("format") or quantization.get("fmt") or "plain"
    raise CheckpointError(
        f"config.json: weights quantized as {method or 'unknown'} ({layout}) cannot be read;"
        " known are fp8 with weight_block_size and compressed-tensors' symmetric int4 groups"
    )
