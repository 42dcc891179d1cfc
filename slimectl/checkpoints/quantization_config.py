"""Reads the quantization scheme of a model from its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slimectl.checkpoints.quantization_schemes import Fp8Blocks, Fp8Scale, Int4Groups, Mxfp4Experts, Scheme
from slimectl.errors import CheckpointError


def scheme_of(config: Mapping[str, Any]) -> Scheme | None:
    """Read the quantization scheme from config.json, or return None. Raises CheckpointError."""
    quantization = config.get("quantization_config")
    if not quantization:
        return None
    method = quantization.get("quant_method")
    scales = quantization.get("scale_fmt") or "float"
    if method == "fp8" and scales in ("float", "ue8m0"):
        block = quantization.get("weight_block_size")
        if block is not None and len(block) == 2:
            return Fp8Blocks(block[0], block[1], powers_of_two=scales == "ue8m0")
        if block is None and quantization.get("activation_scheme", "dynamic") == "dynamic":
            return Fp8Scale()
    if method == "mxfp4":
        return Mxfp4Experts()
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
        f"config.json: weights quantized as {method or 'unknown'} ({layout}) are not supported. Supported: fp8 with "
        "weight_block_size or one scale per matrix, compressed-tensors' fp8 and symmetric int4, mxfp4."
    )
