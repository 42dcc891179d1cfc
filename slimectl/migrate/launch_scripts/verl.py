"""verl's launch scripts: keys beyond the table, and settings that several keys decide together."""

from __future__ import annotations

import re
from typing import Any

from slimectl.migrate.launch_scripts.conversion import Conversion, Dialect, Row, omit_unlisted, take, typed
from slimectl.migrate.launch_scripts.flags import Flag
from slimectl.migrate.launch_scripts.megatron import hand_over
from slimectl.migrate.launch_scripts.verl_keys import ACTOR, GROUPS, OPTIM, OVERLONG, ROLLOUT

TABLES = {
    "actor_rollout_ref.rollout.engine_kwargs.vllm.": "vllm.args.",
    "actor_rollout_ref.rollout.engine_kwargs.sglang.": "sglang.args.",
    "data.apply_chat_template_kwargs.": "rollout.apply_chat_template_kwargs.",
}
"""Tables of other programs' arguments, and their place here."""
FIELDS = (f"{ACTOR}megatron.override_transformer_config.", f"{OPTIM}override_optimizer_config.")
"""Tables of fields of Megatron's configuration classes."""


def unlisted(conversion: Conversion, flag: Flag) -> None:
    """Pass on tables of other programs' arguments. List any other key."""
    if (table := next((name for name in FIELDS if flag.name.startswith(name)), None)) is not None:
        hand_over(conversion, flag, flag.name.removeprefix(table))
        return
    prefix = next((prefix for prefix in TABLES if flag.name.startswith(prefix)), None)
    if flag.name.startswith(ARGUMENTS):
        take(conversion, flag, Row(flag.name, f"custom.{flag.name.partition('reward_kwargs.')[2]}", convert=typed))
    elif prefix is None:
        omit_unlisted(conversion, flag)
    elif flag.values:
        key = f"{TABLES[prefix]}{flag.name.removeprefix(prefix)}"
        take(conversion, flag, Row(flag.name, key, convert=typed))


def program(conversion: Conversion) -> str:
    """The program of verl that the command starts or that the configuration is for. The default is ppo."""
    launcher = conversion.flags.get("launcher")
    command = " ".join(launcher.texts) if launcher else ""
    if kind := next((kind for kind in ("sft", "fully_async", "one_step_off") if kind in command), ""):
        return kind
    if any(name.startswith("async_training.") for name in conversion.flags):
        return "fully_async"
    is_supervised = any(
        flag.spelling.startswith(("optim.", "model.partial_pretrain")) for flag in conversion.flags.values()
    )
    return "sft" if is_supervised and not command else "ppo"


def settle(conversion: Conversion) -> None:
    """Set what depends on several of verl's keys together."""
    kind = program(conversion)
    conversion.put("train.dtype", "bfloat16", "verl computes in bfloat16")
    _settle_optimizer(conversion, kind)
    _settle_run(conversion)
    if kind == "sft":
        _settle_sft(conversion)
        return
    conversion.put_default("algorithm.adv_estimator", "algorithm.name", "ppo")
    _settle_algorithm(conversion)
    _settle_loss(conversion)
    _settle_components(conversion)
    _settle_sizes(conversion)
    _settle_correction(conversion)
    _settle_teacher(conversion)
    settle_reward(conversion)
    mode = conversion.flags.get("trainer.v1.trainer_mode")
    if mode is not None:
        conversion.values.pop("run.async_level", None)
        if mode.problem or mode.text != "sync":
            conversion.omit(mode, "it samples ahead. Set run.async_level and cluster.colocate by hand", by_hand=True)
    if kind == "fully_async":
        _settle_asynchronous(conversion)
    elif kind == "one_step_off":
        conversion.put("run.async_level", 1, "one_step_off_policy samples one step ahead")
    if kind != "ppo":
        _settle_separate_engines(conversion)
    _settle_engine(conversion, kind)
    _settle_evaluation(conversion)
    conversion.put("rollout.label_key", "reward_model.ground_truth", "verl's rows have their label there")


