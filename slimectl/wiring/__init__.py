"""Settings to parts: the only package that knows adapters by name; each is imported when it is asked for."""

from slimectl.wiring.engines import engine
from slimectl.wiring.models import (
    convert,
    device,
    is_gguf,
    model_folder,
    new_model,
    source_of,
    tokenizer,
)
from slimectl.wiring.places import executor, sync
from slimectl.wiring.policies import check_policy, frozen, layout, policy, reference, total_steps
from slimectl.wiring.sources import agent, prompts, reward, training_samples
from slimectl.wiring.trackers import trackers

__all__ = [
    "agent",
    "check_policy",
    "convert",
    "device",
    "engine",
    "executor",
    "frozen",
    "is_gguf",
    "layout",
    "model_folder",
    "new_model",
    "policy",
    "prompts",
    "reference",
    "reward",
    "source_of",
    "sync",
    "tokenizer",
    "total_steps",
    "trackers",
    "training_samples",
]
