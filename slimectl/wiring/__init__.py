"""Settings to parts: the only package that knows adapters by name; each is imported when it is asked for."""

from slimectl.wiring.engines import client, engine, engine_gpus, engines, fleet
from slimectl.wiring.models import (
    convert,
    device,
    is_gguf,
    model_folder,
    new_model,
    source_of,
    tokenizer,
)
from slimectl.wiring.places import executor, graders
from slimectl.wiring.policies import check_policy, frozen, layout, policy, reference, total_steps
from slimectl.wiring.sources import agent, prompts, reward, training_samples
from slimectl.wiring.trackers import trackers
from slimectl.wiring.transports import Transport, transport

__all__ = [
    "Transport",
    "agent",
    "check_policy",
    "client",
    "convert",
    "device",
    "engine",
    "engine_gpus",
    "engines",
    "executor",
    "fleet",
    "frozen",
    "graders",
    "is_gguf",
    "layout",
    "model_folder",
    "new_model",
    "policy",
    "prompts",
    "reference",
    "reward",
    "source_of",
    "tokenizer",
    "total_steps",
    "trackers",
    "training_samples",
    "transport",
]