def _settle_run(conversion: Conversion) -> None:
    """Settings of the run: its length, its folder, its checkpoints and trackers."""
    values = conversion.values
    if "run.num_rollout" in values:
        conversion.take_back("run.num_epoch", "trainer.total_training_steps overrides it")
    if conversion.text("trainer.total_training_steps", "null") not in ("null", "none", "None"):
        conversion.settled.add("run.num_epoch")
    if "run.save_interval" in values and "run.keep_checkpoints" not in values:
        conversion.put("run.keep_checkpoints", None, "the default of verl for trainer.max_actor_ckpt_to_keep")
    if "trainer.logger" not in conversion.flags:
        conversion.note_default("trainer.logger", "console and wandb", 'add "wandb" to track.with')
    tokens = f"{ACTOR}ppo_max_token_len_per_gpu"
    if conversion.switch(f"{ACTOR}use_dynamic_bsz") and tokens not in conversion.flags:
        conversion.put("train.max_tokens_per_gpu", 16384, tokens)
    if conversion.switch(f"{ACTOR}fsdp_config.param_offload"):
        flags = [f"{ACTOR}fsdp_config.{name}_offload" for name in ("param", "optimizer")]
        conversion.put("train.offload", "parameters", *flags)
    conversion.name_run("trainer.default_local_dir")


def _settle_optimizer(conversion: Conversion, kind: str) -> None:
    """Settings of AdamW. The supervised trainers have other defaults, and fsdp_sft_trainer has its own."""
    is_first_version = "fsdp_sft_trainer" in conversion.text("launcher")
    if kind == "sft":
        conversion.program_defaults |= {f"{OPTIM}lr": 1e-5 if is_first_version else 1e-3, f"{ROLLOUT}seed": 1,
                                        "trainer.total_epochs": 4}  # fmt: skip
    if is_first_version:
        conversion.program_defaults |= {f"{OPTIM}lr_scheduler_type": "cosine", f"{OPTIM}lr_warmup_steps_ratio": 0.1}
    if f"{OPTIM}min_lr_ratio" in conversion.flags and "train.min_lr" in conversion.values:
        rate = conversion.real(f"{OPTIM}min_lr_ratio", 0.0) * conversion.real(f"{OPTIM}lr", 1e-6)
        conversion.put("train.min_lr", rate, f"{OPTIM}min_lr_ratio", f"{OPTIM}lr")
    if not conversion.put_pair(f"{OPTIM}betas", "train.adam_beta1", "train.adam_beta2"):
        conversion.put_default(f"{OPTIM}betas", "train.adam_beta2", 0.95 if is_first_version else 0.999)
    if "train.lora_rank" in conversion.values:
        is_merged = "actor_rollout_ref.model.lora.rank" in conversion.flags
        conversion.put_default("actor_rollout_ref.model.lora_alpha", "train.lora_alpha", 32 if is_merged else 16)


def _settle_sft(conversion: Conversion) -> None:
    """The supervised trainer of verl has no engine, and counts a step in rows."""
    conversion.put("algorithm.name", "sft", "launcher")
    is_chat = "fsdp_sft_trainer" not in conversion.text("launcher") or conversion.switch("data.multiturn.enable")
    question = {"data.prompt_key": "question", "data.response_key": "answer"}
    columns = {"data.messages_key": "messages"} if is_chat else question
    for name, part in (("prompt", "rollout.input_key"), ("response", "rollout.label_key")):
        parts = conversion.flags.get(f"data.{name}_dict_keys")
        if parts is not None and len(parts.values) == 1 and not parts.problem:
            column = conversion.text(f"data.{name}_key", question[f"data.{name}_key"])
            conversion.put(part, f"{column}.{parts.text}", f"data.{name}_key", parts.name)
    for name, column in columns.items():
        conversion.put_default(name, "rollout.label_key" if "response" in name else "rollout.input_key", column)
    conversion.put_default("data.shuffle", "rollout.shuffle", True)
    conversion.skip_sampling()
    conversion.settled |= {"cluster.rollout_num_gpus_per_engine", "eval.temperature"}
    conversion.settled |= {"cluster.actor_num_gpus_per_node", "train.global_batch_size"}
    rows = conversion.values.pop("run.rollout_batch_size", None)
    conversion.put_known("train.global_batch_size", rows or 256, "data.train_batch_size")


