"""Detects quantized weights, adapters and wrappers' name prefixes, by names and dtypes."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from slimectl.checkpoints.quantization_config import scheme_of
from slimectl.checkpoints.safetensors_io import TensorSpec
from slimectl.errors import CheckpointError
from slimectl.protocols import Weights

QUANTIZED = (
    ".weight_scale_inv", ".weight_scale", ".weight_packed", ".qweight", ".qzeros", ".absmax", ".SCB", "_blocks",
)  # fmt: skip
"""Name suffixes of quantized weights only: fp8, compressed-tensors, GPTQ and AWQ, bitsandbytes, MXFP4."""
WRAPPERS = {
    "_orig_mod.": "torch.compile", "module.": "DistributedDataParallel", "base_model.model.": "peft",
}  # fmt: skip
"""Prefixes that wrappers add to the names of a model's tensors, and the wrappers."""
ADAPTER = (".lora_A.", ".lora_B.", ".base_layer.")
EMBEDDING = "embed_tokens.weight"


def name_obstacle(forms: Mapping[str, TensorSpec], path: Path) -> str:
    """Return why weights of these names cannot be read, with the remedy, or ""."""
    if obstacle := adapter_obstacle(forms):
        return obstacle
    renamed = [(name, stored) for name, stored in plain_names(forms).items() if name != stored]
    if not renamed:
        return ""
    name, stored = renamed[0]
    wrapper = next((f" ({writer}'s prefix)" for prefix, writer in WRAPPERS.items() if prefix in stored), "")
    return (
        f"{stored}{wrapper} should be {name}. Rename the tensors: slimectl convert {shlex.quote(str(path))} DIR --to hf"
    )


def adapter_obstacle(forms: Collection[str]) -> str:
    """Return the problem and remedy for an adapter among the weights, or "" if there is none."""
    if not any(part in name for name in forms for part in ADAPTER):
        return ""
    return (
        "the weights hold an unmerged adapter (lora_A, lora_B). Merge it with peft's merge_and_unload, and save the"
        " model again."
    )


def lasting_obstacle(forms: Mapping[str, TensorSpec], config: Mapping[str, Any]) -> str:
    """Return why weights can be neither read nor converted, with the remedy, or "" if they can."""
    if is_quantized(forms) and not config.get("quantization_config"):
        return (
            "the weights are quantized, but config.json has no quantization_config. Copy the model's own config.json."
        )
    return adapter_obstacle(forms)


def plain_obstacle(forms: Mapping[str, TensorSpec], config: Mapping[str, Any], path: Path) -> str:
    """Return why training and the embedded engine cannot read these weights directly, with the remedy, or ""."""
    return lasting_obstacle(forms, config) or (_quantized(config, path) if is_quantized(forms) else "")


def _quantized(config: Mapping[str, Any], path: Path) -> str:
    method = config["quantization_config"].get("quant_method")
    remedy = (
        f"To train or sample them here, dequantize them: slimectl convert {shlex.quote(str(path))} DIR --dtype bfloat16"
    )
    try:
        scheme_of(config)
    except CheckpointError:
        remedy = "Use the model that they were quantized from."
    return f"the weights are quantized ({method}), which only SGLang and vLLM can sample from. {remedy}"


def is_quantized(forms: Mapping[str, TensorSpec]) -> bool:
    """Return whether a checkpoint holds quantized weights, regardless of config.json."""
    return any(
        name.endswith(QUANTIZED) or (name.endswith(".weight") and len(shape) > 1 and dtype.itemsize == 1)
        for name, (shape, dtype) in forms.items()
    )


def plain_names(names: Collection[str]) -> dict[str, str]:
    """Map each name in the architecture to the stored name of the same tensor.

    Wrappers' prefixes and a second `model.` are removed. Names of a bare decoder get the missing `model.`.

    >>> plain_names(["_orig_mod.model.norm.weight"])
    {'model.norm.weight': '_orig_mod.model.norm.weight'}
    >>> plain_names(["embed_tokens.weight", "lm_head.weight"])
    {'model.embed_tokens.weight': 'embed_tokens.weight', 'lm_head.weight': 'lm_head.weight'}
    """
    mapping = {name.replace("_orig_mod.", ""): name for name in names}
    prefixes = [*WRAPPERS]
    while prefix := next((each for each in prefixes if mapping and all(n.startswith(each) for n in mapping)), ""):
        mapping = {name.removeprefix(prefix): stored for name, stored in mapping.items()}
    if EMBEDDING in mapping:
        return {name if name.startswith("lm_head.") else f"model.{name}": stored for name, stored in mapping.items()}
    if f"model.model.{EMBEDDING}" in mapping:
        return {name.removeprefix("model."): stored for name, stored in mapping.items()}
    return mapping


class PlainNames:
    """Weights under the names of `plain_names`."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self.stored = plain_names(weights.forms())

    def forms(self) -> Mapping[str, TensorSpec]:
        forms = self._weights.forms()
        return {name: forms[stored] for name, stored in self.stored.items()}

    def get(self, name: str) -> Tensor:
        return self._weights.get(self.stored[name])
