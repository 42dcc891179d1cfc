"""Quantizes and dequantizes the linear layers of a checkpoint, one tensor at a time."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from slimectl.checkpoints.quantization_schemes import Fp8Blocks, Fp8Scale, Scheme, WritableScheme
from slimectl.checkpoints.safetensors_io import TensorSpec
from slimectl.errors import CheckpointError
from slimectl.protocols import NamedTensors, Weights

KEPT = re.compile(
    r"norm|(^|\.)(visual|(vision|audio)_\w+|embed_(vision|audio)|multi_modal_projector)\.|"
    r"(^|\.)(embed_tokens|pos_embed|lm_head|gate|router|shared_expert_gate|eh_proj|head|in_proj_(ba|a|b)|"
    r"(gate|router)\.\w+|x_proj|dt_proj|"
    r"indexer\.(wk|weights_proj))\.weight$"
)
"""Matrices that stay in full precision, because they are small and sensitive to quantization, and engines have no
quantized layers for them. A router is `gate`, not `gate_proj`. A vision tower also stays in full precision, as in
published checkpoints."""
TABLES = re.compile(r"norm|embed_tokens|pos_embed")
"""Matrices among them that are not layers, so a configuration does not list them."""


FUSED_EXPERTS = re.compile(r"(.+\.experts)\.\w+$")
"""Tensors of all experts of a layer, which stay in full precision."""
HEAD = "lm_head"
PACKED = (torch.float8_e4m3fn, torch.int32, torch.uint8)


class Quantized:
    """Linear layers of `weights`, quantized by `scheme`. Layers in KEPT and other tensors are unchanged."""

    def __init__(self, weights: Weights, scheme: WritableScheme, linear: Collection[str] | None = None) -> None:
        """`linear`: names of the weights that may be quantized. Default: all matrices, as in known families."""
        self._weights = weights
        self._scheme = scheme
        self._linear = linear
        self._last: tuple[str, dict[str, Tensor]] = ("", {})

    @cached_property
    def _stored(self) -> dict[str, tuple[str, str, TensorSpec]]:
        """Return source tensor, part of its quantized form, and form, by stored name."""
        stored: dict[str, tuple[str, str, TensorSpec]] = {}
        for name, form in self._weights.forms().items():
            if not self._is_quantized(name, form):
                stored[name] = name, "", form
                continue
            if refusal := self._scheme.refusal(form):
                raise CheckpointError(f"{name}: {refusal}. Choose another --group, or --quantize fp8.")
            module = name.removesuffix("weight")
            stored |= {module + part: (name, part, part_form) for part, part_form in self._scheme.forms(form).items()}
        if not any(part for _, part, _ in stored.values()):
            raise CheckpointError("--quantize: the model has no linear layers that can be quantized. Leave it out.")
        return stored

    def _is_quantized(self, name: str, form: TensorSpec) -> bool:
        may_be = self._linear is None or name in self._linear
        return may_be and _is_matrix(name, form) and not KEPT.search(name)

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
        layers = [
            name.removesuffix(".weight")
            for name, form in forms.items()
            if _is_matrix(name, form) and not self._is_quantized(name, form) and not TABLES.search(name)
        ]
        layers += dict.fromkeys(match[1] for name in forms if (match := FUSED_EXPERTS.match(name)))
        # A tied head has no tensor, but transformers builds a layer for it.
        return self._scheme.config(layers if HEAD in layers else [*layers, HEAD])


def _is_matrix(name: str, form: TensorSpec) -> bool:
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
            module, _, part = name.rpartition(self._scheme.joint)
            if part == scale or (part == first and dtype in PACKED):
                weight = f"{module}{self._scheme.suffix}"
                parts_by_weight[weight] = {part: f"{module}{self._scheme.joint}{part}" for part in self._scheme.parts}
        for parts in parts_by_weight.values():
            for name in parts.values():
                if name not in forms:
                    raise CheckpointError(f"no tensor for {name}. Download the quantized checkpoint again.")
        return parts_by_weight

    def forms(self) -> Mapping[str, TensorSpec]:
        inner, parts_by_weight = self._weights.forms(), self._parts_by_weight
        weight_of = {stored: weight for weight, parts in parts_by_weight.items() for stored in parts.values()}
        forms: dict[str, TensorSpec] = {}
        for name, form in inner.items():
            weight = weight_of.get(name)
            if weight is None:
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
