"""Plans models without formulas: exact parameters from transformers' module, other figures as of a similar layer.

The module is on the meta device, so that no weights are allocated.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from slimectl.architectures.config import Architecture, Config, Rope, without_weights
from slimectl.architectures.lora import chosen
from slimectl.planner.parameters import Kind, ParameterPart

LAYER = re.compile(r"\.(\d+)\.")
MIXER = re.compile(r"attn|attention|mixer|mamba|ssm|conv")
TOWER = re.compile(r"vision|visual|audio|image")
CHOICES = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "num_experts_per_token")
"""Keys of the number of experts that a token uses."""


class ModuleModel:
    """A model as transformers builds it from a complete configuration. Raises CheckpointError if it cannot."""

    def __init__(self, config: Config) -> None:
        hf = without_weights(config)
        self._text: Any = hf.config.get_text_config()
        self._parameters = dict(hf.named_parameters())
        self._linear = {
            name: (module.in_features, module.out_features)
            for name, module in hf.named_modules()
            if type(module).__name__ == "Linear" and LAYER.search(name) and not TOWER.search(name)
        }
        self._embedding, self._head = hf.get_input_embeddings(), hf.get_output_embeddings()

    def parts(self) -> list[ParameterPart]:
        """Return the exact number of parameters by kind and layer. Towers for other inputs than text are frozen."""
        counts: dict[tuple[Kind, int | None], int] = {}
        for name, parameter in self._parameters.items():
            key = self._kind(name, parameter), _layer(name)
            counts[key] = counts.get(key, 0) + parameter.numel()
        return [
            ParameterPart(kind, None if kind == "vision" else layer, count, cut=False, frozen=kind == "vision")
            for (kind, layer), count in counts.items()
        ]

    def adapters(self, rank: int, targets: Sequence[str]) -> list[ParameterPart]:
        """Return the parameters of adapters. Raises SettingsError for a target that matches no layer."""
        layers = chosen(self._linear, targets)
        return [
            ParameterPart(_block(name), _layer(name), rank * sum(self._linear[name]), cut=False, inner=rank)
            for name in layers
        ]

    def architecture(self, parts: Sequence[ParameterPart]) -> Architecture:
        """Return a decoder of attention and gated MLPs with the same width, layers and parameters."""
        text, hidden = self._text, int(self._embedding.weight.shape[1])
        layers = max((part.layer for part in parts if part.layer is not None), default=0) + 1
        heads = int(getattr(text, "num_attention_heads", None) or max(1, hidden // 64))
        mlp = sum(part.count for part in parts if part.kind == "mlp")
        tied = self._head is None or self._head.weight is self._embedding.weight
        transformer = {
            "num_layers": layers,
            "hidden_size": hidden,
            "ffn_hidden_size": max(1, mlp // (3 * hidden * layers)),
            "num_attention_heads": heads,
            "num_query_groups": int(getattr(text, "num_key_value_heads", None) or heads),
            "kv_channels": int(getattr(text, "head_dim", None) or hidden // heads),
            **self._experts(hidden, layers),
        }
        positions = int(getattr(text, "max_position_embeddings", None) or 2**20)
        return Architecture(transformer, int(self._embedding.weight.shape[0]), positions, tied, Rope(10000.0))

    def _experts(self, hidden: int, layers: int) -> dict[str, Any]:
        fused = {name: p for name, p in self._parameters.items() if _is_experts(name, p)}
        if not fused:
            return {}
        experts = int(next(iter(fused.values())).shape[0])
        sparse = {_layer(name) for name in fused}
        width = sum(p.numel() for p in fused.values()) // (len(sparse) * experts * 3 * hidden)
        return {
            "num_moe_experts": experts,
            "moe_router_topk": next((int(k) for key in CHOICES if (k := getattr(self._text, key, None))), experts),
            "moe_ffn_hidden_size": max(1, width),
            "moe_layer_freq": [int(layer in sparse) for layer in range(layers)],
        }

    def _kind(self, name: str, parameter: Any) -> Kind:
        if TOWER.search(name):
            return "vision"
        if parameter is self._embedding.weight:
            return "embedding"
        if self._head is not None and any(parameter is each for each in self._head.parameters()):
            return "output"
        if _is_experts(name, parameter):
            return "experts"
        return "norms" if parameter.ndim < 2 or _layer(name) is None else _block(name)


def _layer(name: str) -> int | None:
    match = LAYER.search(name)
    return int(match[1]) if match else None


def _block(name: str) -> Kind:
    return "attention" if MIXER.search(name) else "mlp"


def _is_experts(name: str, parameter: Any) -> bool:
    return "expert" in name and parameter.ndim == 3
