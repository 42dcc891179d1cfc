"""Mixture of experts: the router's choices as the Hugging Face models make them, and the experts.

N tokens of this rank · E experts · k experts of a token.
"""

from __future__ import annotations

from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.router import TopKRouter


class Router(TopKRouter):
    """mcore's router."""


class Experts(SequentialMLP):
    """mcore's experts, one MLP each."""
