"""Arguments of TRL that a file does not give have TRL's defaults, checked against the fields of the real package."""

from __future__ import annotations

import json
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from slimectl.migrate.launch_scripts.reading import DIALECTS, read
from slimectl.settings.root import Settings

TABLE = json.loads(Path(__file__).with_name("trl_defaults.json").read_text(encoding="utf-8"))
"""Defaults of TRL 1.16.0: fields of each class, `common` those that all trainers share."""
CLASSES = {
    "grpo": "GRPOConfig",
    "rloo": "RLOOConfig",
    "sft": "SFTConfig",
    "dpo": "DPOConfig",
    "reward": "RewardConfig",
}
ALL = {
    "learning_rate": "train.lr", "lr_scheduler_type": "train.lr_decay_style", "warmup_steps": "train.lr_warmup_iters",
    "weight_decay": "train.weight_decay", "adam_beta1": "train.adam_beta1", "adam_beta2": "train.adam_beta2",
    "adam_epsilon": "train.adam_eps", "max_grad_norm": "train.clip_grad", "num_train_epochs": "run.num_epoch",
    "per_device_train_batch_size": "train.global_batch_size", "seed": "run.seed", "save_steps": "run.save_interval",
    "gradient_checkpointing": "train.gradient_checkpointing", "save_total_limit": "run.keep_checkpoints",
}  # fmt: skip
"""Arguments of every trainer whose value is that of a setting."""
SAMPLED = {
    "num_generations": "rollout.n_samples_per_prompt", "max_completion_length": "rollout.max_response_len",
    "temperature": "rollout.temperature", "top_p": "rollout.top_p", "epsilon": "algorithm.eps_clip",
    "epsilon_high": "algorithm.eps_clip_high", "shuffle_dataset": "rollout.shuffle",
}  # fmt: skip
SAME = {
    "grpo": {**ALL, **SAMPLED, "beta": "algorithm.kl_loss_coef", "delta": "algorithm.eps_clip_c",
             "entropy_coef": "algorithm.entropy_coef"},
    "rloo": {**ALL, **SAMPLED, "beta": "algorithm.kl_coef",
             "normalize_advantages": "algorithm.normalize_advantages"},
    "sft": {**ALL, "max_length": "rollout.max_context_len"},
    "dpo": {**ALL, "max_length": "rollout.max_context_len", "beta": "algorithm.beta",
            "label_smoothing": "algorithm.label_smoothing"},
    "reward": {**ALL, "max_length": "rollout.max_context_len"},
}  # fmt: skip
"""Settings that have the very value of the argument, by subcommand."""
OTHERWISE = {
    "grpo": {"algorithm.name": "grpo", "algorithm.calculate_per_token_loss": True,  # loss_type dapo
             "algorithm.grpo_std_normalization": True,  # scale_rewards group
             "rollout.top_k": -1, "rollout.min_p": 0.0, "algorithm.use_tis": False, "train.dtype": "bfloat16",
             "run.rollout_batch_size": 1, "train.lora_rank": None},  # 8 samples of a step are one group of 8
    "rloo": {"algorithm.name": "rloo", "run.rollout_batch_size": 4, "train.dtype": "bfloat16"},  # 8 / 2
    "sft": {"algorithm.name": "sft", "rollout.shuffle": True, "algorithm.calculate_per_token_loss": True},
    "dpo": {"algorithm.name": "dpo", "rollout.shuffle": True},
    "reward": {"algorithm.name": "reward_model", "rollout.shuffle": True},
}  # fmt: skip
"""Settings that follow from a default of another form, worked out by hand."""


def value(settings: Settings, key: str) -> Any:
    return reduce(getattr, key.split("."), settings)


def settings_of(folder: Path, command: str) -> Settings:
    (folder / "run.sh").write_text(command, encoding="utf-8")
    return read(folder / "run.sh", environ={}).conversion.settings


