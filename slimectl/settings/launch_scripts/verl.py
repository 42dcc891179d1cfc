"""verl's launch scripts: keys beyond the table, and settings that several keys decide together."""

from __future__ import annotations

import re

from slimectl.settings.launch_scripts.conversion import Conversion, Dialect, typed
from slimectl.settings.launch_scripts.flags import Flag
from slimectl.settings.launch_scripts.megatron import hand_over
from slimectl.settings.launch_scripts.verl_keys import ACTOR, GROUPS, OPTIM, ROLLOUT

TABLES = {
    "actor_rollout_ref.rollout.engine_kwargs.vllm.": "vllm.args.",
    "actor_rollout_ref.rollout.engine_kwargs.sglang.": "sglang.args.",
    "data.apply_chat_template_kwargs.": "rollout.apply_chat_template_kwargs.",
}
"""Tables of other programs' arguments, and where they stand here."""
FIELDS = (f"{ACTOR}megatron.override_transformer_config.", f"{OPTIM}override_optimizer_config.")
"""Tables of fields of Megatron's configuration classes."""


def unlisted(conversion: Conversion, flag: Flag) -> None:
    """Hand tables of other programs' arguments over; list any other key."""
    if (table := next((name for name in FIELDS if flag.name.startswith(name)), None)) is not None:
        hand_over(conversion, flag, flag.name.removeprefix(table))
        return
    prefix = next((prefix for prefix in TABLES if flag.name.startswith(prefix)), None)
    if prefix is None:
        conversion.omit(flag, "is no key that this table knows; look for the setting by `slimectl settings explain`")
    elif flag.problem:
        conversion.omit(flag, f"{flag.problem}; set {TABLES[prefix]}… by hand", by_hand=True)
    elif flag.values:
        conversion.put(f"{TABLES[prefix]}{flag.name.removeprefix(prefix)}", typed(flag), flag.name)


def settle(conversion: Conversion) -> None:
    """Join what verl decides by several keys together."""
    values, text = conversion.values, conversion.text
    if "sft" in text("launcher"):
        _settle_sft(conversion)
        return
    if "algorithm.adv_estimator" not in conversion.flags and "algorithm.name" not in values:
        conversion.put("algorithm.name", "ppo", "the default of verl for algorithm.adv_estimator")
    _settle_algorithm(conversion)
    _settle_divergence(conversion, f"{ACTOR}use_kl_loss", f"{ACTOR}kl_loss_coef", "algorithm.kl_loss_coef")
    _settle_divergence(conversion, "algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef", "algorithm.kl_coef")
    mode = text(f"{ACTOR}loss_agg_mode")
    if mode == "seq-mean-token-sum":
        conversion.put("algorithm.fixed_length", 1, f"{ACTOR}loss_agg_mode")
    elif mode == "seq-mean-token-sum-norm":
        conversion.put("algorithm.fixed_length", values.get("rollout.max_response_len", 512), f"{ACTOR}loss_agg_mode")
    if values.get("algorithm.tis_clip") and f"{ACTOR}tis_imp_ratio_cap" in conversion.flags:
        conversion.put("algorithm.use_tis", True, f"{ACTOR}tis_imp_ratio_cap")
    _settle_sizes(conversion)
    _settle_correction(conversion)
    if conversion.switch("distillation.enabled"):
        conversion.put("algorithm.name", "opd", "distillation.enabled")
        teacher = next((name for name in conversion.flags if re.fullmatch(r"distillation\..*model_path", name)), None)
        if teacher is not None and not conversion.flags[teacher].problem:
            conversion.put("algorithm.opd_teacher_load", conversion.text(teacher), teacher)
            conversion.unlist(teacher)
    if any(name.startswith("async_training.") for name in conversion.flags):
        _settle_asynchronous(conversion)
    _settle_engine(conversion)
    conversion.put("train.dtype", "bfloat16", "verl computes in bfloat16")
    conversion.put("rollout.label_key", "reward_model.ground_truth", "verl's rows have their label there")
    if conversion.switch(f"{ACTOR}fsdp_config.param_offload"):
        conversion.put(
            "train.offload", "parameters", f"{ACTOR}fsdp_config.param_offload", f"{ACTOR}fsdp_config.optimizer_offload"
        )
    if "run.num_rollout" in values:
        conversion.take_back("run.num_epoch", "trainer.total_training_steps goes before it")
    if conversion.number("trainer.nnodes", 1) > 1:
        conversion.put("cluster.executor", "ray", "trainer.nnodes")
    if isinstance(values.get("run.dir"), str):
        folder, _, name = str(values["run.dir"]).rstrip("/").rpartition("/")
        conversion.put("run.dir", folder or ".", "trainer.default_local_dir")
        if "run.name" not in values:
            conversion.put("run.name", name, "trainer.default_local_dir")


