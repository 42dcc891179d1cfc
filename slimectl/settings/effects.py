"""Settings that depend on other settings. Without those they have no effect, and are rejected or dropped.

A setting that has no effect is an error, so that nobody relies on it. It is silently dropped if a later layer turned
off the feature that it belongs to: `--backend fsdp` over the file of a Megatron run drops its [megatron].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from slimectl.settings.aliases import FORMER_DEFAULTS
from slimectl.settings.base import Section
from slimectl.settings.needs import Need
from slimectl.settings.root import Settings


@dataclass(frozen=True)
class Dependency:
    """Keys of a section that have an effect only if `acts` is true. Empty `keys` means all keys of the section."""

    section: str
    keys: tuple[str, ...]
    switches: tuple[str, ...]
    """Settings that decide whether the keys act. A later layer that sets one of them drops the keys."""
    acts: Callable[[Settings], bool]
    reason: str
    """Second half of the line "KEY has no effect …", with the remedy. {SECTION.KEY} is replaced by a value."""


def _starts_servers(settings: Settings) -> bool:
    return settings.uses_servers and not settings.engine.url


def _watches_servers(settings: Settings) -> bool:
    return settings.uses_servers and settings.engine.use_fault_tolerance


def _embedded(settings: Settings) -> bool:
    return settings.engine.backend not in ("sglang", "vllm") and not settings.engine.url


def _own_functions(settings: Settings, *names: str) -> bool:
    """Whether one of the user's functions, which can read any setting, is in effect."""
    return any(getattr(settings.train, f"custom_{name}_function_path") for name in names)


def _algorithm(settings: Settings) -> Any:
    return settings.algorithm


def _asks_teachers(settings: Settings) -> bool:
    teaching = settings.algorithm.teacher_options
    return teaching is not None and any(teacher.urls for teacher in teaching.teachers)


def _names_tracker(settings: Settings, *without: str) -> bool:
    return any(name not in without for name in settings.track.with_)


def _grades_in_batches(settings: Settings) -> bool:
    functions = [dataset.custom_rm_path for dataset in settings.eval.datasets.values()]
    return bool(settings.score.own_functions or settings.score.allow_paths_in_records or any(functions))


AGENT_KEYS = ("agent_timeout_s", "agent_max_turns", "agent_retries", "agent_concurrency", "agent_model")


ENV_KEYS = ("env_args", "env_python", "env_timeout_s", "env_max_turns", "env_turn_tokens", "env_retries",
            "env_concurrency")  # fmt: skip


def _has_agent(settings: Settings) -> bool:
    rollout = settings.rollout
    agents = [dataset.custom_generate_function_path for dataset in settings.eval.datasets.values()]
    return bool(rollout.custom_generate_function_path or rollout.allow_paths_in_records or any(agents))


_SERVERS = ("engine.backend", "engine.url", "engine.num_engines", "cluster.rollout_num_gpus")
_NEEDS_SERVERS = "with a single embedded engine in this process. Set engine.num_engines or engine.backend"
_NEEDS_STARTED = (
    "without servers that this program starts. Set engine.num_engines or engine.backend, and drop engine.url"
)  # fmt: skip
_FILES = ("stdout", "jsonl", "tensorboard")
"""Trackers that receive only the metrics of a run."""

