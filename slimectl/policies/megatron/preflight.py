"""Checks training options with Megatron-core's configuration classes, without a model or process groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from slimectl.architectures.config import read_config
from slimectl.architectures.parallel import ParallelLayout
from slimectl.architectures.registry import family_of
from slimectl.policies.lora import LoraOptions, base_of
from slimectl.policies.megatron.checkpoint import shapes_of
from slimectl.policies.megatron.config import transformer_config
from slimectl.policies.megatron.lora import Adapters
from slimectl.policies.megatron.optimizer import OptimizerChoices, gradient_config, optimizer_config
from slimectl.policies.megatron.parameters import trained_links
from slimectl.policies.optimizer import OptimizerOptions, trainable_names
from slimectl.policies.recompute import Recompute
from slimectl.policies.routed_experts import RoutingShape


def check_training(
    model_dir: Path,
    *,
    layout: ParallelLayout,
    dtype: str,
    args: Mapping[str, Any],
    recompute: Recompute,
    optimizer: OptimizerOptions,
    distributed_optimizer: bool,
    optimizer_cpu_offload: bool,
    freeze: Sequence[str],
    train_only: Sequence[str],
    lora: LoraOptions | None,
    routing_replay: bool,
    rollout_routing_replay: bool,
) -> None:
    """Check the options of a trainer against the model of config.json.

    Raises CheckpointError for a model or an adapter that does not fit, and SettingsError for arguments without effect,
    or for layers and parameters that the model does not have.
    """
    config = read_config(model_dir)
    family = family_of(config)
    transformer = transformer_config(
        family.architecture(config), layout, dtype=getattr(torch, dtype), args=args, recompute=recompute
    )
    choices = OptimizerChoices(distributed_optimizer, optimizer_cpu_offload, args)
    gradient_config(choices)
    optimizer_config(transformer, optimizer, choices)
    links = family.links(config)
    if routing_replay:
        RoutingShape.of_config(config, setting="megatron.use_routing_replay")
    if rollout_routing_replay:
        RoutingShape.of_config(config)
    if lora is None:
        names = [name for link in links for name in link.hf]
        trained_links(links, trainable_names(names, freeze=freeze, train_only=train_only))
        return
    adapters = Adapters(lora, links, args)
    if lora.load is not None:
        base_of(lora.load, lora, parameter_names=shapes_of(adapters.links))