def _settle_loss(conversion: Conversion) -> None:
    """The reduction over tokens, its bounds and its divergences."""
    conversion.put_switched("algorithm.kl_loss_coef", f"{ACTOR}use_kl_loss", f"{ACTOR}kl_loss_coef", "0.001")
    conversion.put_switched("algorithm.kl_coef", "algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef", "0.001")
    values = conversion.values
    mode = conversion.text(f"{ACTOR}loss_agg_mode")
    factor = values.get("algorithm.fixed_length")
    if mode == "seq-mean-token-sum-norm":
        length = factor or values.get("rollout.max_response_len", 512)
        conversion.put("algorithm.fixed_length", length, f"{ACTOR}loss_agg_mode", f"{ACTOR}loss_scale_factor")
    else:
        conversion.take_back("algorithm.fixed_length", "only loss_agg_mode = seq-mean-token-sum-norm divides by it")
    if mode == "seq-mean-token-sum":
        conversion.put("algorithm.fixed_length", 1, f"{ACTOR}loss_agg_mode")
    if values.get("algorithm.tis_clip") and f"{ACTOR}tis_imp_ratio_cap" in conversion.flags:
        conversion.put("algorithm.use_tis", True, f"{ACTOR}tis_imp_ratio_cap")
    if low := conversion.text(f"{ACTOR}clip_ratio_low"):
        conversion.put("algorithm.eps_clip", low, f"{ACTOR}clip_ratio_low")
    own_bounds = values.get("algorithm.name") in ("gspo", "cispo", "gmpo", "dapo")
    is_open = not {f"{ACTOR}clip_ratio_high", f"{ACTOR}clip_ratio"} & conversion.flags.keys()
    if is_open and (own_bounds or "algorithm.eps_clip" in values):
        conversion.put("algorithm.eps_clip_high", 0.2, "the default of verl for actor.clip_ratio_high")


def _settle_components(conversion: Conversion) -> None:
    """GDPO's components with their weights, which are two lists in verl."""
    keys, weights = "algorithm.gdpo_reward_keys", "algorithm.gdpo_reward_weights"
    conversion.drop("algorithm.gdpo_weights")
    if keys in conversion.flags and not conversion.is_unknown(keys, weights):
        names = conversion.flags[keys].texts
        numbers = conversion.flags[weights].texts if weights in conversion.flags else ["1.0"] * len(names)
        if len(numbers) == len(names):
            table = {name: float(number) for name, number in zip(names, numbers, strict=True)}
            conversion.put("algorithm.gdpo_weights", table, keys, weights)
        else:
            reason = f"has {len(numbers)} weights for {len(names)} rewards. Set algorithm.gdpo_weights by hand"
            conversion.omit(conversion.flags[weights], reason, by_hand=True)


def _settle_teacher(conversion: Conversion) -> None:
    """A teacher only is an algorithm here. Beside rewards it is a term of their algorithm."""
    table = "distillation.distillation_loss."
    if not conversion.switch("distillation.enabled"):
        for key in ("opd_kl_coef", "opd_divergence", "opd_top_k"):
            conversion.take_back(f"algorithm.{key}", "distillation.enabled is off")
        conversion.take_back("rollout.domain_key", "distillation.enabled is off")
        return
    rewards, mode = f"{table}use_task_rewards", f"{table}loss_mode"
    if rewards in conversion.flags and not conversion.switch(rewards):
        conversion.put("algorithm.name", "opd", "distillation.enabled", rewards)
    elif f"{table}distillation_loss_coef" not in conversion.flags:
        conversion.put("algorithm.opd_kl_coef", 1.0, "distillation.enabled", rewards)
    if conversion.converted(mode) in (None, "token"):
        conversion.take_back("algorithm.opd_top_k", "the loss compares the sampled token")
    names = [name for name in conversion.flags if re.fullmatch(r"distillation\..*model_path", name)]
    teachers: dict[str, dict[str, Any]] = {}
    for name in names:
        flag, place = conversion.flags[name], name.removesuffix("model_path").rstrip(".")
        if flag.problem:
            continue
        conversion.unlist(name)
        teachers[place.rpartition(".")[2]] = {"load": flag.text}
        if domain := conversion.text(f"{place}.key"):
            teachers[place.rpartition(".")[2]]["domains"] = [domain]
            conversion.unlist(f"{place}.key")
    keys = [key for name in names if (key := f"{name.removesuffix('model_path').rstrip('.')}.key") in conversion.flags]
    if len(teachers) > 1:
        conversion.put("algorithm.opd_teachers", teachers, *names, *keys)
        key = "distillation.teacher_key"
        conversion.put("rollout.domain_key", conversion.text(key, "data_source"), key)
    elif teachers:
        conversion.put("algorithm.opd_teacher_load", next(iter(teachers.values()))["load"], *names)


