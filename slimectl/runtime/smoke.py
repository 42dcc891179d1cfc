"""Reduces the settings of a cluster run to two rounds on a laptop, with a tiny model of the same family."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from slimectl.architectures import cards
from slimectl.architectures.config import with_defaults
from slimectl.architectures.registry import tower_of
from slimectl.data.run_dir import write_folder
from slimectl.errors import SlimectlError
from slimectl.runtime import builders
from slimectl.runtime.capacity import configuration
from slimectl.settings import Settings
from slimectl.settings.evaluate import Dataset
from slimectl.settings.keys import changed, flat

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [],
    "max_position_embeddings": 4096,
    "use_sliding_window": False,
}
"""Sizes of the tiny model, for the keys that the configuration has."""
OTHER_FAMILY = "tiny"
"""Model card for families that the embedded engine does not support."""
TOKENIZER_KEYS = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
ON_A_CLUSTER = ("cluster.", "engine.", "sglang.", "vllm.", "megatron.", "sync.")
"""Sections that are reset to their defaults: the embedded engine and one process."""
ALSO_DEFAULT = (
    "train.backend", "train.dtype", "train.device", "train.offload", "train.max_tokens_per_gpu",
    "train.global_batch_size", "train.num_steps_per_rollout", "train.lr_decay_iters", "train.lr_wsd_decay_iters",
    "train.lr_warmup_iters", "train.use_rollout_routing_replay", "train.lora_load", "rollout.over_sampling_batch_size",
    "rollout.dynamic_sampling_filter_path", "rollout.max_context_len", "run.num_epoch", "run.save_interval",
    "run.profile", "algorithm.ref_load", "algorithm.critic_load", "algorithm.opd_teacher_url", "algorithm.opd_teachers",
    "algorithm.opd_align", "track.with",
    "track.mode", "track.prometheus_port",
)  # fmt: skip
"""Settings that are not possible with a tiny model, a short run or a laptop."""
AT_MOST = {
    "run.num_rollout": 2,
    "run.rollout_batch_size": 2,
    "rollout.n_samples_per_prompt": 4,
    "rollout.max_response_len": 32,
    "rollout.min_new_tokens": 0,
    "eval.n_samples_per_prompt": 1,
    "eval.max_response_len": 32,
    "eval.interval": 2,
    "sft_warmup.max_steps": 2,
    "sft_warmup.batch_size": 4,
}
EVAL_PROMPTS = 4


def reduced(settings: Settings) -> dict[str, Any]:
    """Return the settings of the smoke run that differ from the defaults, by dotted key."""
    names = set(changed(settings))
    set_values = {key: value for key, value in flat(settings) if key in names}
    values = {
        key: value for key, value in set_values.items() if not key.startswith(ON_A_CLUSTER) and key not in ALSO_DEFAULT
    }
    for key, value in flat(settings):
        is_used = not key.startswith("sft_warmup.") or settings.sft_warmup.data
        if is_used and key in AT_MOST and value is not None and value > AT_MOST[key]:
            values[key] = AT_MOST[key]
    teaching = settings.algorithm.teacher_options
    if teaching is not None and any(teacher.load or teacher.urls for teacher in teaching.teachers):
        values["algorithm.opd_teacher_load"] = str(model_path(settings))
    return values | {
        "algorithm.name": settings.algorithm.name,
        "eval.data": {name: _few_prompts(dataset) for name, dataset in settings.eval.datasets.items()},
        "run.name": f"{settings.run.name or 'run'}-smoke",
        "run.num_rollout": min(settings.run.num_rollout or 2, AT_MOST["run.num_rollout"]),
        "model.path": str(model_path(settings)),
        "model.card": None,
    }


def _few_prompts(dataset: Dataset) -> dict[str, Any]:
    """Return a dataset of [eval] with only its first prompts, if it is a file."""
    path = f"{dataset.path}@[0:{EVAL_PROMPTS}]" if Path(dataset.path).is_file() else dataset.path
    overrides = {key: min(value, AT_MOST.get(f"eval.{key}", value)) if isinstance(value, int) else value
           for key, value in dataset.model_dump(exclude_none=True).items()}  # fmt: skip
    return overrides | {"path": path}


def model_path(settings: Settings) -> Path:
    """Return the folder of the tiny model, next to the folder of the run."""
    return Path(settings.run.dir) / f"{settings.run.name or 'run'}-smoke-model"


def create_model(settings: Settings) -> str:
    """Write the tiny model for these settings, and describe it.

    It has the tokenizer of the model at model.path if that is on this machine, else one token per byte.
    """
    config, source = _configuration(settings)
    language = cards.language_model(config)
    model_type = str(config.get("model_type"))
    card, has_tokenizer = None, False
    if (tower := tower_of(model_type)) is not None or "vision_config" in config:
        card = OTHER_FAMILY if tower is None else tower.tiny_card
    elif model_type not in builders.embedded_families():
        card = OTHER_FAMILY
    if card is not None:
        small = cards.load(card)["config"]
    else:
        has_tokenizer = source is not None and any(source.glob("tokenizer*"))
        small = {key: SMALL.get(key, value) for key, value in language.items()}
        small["num_key_value_heads"] = 4 if language["num_key_value_heads"] == language["num_attention_heads"] else 2
        if "layer_types" in small:
            small["layer_types"] = small["layer_types"][: SMALL["num_hidden_layers"]]
        if not has_tokenizer:
            small = {key: value for key, value in small.items() if key not in TOKENIZER_KEYS}
    fill = partial(
        builders.create_tiny_model, small, seed=settings.run.seed, tokenizer=source if has_tokenizer else None
    )
    write_folder(model_path(settings), fill, manifest_fields={"stage": "create_model"})
    tokens = "its own tokenizer" if has_tokenizer else "one token per byte"
    kind = small["model_type"]
    why = "" if kind == model_type else f" (the embedded engine does not support {model_type})"
    return f"a random {kind} of {SMALL['num_hidden_layers']} layers with {tokens}{why}"


def _configuration(settings: Settings) -> tuple[dict[str, Any], Path | None]:
    """Return the model's configuration and its folder if it is on this machine, else its card's configuration."""
    path = settings.model.path
    try:
        if (config := configuration(settings)) is not None:
            return config, builders.model_folder(path) if path is not None else None
    except SlimectlError:
        pass
    card = settings.model.card or cards.named(path or "") or OTHER_FAMILY
    return with_defaults(cards.load(card)["config"]), None
