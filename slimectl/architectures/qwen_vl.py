"""Qwen2.5-VL and Qwen3-VL: a Qwen decoder after a vision tower.

Bai et al. 2025, arXiv:2502.13923 (Qwen2.5-VL) and arXiv:2511.21631 (Qwen3-VL).
"""

from __future__ import annotations

from slimectl.architectures import qwen
from slimectl.architectures.config import Architecture, Config, Family
from slimectl.architectures.mapping import ParamMapping
from slimectl.architectures.qwen_next import decoder, text

DECODER, TOWER = "model.language_model.", "model.visual."
"""Name prefixes in transformers' modules."""
PUBLISHED = {"qwen2_5_vl": {DECODER: "model.", TOWER: "visual."}}
"""Other prefixes of the same tensors in published checkpoints, by model_type."""
TOWER_PATTERN = r"^(model\.)?visual\."
"""Pattern of the vision tower's tensor names, in either spelling."""


def published_name(name: str, model_type: str) -> str:
    """Return the name that published checkpoints use for a parameter of transformers' module.

    >>> published_name("model.language_model.norm.weight", "qwen2_5_vl")
    'model.norm.weight'
    >>> published_name("model.language_model.norm.weight", "qwen3_vl")
    'model.language_model.norm.weight'
    """
    for prefix, published in PUBLISHED.get(model_type, {}).items():
        if name.startswith(prefix):
            return published + name.removeprefix(prefix)
    return name


def qwen2_5_architecture(config: Config) -> Architecture:
    """Return the architecture of the decoder. Without images its three rotary positions are equal."""
    return qwen.qwen2_architecture(text(config))


def qwen2_5_links(config: Config) -> list[ParamMapping]:
    return qwen.qwen2_links(text(config))


QWEN2_5_VL = Family(
    "qwen2_5_vl", ("qwen2_5_vl", "qwen2_5_vl_text"), qwen2_5_architecture, qwen2_5_links, carried=(TOWER_PATTERN,)
)


def qwen3_architecture(config: Config) -> Architecture:
    """Return the architecture of the decoder. Without images nothing is added between its layers."""
    return qwen.qwen3_architecture(text(config))


def qwen3_links(config: Config) -> list[ParamMapping]:
    return qwen.qwen3_links(text(config), decoder(config))


QWEN3_VL = Family("qwen3_vl", ("qwen3_vl", "qwen3_vl_text"), qwen3_architecture, qwen3_links, carried=(TOWER_PATTERN,))