def _settle_sft(conversion: Conversion) -> None:
    """The supervised trainer of verl has no engine, and counts a step in rows."""
    conversion.put("algorithm.name", "sft", "launcher")
    conversion.put("train.dtype", "bfloat16", "verl computes in bfloat16")
    conversion.settled |= {row.key for row in conversion.dialect.rows.values() if row.key.startswith("rollout.")}
    conversion.settled |= {"engine.backend", "engine.dtype", "cluster.rollout_num_gpus_per_engine", "eval.temperature"}
    conversion.settled.add("cluster.actor_num_gpus_per_node")
    conversion.settled |= {"train.global_batch_size", "run.rollout_batch_size"}
    if "run.rollout_batch_size" in conversion.values:
        rows = conversion.values.pop("run.rollout_batch_size")
        conversion.put("train.global_batch_size", rows, "data.train_batch_size")


def _settle_algorithm(conversion: Conversion) -> None:
    """The estimator names the algorithm; a loss of its own (gspo) does where siblings are compared."""
    estimator, loss = "algorithm.adv_estimator", f"{ACTOR}policy_loss.loss_mode"
    has_loss = conversion.text(loss, "vanilla") != "vanilla" and conversion.text(estimator) == "grpo"
    if has_loss and (name := conversion.converted(loss)):
        conversion.put("algorithm.name", name, estimator, loss)
    elif name := conversion.converted(estimator):
        conversion.put("algorithm.name", name, estimator)


def _settle_divergence(conversion: Conversion, switch: str, coefficient: str, key: str) -> None:
    """A divergence is on by a switch there, and by its coefficient here; verl's default of that is 0.001."""
    if not conversion.switch(switch):
        conversion.take_back(key, f"{switch} is off")
    else:
        conversion.put(key, conversion.text(coefficient, "0.001"), switch, coefficient)


def _settle_sizes(conversion: Conversion) -> None:
    """Steps are counted in prompts there, and in samples here."""
    samples = conversion.number(f"{ROLLOUT}n", 1)
    prompts = conversion.number(f"{ACTOR}ppo_mini_batch_size", 256)
    names = [name for name in (f"{ACTOR}ppo_mini_batch_size", f"{ROLLOUT}n") if name in conversion.flags]
    source = names if f"{ACTOR}ppo_mini_batch_size" in names else ["the default of verl for ppo_mini_batch_size"]
    problems = [conversion.flags[name] for name in names if conversion.flags[name].problem]
    if not problems:
        conversion.put("train.global_batch_size", prompts * samples, *source)
    if f"{OPTIM}min_lr_ratio" in conversion.flags and "train.min_lr" in conversion.values:
        rate = conversion.real(f"{OPTIM}min_lr_ratio", 0.0) * conversion.real(f"{OPTIM}lr", 1e-6)
        conversion.put("train.min_lr", rate, f"{OPTIM}min_lr_ratio", f"{OPTIM}lr")
    betas = conversion.flags.get(f"{OPTIM}betas")
    if betas is not None and len(betas.values) == 2 and not betas.problem:
        conversion.put("train.adam_beta1", betas.texts[0], f"{OPTIM}betas")
        conversion.put("train.adam_beta2", betas.texts[1], f"{OPTIM}betas")
    elif betas is None:
        conversion.put("train.adam_beta2", 0.999, "the default of verl for actor.optim.betas")