def _settle_evaluation(conversion: Conversion) -> None:
    """Evaluations do not use the sampling settings of training in verl."""
    if not any(key.startswith("eval.data.") for key in conversion.values):
        return
    for name, default in (("top_p", 1.0), ("top_k", -1)):
        is_given = f"{ROLLOUT}val_kwargs.{name}" in conversion.flags
        if f"rollout.{name}" in conversion.values and not is_given:
            conversion.put(f"eval.{name}", default, f"the default of verl for rollout.val_kwargs.{name}")


def _settle_algorithm(conversion: Conversion) -> None:
    """The estimator sets the algorithm. A separate loss (gspo) does if responses are compared within a group."""
    estimator, loss = "algorithm.adv_estimator", f"{ACTOR}policy_loss.loss_mode"
    has_loss = conversion.text(loss, "vanilla") != "vanilla" and conversion.text(estimator) == "grpo"
    if has_loss and (name := conversion.converted(loss)):
        conversion.put("algorithm.name", name, estimator, loss)
    elif name := conversion.converted(estimator):
        conversion.put("algorithm.name", name, estimator)


def _settle_sizes(conversion: Conversion) -> None:
    """Steps are counted in prompts there, and in samples here."""
    samples = conversion.number(f"{ROLLOUT}n", 1)
    prompts = conversion.number(f"{ACTOR}ppo_mini_batch_size", 256)
    names = [name for name in (f"{ACTOR}ppo_mini_batch_size", f"{ROLLOUT}n") if name in conversion.flags]
    conversion.put_known("train.global_batch_size", prompts * samples, *(names or [f"{ACTOR}ppo_mini_batch_size"]))


def _settle_correction(conversion: Conversion) -> None:
    """Set the level of a correction, which is the value of its switch in verl."""
    for name in ("algorithm.rollout_is", "algorithm.rollout_correction.rollout_is"):
        level = conversion.text(name)
        if level in ("token", "sequence"):
            conversion.put("algorithm.use_tis", True, name)
            conversion.put("algorithm.tis_level", level, name)
    if "algorithm.rs_level" in conversion.values:
        conversion.put("algorithm.use_rs", True, "algorithm.rollout_correction.rollout_rs")