DEPENDENCIES = (
    Dependency("megatron", (), ("train.backend",), lambda s: s.train.backend == "megatron",
               'with train.backend = "{train.backend}". Set train.backend = "megatron"'),
    Dependency("megatron", ("recompute_modules",), ("megatron.recompute_granularity",),
               lambda s: s.megatron.recompute_granularity == "selective",
               'without megatron.recompute_granularity = "selective". Set that'),
    Dependency("megatron", ("recompute_granularity",), ("train.gradient_checkpointing", "train.recompute_granularity"),
               lambda s: not s.train.gradient_checkpointing and s.train.recompute_granularity is None,
               "with train.gradient_checkpointing or train.recompute_granularity, which override it. Drop those"),
    Dependency("train", ("recompute_granularity",), ("train.gradient_checkpointing",),
               lambda s: not s.train.gradient_checkpointing,
               "with train.gradient_checkpointing, which recomputes whole layers. Set that to false"),
    Dependency("train", ("recompute_modules",), ("train.recompute_granularity",),
               lambda s: s.train.recompute_granularity == "selective",
               'without train.recompute_granularity = "selective". Set that'),
    Dependency("sglang", ("args", "prefill_num_servers", "server_groups"), ("engine.backend", "engine.url"),
               lambda s: s.engine.backend == "sglang" and not s.engine.url,
               'unless this program starts SGLang servers. Set engine.backend = "sglang", and drop engine.url'),
    Dependency("vllm", ("args",), ("engine.backend", "engine.url"),
               lambda s: s.engine.backend == "vllm" and not s.engine.url,
               'unless this program starts vLLM servers. Set engine.backend = "vllm", and drop engine.url'),
    Dependency("engine", ("max_running_requests",), ("engine.backend", "engine.url"), _embedded,
               "without an embedded engine. SGLang and vLLM have their own option (sglang.args.max_running_requests, "
               "vllm.args.max_num_seqs). Set that"),
    Dependency("engine", ("prefix_cache_gib",), ("engine.backend", "engine.url"), _embedded,
               "without an embedded engine. SGLang and vLLM have their own option "
               "(sglang.args.disable_radix_cache, vllm.args.enable_prefix_caching). Set that"),
    Dependency("engine", ("compile_kernels", "prefix_cache_gib"), ("engine.backend",),
               lambda s: s.engine.backend != "transformers",
               'with engine.backend = "transformers". Set that to auto or embedded'),
    Dependency("engine", ("middleware_paths",), ("engine.backend", "engine.url"), _embedded,
               "without servers of `slimectl serve` that this program starts. Set "
               "rollout.custom_generate_function_path to see each request, or put your "
               "own proxy in front and set engine.url to it"),
    Dependency("engine", ("session_affinity", "server_concurrency", "connect_timeout_s"), _SERVERS,
               lambda s: s.uses_servers, _NEEDS_SERVERS),
    Dependency("engine", ("request_timeout_s",), _SERVERS,
               lambda s: s.uses_servers or _asks_teachers(s), _NEEDS_SERVERS),
    Dependency("engine", ("router", "start_timeout_s"), _SERVERS, _starts_servers, _NEEDS_STARTED),
    Dependency("engine", ("use_fault_tolerance",), _SERVERS, lambda s: s.uses_servers, _NEEDS_SERVERS),
    Dependency("engine", ("health_check_interval", "health_check_timeout", "health_check_first_wait"),
               (*_SERVERS, "engine.use_fault_tolerance"), _watches_servers,
               "without servers that this program supervises. Set engine.num_engines or engine.backend, and keep "
               "engine.use_fault_tolerance"),
    Dependency("engine", ("max_restarts",), (*_SERVERS, "engine.use_fault_tolerance"),
               lambda s: _starts_servers(s) and s.engine.use_fault_tolerance,
               "without servers that this program starts and supervises. Set engine.num_engines or engine.backend, "
               "drop engine.url, and keep engine.use_fault_tolerance"),
    Dependency("cluster", ("colocate",), _SERVERS, lambda s: s.uses_servers,
               "with a single embedded engine, which shares the trainer's process. Set engine.num_engines or "
               "engine.backend"),
    Dependency("cluster", ("offload_train",), ("cluster.colocate",), lambda s: s.cluster.colocate,
               "without cluster.colocate. Set that"),
    Dependency("engine", ("load",), ("engine.backend",), lambda s: s.engine.backend in ("sglang", "vllm"),
               "with an embedded engine, which has the policy's weights in engine.dtype. Set engine.backend"),
    Dependency("cluster", ("ray_address",), ("cluster.executor",), lambda s: s.cluster.executor == "ray",
               'with cluster.executor = "{cluster.executor}". Set cluster.executor = "ray"'),
    Dependency("sync", ("pause_mode", "timeout_s", "check_weight_update_equal"), _SERVERS,
               lambda s: s.uses_servers, _NEEDS_SERVERS),
    Dependency("sync", ("lora",), ("train.lora_rank", *_SERVERS),
               lambda s: s.uses_servers and s.train.lora_rank is not None,
               "without an adapter and servers that receive it. Set train.lora_rank, and engine.num_engines or "
               "engine.backend"),
    Dependency("sync", ("update_weight_buffer_size",), ("sync.transport", *_SERVERS),
               lambda s: s.uses_servers and s.sync.transport in ("auto", "tensor", "distributed"),
               "without the transports tensor and distributed to servers. Set sync.transport"),
    Dependency("sync", ("update_weight_disk_dir",), ("sync.transport", "sync.check_weight_update_equal"),
               lambda s: s.sync.transport in ("disk", "delta") or s.sync.check_weight_update_equal,
               'with sync.transport = "{sync.transport}", which writes no files. Set disk or delta'),
    Dependency("sync", ("custom_post_write_path", "update_weight_disk_keep_files"), ("sync.transport",),
               lambda s: s.sync.transport in ("disk", "delta"),
               'with sync.transport = "{sync.transport}", which writes no files. Set disk or delta'),
    Dependency("sync", ("update_weight_delta_encoding", "update_weight_delta_checksum"), ("sync.transport",),
               lambda s: s.sync.transport == "delta",
               'with sync.transport = "{sync.transport}". Set sync.transport = "delta"'),
    Dependency("sync", ("update_weights_interval",), ("cluster.colocate",), lambda s: not s.cluster.colocate,
               "with cluster.colocate, which pushes after every round. Set that to false"),
    Dependency("rollout", ("tool_timeout_s",), ("rollout.custom_generate_function_path",), _has_agent,
               "without an agent. Set rollout.custom_generate_function_path"),
    Dependency("rollout", AGENT_KEYS, ("rollout.agent",), lambda s: bool(s.rollout.agent),
               "without an agent program. Set rollout.agent"),
    Dependency("rollout", ENV_KEYS, ("rollout.env",), lambda s: bool(s.rollout.env),
               "without an environment. Set rollout.env"),
    Dependency("rollout", ("mask_offpolicy_in_partial_rollout",), ("rollout.partial_rollout",),
               lambda s: s.rollout.partial_rollout, "without rollout.partial_rollout = true. Set that"),
    Dependency("rollout", ("easy_fraction",), ("rollout.easy_threshold",),
               lambda s: s.rollout.easy_threshold is not None, "without rollout.easy_threshold. Set that"),
    Dependency("rollout", ("hard_fraction",), ("rollout.hard_threshold",),
               lambda s: s.rollout.hard_threshold is not None, "without rollout.hard_threshold. Set that"),
    Dependency("score", ("batch_size",), ("score.custom_rm_path", "score.rm_type", "score.rm"), _grades_in_batches,
               "without a reward function that takes `samples`. Set score.custom_rm_path"),
    Dependency("score", ("timeout_s", "wall_timeout_s"), ("score.workers",), lambda s: s.score.workers != 0,
               "with score.workers = 0, which grades in this process. Set that to 1 or more"),
    Dependency("train", ("min_lr",), ("train.lr_decay_style",), lambda s: s.train.lr_decay_style != "constant",
               'with train.lr_decay_style = "constant". Set that to linear or cosine'),
    Dependency("train", ("lr_decay_iters",), ("train.lr_decay_style", "train.lr_warmup_fraction"),
               lambda s: s.train.lr_decay_style != "constant" or bool(s.train.lr_warmup_fraction),
               'with train.lr_decay_style = "constant". Set that to linear or cosine'),
    Dependency("train", ("lr_wsd_decay_iters", "lr_wsd_decay_style"), ("train.lr_decay_style",),
               lambda s: s.train.lr_decay_style == "WSD",
               'with train.lr_decay_style = "{train.lr_decay_style}". Set that to WSD'),
    Dependency("train", ("muon_momentum", "muon_use_nesterov", "muon_num_ns_steps"), ("train.optimizer",),
               lambda s: s.train.optimizer == "muon", 'without train.optimizer = "muon". Set that'),
    Dependency("train", ("lora_alpha", "lora_load", "lora_targets"), ("train.lora_rank",),
               lambda s: s.train.lora_rank is not None, "without train.lora_rank. Set the rank"),
    Dependency("train", ("freeze_params_name_list", "only_train_params_name_list"), ("train.lora_rank",),
               lambda s: s.train.lora_rank is None,
               "with train.lora_rank, which trains only adapters. Set that to none"),
    Dependency("train", ("micro_batch_size",), ("train.use_dynamic_batch_size",),
               lambda s: not s.train.use_dynamic_batch_size,
               "with train.use_dynamic_batch_size. Set that to false"),
    Dependency("sft_warmup", ("target_accuracy", "check_interval", "max_steps", "batch_size", "lr"),
               ("sft_warmup.data",), lambda s: bool(s.sft_warmup.data),
               "without prompts to warm up on. Set sft_warmup.data"),
    Dependency("eval", ("interval",), ("eval.data",), lambda s: bool(s.eval.data),
               "without datasets. Set eval.data.NAME = PATH"),
    Dependency("run", ("on_logprob_mismatch",), ("run.max_logprob_mismatch",),
               lambda s: s.run.max_logprob_mismatch is not None,
               "without run.max_logprob_mismatch. Set that"),
    Dependency("track", ("naming",), ("track.with", "track.prometheus_port"),
               lambda s: _names_tracker(s, "stdout") or s.track.prometheus_port is not None,
               "on the terminal, which has its own labels. Add another tracker to track.with"),
    Dependency("track", ("always_use_train_step",), ("track.with",), lambda s: _names_tracker(s, "stdout"),
               "on the terminal, which shows steps and rounds separately. Add another tracker to track.with"),
    Dependency("track", ("project", "group", "dir", "random_suffix"), ("track.with",),
               lambda s: _names_tracker(s, *_FILES),
               "without a tracker that uses it. Add wandb, swanlab, mlflow or trackio to track.with"),
    Dependency("track", ("run_id",), ("track.with",), lambda s: _names_tracker(s, *_FILES, "trackio"),
               "without a tracker that identifies runs by an id. Add wandb, swanlab or mlflow to track.with"),
    Dependency("track", ("entity", "mode"), ("track.with",), lambda s: _names_tracker(s, *_FILES, "mlflow", "trackio"),
               "without wandb or swanlab. Add one of them to track.with"),
    Dependency("track", ("api_key",), ("track.with",), lambda s: _names_tracker(s, *_FILES, "trackio"),
               "without a tracker that has accounts. Add wandb, swanlab or mlflow to track.with"),
    Dependency("track", ("host",), ("track.with",),
               lambda s: _names_tracker(s, *_FILES, "mlflow", "trackio", "swanlab"),
               "without wandb. Add it to track.with"),
    Dependency("track", ("prometheus_host",), ("track.prometheus_port",),
               lambda s: s.track.prometheus_port is not None,
               "without an endpoint. Set track.prometheus_port"),
    Dependency("algorithm", ("tis_clip", "tis_clip_low", "tis_level", "tis_mode", "tis_veto"),
               ("algorithm.use_tis", "train.custom_tis_function_path", "train.custom_loss_function_path"),
               lambda s: _algorithm(s).use_tis or _own_functions(s, "tis", "loss"),
               "without algorithm.use_tis = true. Set that"),
    Dependency("algorithm", ("tis_batch_normalize",), ("algorithm.use_tis",), lambda s: _algorithm(s).use_tis,
               "without algorithm.use_tis = true. Set that"),
    Dependency("algorithm", ("rs_level", "rs_clip", "rs_clip_low"),
               ("algorithm.use_rs", "train.custom_loss_function_path"),
               lambda s: _algorithm(s).use_rs or _own_functions(s, "loss"),
               "without algorithm.use_rs = true. Set that"),
    Dependency("algorithm", ("grpo_std_normalization",), ("algorithm.norm_mean_type", "algorithm.norm_std_type"),
               lambda s: s.algorithm.norm_kinds is None,
               "with algorithm.norm_mean_type or norm_std_type, which replace the comparison. Set norm_std_type"),
    Dependency("algorithm", ("difficulty_low_threshold", "difficulty_high_threshold"), ("algorithm.difficulty_mask",),
               lambda s: _algorithm(s).difficulty_mask, "without algorithm.difficulty_mask = true. Set that"),
    Dependency("algorithm", ("opsm_delta",), ("algorithm.use_opsm", "train.custom_loss_function_path"),
               lambda s: _algorithm(s).use_opsm or _own_functions(s, "loss"),
               "without algorithm.use_opsm = true. Set that"),
    Dependency("algorithm", ("kl_loss_type", "use_unbiased_kl", "ref_load", "ref_update_interval"),
               ("algorithm.kl_coef", "algorithm.kl_loss_coef", "train.custom_loss_function_path"),
               lambda s: Need.REFERENCE in s.algorithm.needs or _own_functions(s, "loss"),
               "without a divergence from the reference. Set algorithm.kl_coef or algorithm.kl_loss_coef"),
    Dependency("algorithm", ("report_entropy",), ("algorithm.entropy_coef",),
               lambda s: not _algorithm(s).entropy_coef,
               "with algorithm.entropy_coef, which measures it. Set that to 0"),
    Dependency("algorithm", ("opd_jsd_beta",), ("algorithm.opd_divergence",),
               lambda s: _algorithm(s).opd_divergence == "jsd",
               "with algorithm.opd_divergence = {algorithm.opd_divergence}. Set that to jsd"),
    Dependency("algorithm", ("opd_top_k",), ("algorithm.opd_divergence",),
               lambda s: _algorithm(s).opd_divergence != "token",
               "with algorithm.opd_divergence = token. Set that to forward_kl, reverse_kl or jsd"),
    Dependency("algorithm", ("opd_teacher_load", "opd_teacher_url", "opd_divergence", "opd_teachers",
                             "opd_self_teacher", "opd_teacher_template", "opd_align"), ("algorithm.opd_kl_coef",),
               lambda s: bool(_algorithm(s).opd_kl_coef), "with algorithm.opd_kl_coef = 0. Set opd_kl_coef"),
    Dependency("algorithm", ("opd_self_success",), ("algorithm.opd_teacher_template",),
               lambda s: "{demonstration}" in (_algorithm(s).opd_teacher_template or ""),
               "without {demonstration} in algorithm.opd_teacher_template. Add that"),
    Dependency("algorithm", ("opd_teacher_api",), ("algorithm.opd_teacher_url",),
               lambda s: bool(_algorithm(s).opd_teacher_url), "without algorithm.opd_teacher_url. Set that"),
    Dependency("algorithm", ("critic_load", "critic_lr", "num_critic_only_steps"), ("algorithm.critic",),
               lambda s: _algorithm(s).critic == "separate",
               "with algorithm.critic = shared. Set that to separate"),
    Dependency("algorithm", ("value_coef",), ("algorithm.critic",), lambda s: _algorithm(s).critic == "shared",
               "with algorithm.critic = separate. Set that to shared"),
)  # fmt: skip
"""Every key that depends on another. tests/settings/test_effects.py checks that none is missing."""

