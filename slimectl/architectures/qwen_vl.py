"""Qwen2.5-VL: a Qwen2 decoder behind a vision tower (Bai et al. 2025, arXiv:2502.13923)."""

from __future__ import annotations

from slimectl.architectures import qwen
from slimectl.architectures.config import Architecture, Config, Family
from slimectl.architectures.mapping import ParamMapping
from slimectl.architectures.qwen_next import text

PREFIXES = {"model.language_model.": "model.", "model.visual.": "visual."}
"""Prefixes of the modules of transformers, and those of the same tensors in published checkpoints."""
TOWER = r"^(model\.)?visual\."
"""Names of the vision tower's tensors, in either spelling."""


def published_name(name: str) -> str:
    """Return the name in published checkpoints of a parameter of transformers' module.

    >>> published_name("model.language_model.norm.weight"), published_name("model.visual.merger.ln_q.weight")
    ('model.norm.weight', 'visual.merger.ln_q.weight')
    """
    for prefix, published in PREFIXES.items():
        if name.startswith(prefix):
            return published + name.removeprefix(prefix)
    return name


def architecture(config: Config) -> Architecture:
    """Architecture of the decoder; without images its three rotary positions are one."""
    return qwen.qwen2_architecture(text(config))


def links(config: Config) -> list[ParamMapping]:
    return qwen.qwen2_links(text(config))


QWEN2_5_VL = Family("qwen2_5_vl", ("qwen2_5_vl", "qwen2_5_vl_text"), architecture, links, carried=(TOWER,))