def _settle_asynchronous(conversion: Conversion) -> None:
    """The asynchronous trainer counts rounds by its weight pushes."""
    sizes = {"async_training.trigger_parameter_sync_step": 4, "async_training.require_batches": 1}
    prompts = conversion.number(f"{ACTOR}ppo_mini_batch_size", 256)
    for name, default in sizes.items():
        prompts *= conversion.number(name, default)
    conversion.put_known("run.rollout_batch_size", prompts, *sizes, f"{ACTOR}ppo_mini_batch_size")
    conversion.take_back("rollout.over_sampling_batch_size", "prompts are drawn one by one in any case")
    conversion.put_default("async_training.staleness_threshold", "run.async_level", 1)
    if "run.async_level" in conversion.values:
        conversion.take_back("rollout.partial_rollout", "responses in progress always continue after a weight push")
    else:
        conversion.put_default("async_training.partial_rollout", "rollout.partial_rollout", True)
    is_endless = conversion.text("rollout.total_rollout_steps").lower() in ("null", "none")
    if not is_endless and not conversion.is_unknown("rollout.total_rollout_steps"):
        total = conversion.number("rollout.total_rollout_steps", 100)
        conversion.put("run.num_rollout", max(1, total // prompts), "rollout.total_rollout_steps")
        conversion.settled.add("run.num_epoch")
        conversion.take_back("run.num_epoch", "rollout.total_rollout_steps overrides it")


def _settle_separate_engines(conversion: Conversion) -> None:
    """Engines on their own GPUs. The loss uses their log-probabilities."""
    gpus = conversion.number("rollout.nnodes", 1) * conversion.number("rollout.n_gpus_per_node", 8)
    conversion.put_known("cluster.rollout_num_gpus", gpus, "rollout.nnodes", "rollout.n_gpus_per_node")
    names = ("algorithm.rollout_correction.bypass_mode", "async_training.use_rollout_log_probs",
             "async_training.compute_prox_log_prob")  # fmt: skip
    if not any(name in conversion.flags for name in names):
        conversion.put("algorithm.use_rollout_logprobs", True, "the default of verl for rollout_correction.bypass_mode")


def _settle_engine(conversion: Conversion, kind: str) -> None:
    values = conversion.values
    memory = f"{ROLLOUT}gpu_memory_utilization"
    if values.get("engine.backend") == "sglang":
        if "vllm.args.gpu_memory_utilization" in values:
            conversion.put("sglang.args.mem_fraction_static", values.pop("vllm.args.gpu_memory_utilization"), memory)
        for key in [key for key in values if key.startswith("vllm.args.")]:
            conversion.take_back(key, "is an argument of vLLM, and the engine is SGLang")
    if memory not in conversion.flags:
        engine = "sglang" if values.get("engine.backend") == "sglang" else "vllm"
        argument = "mem_fraction_static" if engine == "sglang" else "gpu_memory_utilization"
        conversion.put(f"{engine}.args.{argument}", 0.5, f"the default of verl for {memory}")
    if kind == "ppo" and "actor_rollout_ref.hybrid_engine" not in conversion.flags:
        conversion.put("cluster.colocate", True, "verl's engines share the trainer's GPUs")
    if values.get("cluster.colocate"):
        gpus = conversion.number("trainer.nnodes", 1) * conversion.number("trainer.n_gpus_per_node", 8)
        conversion.put_known("cluster.rollout_num_gpus", gpus, "trainer.nnodes", "trainer.n_gpus_per_node")
    if values.get("train.backend") == "megatron":
        conversion.take_back("train.offload", "with Megatron-core it is megatron.optimizer_cpu_offload")
    elif "megatron" in " ".join(conversion.flags["launcher"].texts if "launcher" in conversion.flags else []):
        conversion.put("train.backend", "megatron", "launcher")
    elif any(key.startswith("megatron.") for key in values):
        names = [name for name in conversion.flags if f"{ACTOR}megatron." in name]
        conversion.put("train.backend", "megatron", *names[:1])
    if values.get("train.backend") == "megatron":
        conversion.settled.add("train.gradient_checkpointing")  # recompute_granularity decides it there


FUNCTION = ("reward.custom_reward_function.", "custom_reward_function.")
MODEL = ("reward.reward_model.", "reward_model.")
MANAGER = ("reward.reward_manager.name", "reward_model.reward_manager")
OWN_MANAGER = ("reward.reward_manager.module.path", "reward_model.reward_loop_module_path")
SAME_FUNCTION = ("", "naive", "dapo", "prime", "limited", "remote", "rate_limited", "batch")
"""Reward managers that call the function with one response, or with lists of the same parts (batch)."""
ARGUMENTS = tuple(f"{prefix}reward_kwargs." for prefix in FUNCTION)
LENGTH = ("reward.reward_kwargs.max_resp_len", "reward_model.reward_kwargs.max_resp_len")


def _given(conversion: Conversion, *names: str) -> Flag | None:
    """The first of these flags that has a value in the script."""
    flags = (conversion.flags.get(name) for name in names)
    return next((flag for flag in flags if flag and (flag.problem or flag.text.lower() not in ("null", "none"))), None)


def settle_reward(conversion: Conversion) -> None:
    """Set the reward. A reward that only the user can know is listed first."""
    path = _given(conversion, *(f"{prefix}path" for prefix in FUNCTION))
    name = _given(conversion, *(f"{prefix}name" for prefix in FUNCTION))
    manager = _given(conversion, *MANAGER)
    conversion.drop("score.custom_rm_path", "score.rm")
    shown = path or manager
    conversion.unlist(*MANAGER)
    if manager and manager.text in SAME_FUNCTION:
        conversion.note_equal(manager.name)
    if module := _given(conversion, *OWN_MANAGER):
        conversion.unlist(module.name)
        conversion.omit(module, "a reward manager of your own. Write it as score.custom_rm_path", first=True)
    elif manager and shown and (manager.problem or manager.text not in SAME_FUNCTION):
        reason = manager.problem or f"the reward manager {manager.text} calls the function with lists"
        conversion.omit(shown, f"{reason}. Write it as a function of `samples`: score.custom_rm_path", first=True)
    elif path:
        _take_function(conversion, path, name)
    elif any(conversion.switch(f"{prefix}enable") for prefix in MODEL):
        _take_model(conversion)
    else:
        conversion.put("score.rm_type", "by_column", "verl grades by data_source")
    if conversion.values.get("score.rm_type") != "by_column":
        conversion.take_back("score.rm_options.column", "the reward does not depend on it")
    if conversion.values.get("score.rm_type") != "reward_model":
        conversion.take_back("score.rm_options.path", "reward_model.enable is off, or a function grades")
    _settle_overlong(conversion)


def _take_function(conversion: Conversion, path: Flag, name: Flag | None) -> None:
    """Set the user's function. A function that asks a generative reward model is left to the user."""
    problem = path.problem or (name.problem if name else "")
    if problem:
        already = conversion.omissions
        already[:] = [item for item in already if item.flag not in {str(path), str(name)}]
        conversion.omit(path, f"{problem}. Set score.custom_rm_path by hand", first=True)
        return
    if switch := next((item for prefix in MODEL if conversion.switch(item := f"{prefix}enable")), None):
        reason = "the function asks a model that verl serves. Start it with `slimectl serve` and pass its URL"
        conversion.omit(conversion.flags[switch], reason, first=True)
    function = name.text if name else "compute_score"
    names = [flag.name for flag in (path, name) if flag]
    conversion.put("score.custom_rm_path", f"{path.text}:{function}", *names)


def _take_model(conversion: Conversion) -> None:
    """Set a trained reward model. Its directory may be left to the user."""
    if "score.rm_options.path" in conversion.values:
        switch = next(f"{prefix}enable" for prefix in MODEL if conversion.switch(f"{prefix}enable"))
        conversion.put("score.rm_type", "reward_model", switch)
        conversion.unlist(switch)
    else:
        reason = "the directory of the reward model, with score.rm_type = reward_model"
        conversion.ask_for("score.rm_options.path", reason)


def _settle_overlong(conversion: Conversion) -> None:
    """Add DAPO's soft punishment of long responses to the reward (Yu et al. 2025, arXiv:2503.14476, eq. 13)."""
    prefix = next((item for item in OVERLONG if f"{item}.enable" in conversion.flags), "")
    names = [name for name in conversion.flags if name.startswith(tuple(f"{item}." for item in OVERLONG))]
    lengths = [name for name in LENGTH if name in conversion.flags]
    values = conversion.values
    if not prefix or not conversion.switch(f"{prefix}.enable"):
        for name in [*names, *lengths]:
            conversion.omit(conversion.flags[name], "the overlong buffer is off")
        return
    limit = int(float(conversion.text(lengths[0]))) if lengths and not conversion.is_unknown(*lengths) else None
    base: dict[str, Any] = {"path": values["score.custom_rm_path"]} if "score.custom_rm_path" in values else {}
    if values.get("score.rm_type") == "by_column":
        base = {"type": "by_column"}
        if "score.rm_options.column" in values:
            base["column"] = values.pop("score.rm_options.column")
    if not base or conversion.is_unknown(*names, *lengths):
        reason = 'write score.rm as a sum with {type = "overlong", limit = …, buffer = …}'
        conversion.omit(conversion.flags[f"{prefix}.enable"], reason, first=True)
        return
    buffer = conversion.number(f"{prefix}.len", 0)
    overlong = {"type": "overlong", "limit": limit or int(values.get("rollout.max_response_len", 512)),
                "buffer": buffer, "weight": conversion.real(f"{prefix}.penalty_factor", 1.0)}  # fmt: skip
    is_function = "path" in base
    conversion.drop("score.custom_rm_path", "score.rm_type")
    functions = [name for name in conversion.flags if name.startswith(FUNCTION) and name.endswith(("path", "name"))]
    conversion.put("score.rm", [base, overlong], *names, *lengths, *(functions if is_function else ()))


PREFIXES = {"optim.": OPTIM, "model.": "actor_rollout_ref.model."}
"""Tables of the supervised trainers, by the matching tables of the others."""
PROGRAMS = r"main_ppo|sft_trainer|fully_async_main|(^|/)recipe[./].*main_\w+"
VERL = Dialect("verl", "verl", GROUPS, settle, unlisted, form="hydra", programs=PROGRAMS, aliases=PREFIXES)
