"""Builds parts from settings: the only package that knows adapters by name; each is imported on first use."""

from slimectl.builders.data import (
    agent,
    check_pipes,
    data_source,
    prompts,
    reward,
    rollout_samples,
    training_samples,
)
from slimectl.builders.engines import engine, keys
from slimectl.builders.executors import check_executor, executor, graders, placement
from slimectl.builders.frozen_models import PeriodicReference, reference, teacher, trainable_models
from slimectl.builders.models import (
    context_length,
    convert,
    create_model,
    device,
    is_gguf,
    model_folder,
    source_of,
    tokenizer,
)
from slimectl.builders.policies import check_policy, critic, frozen, policy, total_steps
from slimectl.builders.servers import auxiliary_servers, check_engine, client, engine_gpus, engines, server_pool
from slimectl.builders.trackers import check_trackers, identity, trackers
from slimectl.builders.trainers import layout
from slimectl.builders.weight_sync import in_process, keyed, synchronizer, to_servers, urls, workers

__all__ = [
    "PeriodicReference",
    "agent",
    "auxiliary_servers",
    "check_engine",
    "check_executor",
    "check_pipes",
    "check_policy",
    "check_trackers",
    "client",
    "context_length",
    "convert",
    "create_model",
    "critic",
    "data_source",
    "device",
    "engine",
    "engine_gpus",
    "engines",
    "executor",
    "frozen",
    "graders",
    "identity",
    "in_process",
    "is_gguf",
    "keyed",
    "keys",
    "layout",
    "model_folder",
    "placement",
    "policy",
    "prompts",
    "reference",
    "reward",
    "rollout_samples",
    "server_pool",
    "source_of",
    "synchronizer",
    "teacher",
    "to_servers",
    "tokenizer",
    "total_steps",
    "trackers",
    "trainable_models",
    "training_samples",
    "urls",
    "workers",
]