AMBIENT = ("cluster", "launch", "engine", "sglang", "vllm", "track")
"""Sections whose values from the environment describe a machine or an account, for runs of any kind."""


def ineffective(settings: Settings) -> Iterator[tuple[str, tuple[str, ...], str]]:
    """Yield each setting that is set but has no effect, the settings that decide this, and the error line."""
    for dependency in DEPENDENCIES:
        section = getattr(settings, dependency.section)
        keys = [
            key for key in dependency.keys or type(section).model_fields if _is_set(dependency.section, section, key)
        ]
        if keys and not dependency.acts(settings):
            for key in keys:
                name = f"{dependency.section}.{key}"
                yield (
                    name,
                    dependency.switches,
                    f"{name} has no effect {_filled(dependency.reason, settings)}, or drop it.",
                )
    for name in settings.track.kwargs:
        if name not in settings.track.with_:
            line = f"track.kwargs.{name} has no effect without that tracker. Add {name} to track.with, or drop it."
            yield f"track.kwargs.{name}", ("track.with",), line


def _is_set(name: str, section: Section, key: str) -> bool:
    """Return whether a key has a value that neither is nor was its default."""
    field = type(section).model_fields.get(key)
    if field is None:
        return False
    default = field.get_default(call_default_factory=True)
    return getattr(section, key) not in (default, FORMER_DEFAULTS.get(f"{name}.{key}", default))


def _filled(reason: str, settings: Settings) -> str:
    """Return the reason with its placeholders replaced by the values of the settings."""
    for name in ("train.backend", "cluster.executor", "sync.transport"):
        section, _, key = name.partition(".")
        reason = reason.replace(f"{{{name}}}", str(getattr(getattr(settings, section), key)))
    return reason


def superseded(settings: Settings, origins: Mapping[str, str], ranks: Mapping[str, int]) -> dict[str, str]:
    """Return the ineffective settings that are dropped instead of rejected, each with the reason.

    A later layer set what decides them, or they come from the environment and describe this machine. `origins` has the
    layer that set each key, and `ranks` its position.
    """
    drops = {}
    for name, switches, _ in ineffective(settings):
        key = ".".join(name.split(".")[:2])
        later = [switch for switch in switches if ranks.get(switch, -1) > ranks.get(key, -1)]
        if later:
            switch = max(later, key=lambda candidate: ranks[candidate])
            drops[name] = f"{origins[switch]} sets {switch}"
        elif origins.get(key) == "environment" and key.partition(".")[0] in AMBIENT:
            drops[name] = f"nothing needs the environment's {key}"
    return drops
