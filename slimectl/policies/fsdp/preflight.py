"""Checks training options against a model without weights, for FSDP."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from slimectl.policies.fsdp.lora import Adapters
from slimectl.policies.fsdp.model import empty_model
from slimectl.policies.fsdp.routing_replay import ExpertReplay
from slimectl.policies.lora import LoraOptions
from slimectl.policies.optimizer import trainable_names
from slimectl.policies.recompute import Recompute


def check_training(
    model_dir: Path,
    *,
    recompute: Recompute,
    freeze: Sequence[str],
    train_only: Sequence[str],
    lora: LoraOptions | None,
    rollout_routing_replay: bool,
) -> None:
    """Check the options of a trainer against the model of config.json.

    Raises CheckpointError for a model that cannot be trained or an adapter that does not fit, and SettingsError for
    modules, layers or parameters that the model does not have.
    """
    hf = empty_model(model_dir, recompute)
    if rollout_routing_replay:
        ExpertReplay(hf)
    if lora is None:
        trainable_names([name for name, _ in hf.named_parameters()], freeze=freeze, train_only=train_only)
    else:
        Adapters(hf, lora, seed=0)
