"""Checks training options against a model without weights, for FSDP."""

from __future__ import annotations

from pathlib import Path

from slimectl.policies.fsdp.lora import Adapters
from slimectl.policies.fsdp.model import empty_model
from slimectl.policies.fsdp.routing_replay import ExpertReplay
from slimectl.policies.optimizer import trainable_names
from slimectl.policies.options import TrainerOptions


def check_training(model_dir: Path, options: TrainerOptions) -> None:
    """Check the options of a trainer against the model of config.json.

    Raises CheckpointError for a model that cannot be trained or an adapter that does not fit, and SettingsError for
    modules, layers or parameters that the model does not have.
    """
    hf = empty_model(model_dir, options.recompute)
    if options.rollout_routing_replay:
        ExpertReplay(hf)
    if options.lora is None:
        names = [name for name, _ in hf.named_parameters()]
        trainable_names(names, freeze=options.freeze, train_only=options.train_only)
    else:
        Adapters(hf, options.lora, seed=0)
