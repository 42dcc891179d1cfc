"""Builds parts from settings: the only package that knows adapters by name; each is imported on first use."""

from slimectl.wiring.engines import engine
from slimectl.wiring.fleets import check_engine, client, companions, engine_gpus, engines, fleet
from slimectl.wiring.learners import learners
from slimectl.wiring.models import (
    context_length,
    convert,
    device,
    is_gguf,
    model_folder,
    new_model,
    source_of,
    tokenizer,
)
from slimectl.wiring.places import check_executor, executor, graders, placement
from slimectl.wiring.policies import check_policy, critic, frozen, layout, policy, total_steps
from slimectl.wiring.references import MovingReference, reference, teacher
from slimectl.wiring.sources import (
    agent,
    check_pipes,
    data_source,
    from_buffer,
    keep,
    prompts,
    reward,
    rolled_out,
    training_samples,
)
from slimectl.wiring.trackers import check_trackers, identity, trackers
from slimectl.wiring.transports import Transport, in_process, keyed, keys, to_servers, urls, workers

__all__ = [
    "MovingReference",
    "Transport",
    "agent",
    "check_engine",
    "check_executor",
    "check_pipes",
    "check_policy",
    "check_trackers",
    "client",
    "companions",
    "context_length",
    "convert",
    "critic",
    "data_source",
    "device",
    "engine",
    "engine_gpus",
    "engines",
    "executor",
    "fleet",
    "from_buffer",
    "frozen",
    "graders",
    "identity",
    "in_process",
    "is_gguf",
    "keep",
    "keyed",
    "keys",
    "layout",
    "learners",
    "model_folder",
    "new_model",
    "placement",
    "policy",
    "prompts",
    "reference",
    "reward",
    "rolled_out",
    "source_of",
    "teacher",
    "to_servers",
    "tokenizer",
    "total_steps",
    "trackers",
    "training_samples",
    "urls",
    "workers",
]
