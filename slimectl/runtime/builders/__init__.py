"""Builds components from settings. Only this package refers to adapters by name, and it imports each on first use.

The modules of this package are also imported on first use, so a command imports only what it builds. `__init__.pyi` has
their types.
"""

from importlib import import_module

_NAMES = {
    "data": (
        "agent",
        "check_images",
        "check_pipes",
        "check_rows",
        "count_rows",
        "data_identities",
        "data_source",
        "dataset",
        "generator",
        "has_plain_rows",
        "hook_settings",
        "max_groups",
        "prompts",
        "reward",
        "shard_prompts",
        "training_samples",
    ),
    "engines": ("engine", "engine_reads", "keys"),
    "executors": ("check_executor", "executor", "graders", "placement"),
    "frozen_models": (
        "PeriodicReference",
        "TrainableModels",
        "reference",
        "sampling_models",
        "teacher",
        "trainable_models",
    ),
    "models": (
        "TOKENIZER_REMEDY",
        "context_length",
        "convert",
        "create_model",
        "create_tiny_model",
        "embedded_families",
        "device",
        "has_tokenizer",
        "is_gguf",
        "model_folder",
        "source_of",
        "token_decoder",
        "tokenizer",
        "version_of",
        "with_template_date",
    ),
    "policies": (
        "changed_schedule",
        "check_policy",
        "check_training",
        "critic",
        "frozen",
        "policy",
        "rank_policy",
        "round_timer",
        "total_steps",
        "unmet_schedule",
    ),
    "servers": (
        "auxiliary_servers",
        "check_engine",
        "check_middlewares",
        "check_stop_tokens",
        "client",
        "engine_gpus",
        "server_pool",
        "start_engines",
    ),
    "shared_run": ("joined_wandb_run", "tracked_executor"),
    "streaming": ("stream_answer",),
    "trackers": (
        "check_tracker_arguments",
        "check_trackers",
        "evaluation_trackers",
        "flush_trackers",
        "identity",
        "log_rewards",
        "log_samples",
        "sample_table",
        "start_trackers",
        "step_table",
    ),
    "trainers": ("layout",),
    "weight_sync": ("adapter_obstacle", "in_process", "keyed", "synchronizer", "to_servers", "urls", "workers"),
}
"""Names of every module that other packages use."""
_MODULES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [*_MODULES]


def __getattr__(name: str) -> object:
    """Import the module of a name when the name is first used (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return value
