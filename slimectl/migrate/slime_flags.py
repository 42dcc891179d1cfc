"""Values of slime's arguments, as its scripts read them from `args`.

The table for launch scripts (`migrate/launch_scripts/slime_flags.py`) maps arguments to settings. This file has the
values of arguments that differ from their setting, or that have no setting.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from slimectl.errors import HookError
from slimectl.migrate.launch_scripts.slime import SLIME
from slimectl.migrate.launch_scripts.values import addresses, function_path, function_paths, on, positive, texts
from slimectl.settings import Settings

UNCHANGED = (None, on, positive, texts, addresses, function_path, function_paths)
"""Conversions of a flag after which the setting has the same value as slime's argument."""
NEAREST = ("ci_train_rollout_logprob_abs_diff_threshold", "use_rollout_entropy")
"""Flags that set the nearest setting available. Scripts that read the argument expect slime's value, in `DEFAULTS`."""
SETTINGS = {
    name: row.key
    for name, row in SLIME.rows.items()
    if row.key and row.convert in UNCHANGED and name not in NEAREST
}  # fmt: skip
"""Arguments with the value of a setting. If an algorithm lacks the key, `DEFAULTS` has slime's value."""

_OFF = """
    allgather_cp async_save ci_disable_kl_checker ci_test debug_rollout_only debug_train_only enable_mtp_training
    freeze_indexer get_mismatch_metrics keep_old_actor log_model_config no_save_optim recompute_loss_function
    record_memory_history release_train reset_optimizer_states true_on_policy_mode
    use_distributed_post use_rollout_entropy use_rollout_routing_replay use_routing_replay use_stateless_adam
    use_tis use_opsm use_rollout_logprobs use_unbiased_kl
"""
_NONE = """
    ci_load_grad_norm ci_save_grad_norm custom_config_path dump_details eval_config eval_function_path eval_input_key
    eval_label_key eval_max_prompt_len eval_tool_key http_proxy load_debug_rollout_data
    load_debug_rollout_data_subsample load_forge_rollout_data megatron_config_path
    megatron_deepgemm_forward_layers megatron_deepgemm_forward_modules megatron_deepgemm_moe_forward_layers
    megatron_deepgemm_moe_forward_modules memory_snapshot_num_steps model_name mtp_num_layers multimodal_keys
    opd_teacher_ckpt_step padded_vocab_size ref_ckpt_step rollout_buffer_url save_debug_rollout_data
    save_debug_train_data save_hf sglang_config sglang_dp_size sglang_enable_deterministic_inference
    sglang_model_routers sglang_reasoning_parser sglang_speculative_algorithm sglang_tool_call_parser start_rollout_id
    update_weight_local_checkpoint_dir wandb_key eps_clip_c ref_load ref_update_interval
    opd_teacher_load
"""
DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(_OFF.split(), False),
    **dict.fromkeys(_NONE.split()),
    **{
        name: row.default
        for name, row in SLIME.rows.items()
        if row.key.startswith("algorithm.") and row.default is not None
    },
    "ci_train_rollout_logprob_abs_diff_threshold": 0.1,
    "compute_advantages_and_returns": True,
    "data_pad_size_multiplier": 128,
    "distributed_backend": "nccl",
    "distributed_timeout_minutes": 10,
    "entropy_coef": 0.0,
    "fetch_trajectory_retry_times": -1,
    "gamma": 1.0,
    "grpo_std_normalization": True,
    "kl_coef": 0.0,
    "kl_loss_coef": 0.0,
    "log_probs_chunk_size": -1,
    "loss_mask_type": "qwen",
    "memory_recorder": "torch",
    "memory_snapshot_dir": ".",
    "min_batch_collection_ratio": 1,
    "mtp_loss_scaling_factor": 0.2,
    "normalize_advantages": False,
    "num_critic_only_steps": 0,
    "opd_kl_coef": 1.0,
    "opsm_delta": 1e-4,
    "profile_target": ["train_overall"],
    "qwen_gdn_backend": "fla",
    "rewards_normalization": True,
    "rollout_data_transport": "object-store",
    "rollout_global_dataset": True,
    "rollout_task_type": "math",
    "sglang_router_balance_abs_threshold": 10,
    "sglang_router_balance_rel_threshold": 1.2,
    "tis_clip": 2.0,
    "tis_clip_low": 0.0,
    "tis_threshold": 2.0,
    "train_env_vars": {},
    "value_clip": 0.2,
}
"""slime's defaults, for arguments without a counterpart here or whose algorithm is not the one in use."""


