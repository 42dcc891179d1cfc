"""Names of slime's arguments, as its scripts read them from `args`, and the settings that they stand for.

Names that are a key of one section already (`lr`, `rollout_temperature`, `eps_clip`) are not listed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from slimectl.errors import HookError
from slimectl.settings import Settings

SETTINGS = {
    "advantage_estimator": "algorithm.name",
    "async_buffer_size": "run.async_level",
    "custom_megatron_before_log_prob_hook_path": "megatron.custom_before_log_prob_hook_path",
    "custom_megatron_before_train_step_hook_path": "megatron.custom_before_train_step_hook_path",
    "custom_megatron_init_path": "megatron.custom_init_path",
    "custom_update_weight_post_write_path": "sync.custom_post_write_path",
    "fsdp_max_tokens_per_gpu": "train.max_tokens_per_gpu",
    "gamma": "algorithm.gamma",
    "hf_checkpoint": "model.path",
    "lambd": "algorithm.lambd",
    "log_probs_max_tokens_per_gpu": "train.max_tokens_per_gpu",
    "n_samples_per_eval_prompt": "eval.n_samples_per_prompt",
    "num_critic_only_steps": "algorithm.num_critic_only_steps",
    "offload": "cluster.colocate",
    "offload_rollout": "cluster.colocate",
    "offload_train": "cluster.colocate",
    "rollout_external_engine_addrs": "engine.url",
    "rollout_health_check_first_wait": "engine.health_check_first_wait",
    "rollout_health_check_interval": "engine.health_check_interval",
    "rollout_health_check_timeout": "engine.health_check_timeout",
    "seed": "run.seed",
    "sglang_router_request_timeout_secs": "engine.request_timeout_s",
    "sglang_server_concurrency": "engine.server_concurrency",
    "tb_experiment_name": "run.name",
    "tb_project_name": "track.project",
    "tis_threshold": "algorithm.tis_clip",
    "value_clip": "algorithm.value_clip",
    "wandb_always_use_train_step": "track.always_use_train_step",
    "wandb_dir": "track.dir",
    "wandb_group": "track.group",
    "wandb_host": "track.host",
    "wandb_mode": "track.mode",
    "wandb_project": "track.project",
    "wandb_random_suffix": "track.random_suffix",
    "wandb_run_id": "track.run_id",
    "wandb_team": "track.entity",
}
"""Arguments with another name than their setting. Where an algorithm lacks the key, `DEFAULTS` has slime's value."""

_OFF = """
    allgather_cp async_save ci_disable_kl_checker ci_test debug_rollout_only debug_train_only enable_mtp_training
    freeze_indexer get_mismatch_metrics keep_old_actor log_model_config no_save_optim recompute_loss_function
    record_memory_history release_train reset_optimizer_states rollout_skip_special_tokens true_on_policy_mode
    use_distributed_post use_rollout_entropy use_rollout_routing_replay use_routing_replay use_stateless_adam
    use_tis use_opsm use_rollout_logprobs use_unbiased_kl
"""
_NONE = """
    ci_load_grad_norm ci_save_grad_norm custom_config_path dump_details eval_config eval_function_path eval_input_key
    eval_label_key eval_max_context_len eval_max_prompt_len eval_tool_key http_proxy load_debug_rollout_data
    load_debug_rollout_data_subsample load_forge_rollout_data max_turns megatron_config_path
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
    "ci_train_rollout_logprob_abs_diff_threshold": 0.1,
    "compute_advantages_and_returns": True,
    "data_pad_size_multiplier": 128,
    "distributed_backend": "nccl",
    "distributed_timeout_minutes": 10,
    "entropy_coef": 0.0,
    "eps_clip": 0.2,
    "fetch_trajectory_retry_times": -1,
    "gamma": 1.0,
    "grpo_std_normalization": True,
    "kl_coef": 0.0,
    "kl_loss_coef": 0.0,
    "kl_loss_type": "k1",
    "lambd": 1.0,
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
"""Arguments without a counterpart here, or whose algorithm is not the one that is set: slime's default."""


class NoAddressError(HookError, AttributeError):
    """An engine in this process has no address: one line for the user, and no attribute to `hasattr`."""


def _router(settings: Settings) -> tuple[str, int]:
    """Host and port of the first address that answers requests. Raises NoAddressError for an engine without one."""
    if not settings.engine.url:
        raise NoAddressError(
            "args.sglang_router_ip: the engine of this process has no address; take `generate`, which every generate "
            'function is offered, or set engine.num_engines = 2, engine.backend = "sglang" or engine.url'
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
    """Return the upper clip of the ratio; the lower one where none is set, as slime fills it in."""
    upper = getattr(settings.algorithm, "eps_clip_high", None)
    return float(getattr(settings.algorithm, "eps_clip", DEFAULTS["eps_clip"]) if upper is None else upper)


COMPUTED: dict[str, Callable[[Settings], Any]] = {
    "eps_clip_high": _upper_clip,
    "eval_prompt_data": lambda settings: [word for pair in settings.eval.sources.items() for word in pair] or None,
    "eval_reward_key": lambda settings: settings.eval.reward_key or settings.score.reward_key,
    "global_batch_size": lambda settings: settings.rollouts_per_step,
    "load": _run_folder,
    "loss_type": _loss_type,
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
    "update_weight_mode": lambda settings: "delta" if settings.sync.transport == "delta" else "full",
    "update_weight_transport": lambda settings: "disk" if settings.sync.transport in ("disk", "delta") else "nccl",
    "use_critic": lambda settings: settings.algorithm.name == "ppo",
    "use_kl_loss": lambda settings: getattr(settings.algorithm, "kl_loss_coef", 0.0) > 0,
    "use_opd": lambda settings: _opd_type(settings) is not None,
    "use_tensorboard": lambda settings: "tensorboard" in settings.track.with_,
    "use_wandb": lambda settings: "wandb" in settings.track.with_,
}
"""Arguments that follow from other settings, or that slime fills in from others where they are not given."""
