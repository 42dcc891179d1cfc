"""Activation recomputation: modules that the backward pass recomputes, so that fewer activations are stored."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
        """Return whether `module` is recomputed separately from its layer."""
        return self.granularity == "selective" and module in self.modules


def recomputed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of tensors so that autograd keeps only its inputs."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return call


def recompute_layers(layers: Iterable[nn.Module], options: Recompute) -> None:
    """Recompute the MLPs and mixtures of experts of Hugging Face layers that `options` includes.

    Raises SettingsError for a module that no layer has.
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
    """Raise SettingsError for a module that no layer has. `mlp` and `moe` are whether the model has that module."""
    for kind, name, present in (("mlp", "dense MLP", mlp), ("moe", "experts", moe)):
        if options.includes(kind) and not present:
            raise SettingsError(
                f"train.recompute_modules: {kind} is listed, but this model has no {name}. Leave it out."
            )