@pytest.mark.parametrize("command", list(SAME))
def test_a_command_without_arguments_has_the_defaults_of_trl(command: str, tmp_path: Path):
    settings = settings_of(tmp_path, f"trl {command} --model_name_or_path /m --dataset_name /d.jsonl")
    defaults = {**TABLE["common"], **TABLE[CLASSES[command]]}
    expected = {key: defaults[name] for name, key in SAME[command].items()} | OTHERWISE[command]
    assert {key: value(settings, key) for key in expected} == expected


def test_with_vllm_the_correction_and_the_share_of_memory_are_those_of_trl(tmp_path: Path):
    settings = settings_of(tmp_path, "trl grpo --model_name_or_path /m --dataset_name /d.jsonl --use_vllm")
    defaults = TABLE["GRPOConfig"]
    assert defaults["vllm_mode"] == "colocate"
    assert (settings.engine.backend, settings.cluster.colocate) == ("vllm", True)
    assert settings.vllm.args["gpu_memory_utilization"] == defaults["vllm_gpu_memory_utilization"]
    algorithm: Any = settings.algorithm
    level, mode = defaults["vllm_importance_sampling_mode"].split("_")
    assert (algorithm.tis_level, algorithm.tis_mode) == (level, mode)
    assert algorithm.tis_clip == defaults["vllm_importance_sampling_clip_max"]
    rloo: Any = settings_of(tmp_path, "trl rloo --model_name_or_path /m --dataset_name /d.jsonl --use_vllm").algorithm
    assert rloo.use_tis is False  # RLOOConfig has no such argument
    assert "vllm_importance_sampling_correction" not in TABLE["RLOOConfig"]


def test_with_a_divergence_the_estimator_is_weighted_as_in_trl(tmp_path: Path):
    algorithm: Any = settings_of(
        tmp_path, "trl grpo --model_name_or_path /m --dataset_name /d.jsonl --beta 0.04"
    ).algorithm
    assert algorithm.use_unbiased_kl is TABLE["GRPOConfig"]["use_bias_correction_kl"]
    assert (algorithm.kl_loss_coef, algorithm.kl_loss_type) == (0.04, "low_var_kl")


def test_adapters_have_the_rank_of_trl_and_the_layers_of_peft(tmp_path: Path):
    command = "trl sft --model_name_or_path /m --dataset_name /d.jsonl"
    train = settings_of(tmp_path, f"{command} --use_peft").train
    defaults = TABLE["ModelConfig"]
    assert (train.lora_rank, train.lora_alpha) == (defaults["lora_r"], defaults["lora_alpha"])
    assert defaults["lora_target_modules"] is None
    assert train.lora_targets == ["q_proj", "v_proj"]  # peft 0.21 for llama, mistral, qwen2, qwen3 and gemma
    assert settings_of(tmp_path, f"{command} --lora_r 8").train.lora_rank is None  # without --use_peft no adapter
    scaled = settings_of(tmp_path, f"{command} --use_peft --use_rslora").train
    assert scaled.lora_alpha == 32 * 4  # 32 / sqrt(16) there is 128 / 16 here


@pytest.mark.parametrize("command", list(SAME))
def test_defaults_that_are_written_out_change_nothing(command: str, tmp_path: Path):
    start = f"trl {command} --model_name_or_path /m --dataset_name /d.jsonl"
    defaults = {**TABLE["common"], **TABLE[CLASSES[command]]}
    flags = " ".join(
        f"--{name} {str(item).lower()}"
        for name, item in defaults.items()
        if isinstance(item, str | int | float) and item != "" and name not in ("loss_type", "eval_on_start")
    )
    assert settings_of(tmp_path, f"{start} {flags}") == settings_of(tmp_path, start)


@pytest.mark.parametrize("name", ["common", *CLASSES.values(), "ModelConfig"])
def test_every_argument_of_trl_has_a_row(name: str):
    assert [argument for argument in TABLE[name] if DIALECTS["trl"].row(argument) is None] == []