def _settle_correction(conversion: Conversion) -> None:
    """Set the level of a correction, which is the value of its switch there."""
    for name in ("algorithm.rollout_is", "algorithm.rollout_correction.rollout_is"):
        level = conversion.text(name)
        if level in ("token", "sequence"):
            conversion.put("algorithm.use_tis", True, name)
            conversion.put("algorithm.tis_level", level, name)
    if "algorithm.rs_level" in conversion.values:
        conversion.put("algorithm.use_rs", True, "algorithm.rollout_correction.rollout_rs")


def _settle_asynchronous(conversion: Conversion) -> None:
    """The asynchronous trainer counts rounds by its pushes of weights, and has engines on GPUs of their own."""
    sizes = ("async_training.trigger_parameter_sync_step", "async_training.require_batches")
    prompts = conversion.number(f"{ACTOR}ppo_mini_batch_size", 256)
    for name in sizes:
        prompts *= conversion.number(name, 1)
    if not conversion.is_unknown(*sizes, f"{ACTOR}ppo_mini_batch_size"):
        conversion.put("run.rollout_batch_size", prompts, *sizes, f"{ACTOR}ppo_mini_batch_size")
    conversion.take_back("rollout.over_sampling_batch_size", "prompts are drawn one by one in any case")
    if "run.async_level" in conversion.values:
        conversion.take_back("rollout.partial_rollout", "answers under way at a push of weights go on by themselves")
    total = conversion.number("rollout.total_rollout_steps", 0)
    if total and not conversion.is_unknown("rollout.total_rollout_steps"):
        conversion.put("run.num_rollout", max(1, total // prompts), "rollout.total_rollout_steps")
    if not conversion.is_unknown("rollout.nnodes", "rollout.n_gpus_per_node"):
        gpus = conversion.number("rollout.nnodes", 1) * conversion.number("rollout.n_gpus_per_node", 8)
        conversion.put("cluster.rollout_num_gpus", gpus, "rollout.nnodes", "rollout.n_gpus_per_node")


def _settle_engine(conversion: Conversion) -> None:
    values = conversion.values
    memory = f"{ROLLOUT}gpu_memory_utilization"
    if values.get("engine.backend") == "sglang":
        if "vllm.args.gpu_memory_utilization" in values:
            conversion.put("sglang.args.mem_fraction_static", values.pop("vllm.args.gpu_memory_utilization"), memory)
        for key in [key for key in values if key.startswith("vllm.args.")]:
            conversion.take_back(key, "is an argument of vLLM, and the engine is SGLang")
    if "actor_rollout_ref.hybrid_engine" not in conversion.flags:
        conversion.put("cluster.colocate", True, "verl's engines share the trainer's GPUs")
    if values.get("cluster.colocate") and not conversion.is_unknown("trainer.nnodes", "trainer.n_gpus_per_node"):
        gpus = conversion.number("trainer.nnodes", 1) * conversion.number("trainer.n_gpus_per_node", 8)
        conversion.put("cluster.rollout_num_gpus", gpus, "trainer.nnodes", "trainer.n_gpus_per_node")
    if values.get("train.backend") == "megatron":
        conversion.take_back("train.offload", "with Megatron-core it is megatron.optimizer_cpu_offload")
    elif "megatron" in " ".join(conversion.flags["launcher"].texts if "launcher" in conversion.flags else []):
        conversion.put("train.backend", "megatron", "launcher")
    elif any(key.startswith("megatron.") for key in values):
        conversion.put(
            "train.backend", "megatron", *[name for name in conversion.flags if f"{ACTOR}megatron." in name][:1]
        )


VERL = Dialect("verl", "verl", GROUPS, settle, unlisted, form="hydra")