class NoAddressError(HookError, AttributeError):
    """An engine in this process has no address. The user sees one line, and `hasattr` sees no attribute."""


def _router(settings: Settings) -> tuple[str, int]:
    """Host and port of the first address that answers requests. Raises NoAddressError if the engine has none."""
    if not settings.engine.url:
        raise NoAddressError(
            "args.sglang_router_ip: the engine runs in this process and has no address. Ask for the parameter "
            '`generate`, or set engine.num_engines = 2, engine.backend = "sglang" or engine.url.'
        )
    address = urlsplit(settings.engine.url[0])
    return address.hostname or "", address.port or (443 if address.scheme == "https" else 80)


def _run_folder(settings: Settings) -> str:
    return str(Path(settings.run.dir) / (settings.run.name or "run"))


def _loss_type(settings: Settings) -> str:
    if settings.train.custom_loss_function_path:
        return "custom_loss"
    return "policy_loss" if settings.algorithm.trains_on == "rollouts" else "sft_loss"


def _opd_type(settings: Settings) -> str | None:
    if getattr(settings.algorithm, "opd_teacher_url", None):
        return "sglang"
    return "megatron" if getattr(settings.algorithm, "opd_teacher_load", None) else None


def _prompt_data(settings: Settings) -> str | list[str] | None:
    sources = list(settings.rollout.data)
    return sources if len(sources) > 1 else sources[0] if sources else None


def _upper_clip(settings: Settings) -> float:
    """Return the upper clip of the ratio, or the lower one if it is unset, which is slime's default."""
    upper = getattr(settings.algorithm, "eps_clip_high", None)
    return float(getattr(settings.algorithm, "eps_clip", DEFAULTS["eps_clip"]) if upper is None else upper)


COMPUTED: dict[str, Callable[[Settings], Any]] = {
    "advantage_estimator": lambda settings: settings.algorithm.name,
    "eps_clip_high": _upper_clip,
    "eval_max_context_len": lambda settings: settings.rollout.max_context_len,
    "eval_prompt_data": lambda settings: [word for pair in settings.eval.sources.items() for word in pair] or None,
    "eval_reward_key": lambda settings: settings.eval.reward_key or settings.score.reward_key,
    "global_batch_size": lambda settings: settings.rollouts_per_step,
    "load": _run_folder,
    "log_probs_max_tokens_per_gpu": lambda settings: settings.train.pack_tokens,
    "loss_type": _loss_type,
    **dict.fromkeys(("offload", "offload_rollout", "offload_train"), lambda settings: settings.cluster.colocate),
    "opd_type": _opd_type,
    "output_dir": _run_folder,
    "over_sampling_batch_size": lambda settings: (
        settings.rollout.over_sampling_batch_size or settings.run.rollout_batch_size
    ),
    "prompt_data": _prompt_data,
    "save": _run_folder,
    "sglang_router_ip": lambda settings: _router(settings)[0],
    "sglang_router_port": lambda settings: _router(settings)[1],
    "skip_eval_before_train": lambda settings: not settings.eval.before_train,
    "tb_experiment_name": lambda settings: settings.run.name,
    "tb_project_name": lambda settings: settings.track.project,
    "update_weight_mode": lambda settings: "delta" if settings.sync.transport == "delta" else "full",
    "update_weight_transport": lambda settings: "disk" if settings.sync.transport in ("disk", "delta") else "nccl",
    "use_critic": lambda settings: settings.algorithm.name == "ppo",
    "use_kl_loss": lambda settings: getattr(settings.algorithm, "kl_loss_coef", 0.0) > 0,
    "use_opd": lambda settings: _opd_type(settings) is not None,
    "use_tensorboard": lambda settings: "tensorboard" in settings.track.with_,
    "use_wandb": lambda settings: "wandb" in settings.track.with_,
    "wandb_random_suffix": lambda settings: settings.track.random_suffix,
}
"""Arguments whose value differs from their flag's setting: it follows from other settings, or slime fills it in."""
