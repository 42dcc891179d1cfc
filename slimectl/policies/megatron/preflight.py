"""Checks training options with Megatron-core's configuration classes, without a model or process groups."""

from __future__ import annotations

from pathlib import Path

from slimectl.architectures.config import read_config
from slimectl.architectures.registry import family_of
from slimectl.policies.lora import base_of
from slimectl.policies.megatron.checkpoint import shapes_of
from slimectl.policies.megatron.config import transformer_config
from slimectl.policies.megatron.lora import Adapters
from slimectl.policies.megatron.optimizer import gradient_config, optimizer_config
from slimectl.policies.megatron.parameters import trained_links
from slimectl.policies.optimizer import trainable_names
from slimectl.policies.options import MegatronOptions, TrainerOptions
from slimectl.policies.routed_experts import RoutingShape


def check_training(model_dir: Path, options: TrainerOptions, megatron: MegatronOptions) -> None:
    """Check the options of a trainer against the model of config.json.

    Raises CheckpointError for a model or an adapter that does not fit, and SettingsError for arguments without effect,
    or for layers and parameters that the model does not have.
    """
    config = read_config(model_dir)
    family = family_of(config)
    transformer = transformer_config(
        family.architecture(config), megatron.layout, dtype=options.compute_dtype, args=megatron.args,
        recompute=options.recompute,
    )  # fmt: skip
    gradient_config(megatron)
    optimizer_config(transformer, options.optimizer, megatron)
    links = family.links(config)
    if megatron.routing_replay:
        RoutingShape.of_config(config, setting="megatron.use_routing_replay")
    if options.rollout_routing_replay:
        RoutingShape.of_config(config)
    if options.lora is None:
        names = [name for link in links for name in link.hf]
        trained_links(links, trainable_names(names, freeze=options.freeze, train_only=options.train_only))
        return
    adapters = Adapters(options.lora, links, megatron.args)
    if options.lora.load is not None:
        base_of(options.lora.load, options.lora, parameter_names=shapes_of(adapters.links))
