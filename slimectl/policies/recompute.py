"""Activation recomputation: what the backward pass computes again instead of keeping it from the forward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from slimectl.errors import SettingsError


@dataclass(frozen=True)
class Recompute:
    """Recomputation of nothing ("none"), of the `modules` ("selective"), or of whole layers ("full").

    Modules have Megatron's names: core_attn is attention without its projections, mlp a dense layer's MLP, moe a
    mixture of experts with its router.
    """

    granularity: str = "none"
    modules: tuple[str, ...] = ("core_attn",)

    def includes(self, module: str) -> bool:
        """Whether `module` alone is recomputed."""
        return self.granularity == "selective" and module in self.modules


def recomputed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of tensors so that autograd keeps its inputs only."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return call


def recompute_layers(layers: nn.ModuleList, options: Recompute) -> None:
    """Recompute the MLPs and mixtures of experts of Hugging Face layers that `options` includes.

    Raises SettingsError for one that no layer has.
    """
    kinds: dict[str, list[nn.Module]] = {"mlp": [], "moe": []}
    for layer in layers:
        if isinstance(mlp := getattr(layer, "mlp", None), nn.Module):
            kinds["moe" if hasattr(mlp, "experts") else "mlp"].append(mlp)
    check_modules(options, mlp=bool(kinds["mlp"]), moe=bool(kinds["moe"]))
    for kind, modules in kinds.items():
        for module in modules if options.includes(kind) else ():
            module.forward = recomputed(module.forward)


def check_modules(options: Recompute, *, mlp: bool, moe: bool) -> None:
    """Raise SettingsError for a module that no layer has; `mlp` and `moe` say which the model has."""
    for kind, name, present in (("mlp", "dense MLP", mlp), ("moe", "experts", moe)):
        if options.includes(kind) and not present:
            raise SettingsError(f"train.recompute_modules: {kind}, but this model has no {name}; leave it out")
