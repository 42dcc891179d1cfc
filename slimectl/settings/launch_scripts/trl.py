"""Joins what TRL decides by several arguments together, and by its defaults, into settings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from slimectl.errors import SettingsError
from slimectl.settings.launch_scripts.conversion import Conversion, Dialect, Omission, stem, typed
from slimectl.settings.launch_scripts.foreign import algorithms_in, own_algorithm
from slimectl.settings.launch_scripts.trl_names import GROUPS, TOOLS
from slimectl.settings.launch_scripts.trl_rewards import settle_rewards

ROWS = ("sft", "dpo", "reward_model")
"""Algorithms that read rows, and sample nothing."""
GROUP_NORMALIZED = ("grpo", "dr_grpo", "gspo", "cispo", "sapo", "gmpo")
Defaults = Mapping[str, tuple[str, Any]]
SAMPLED: Defaults = {
    "learning_rate": ("train.lr", 1e-6),
    "num_generations": ("rollout.n_samples_per_prompt", 8),
    "max_completion_length": ("rollout.max_response_len", 512),
}
DEFAULTS: Mapping[str, Defaults] = {
    **dict.fromkeys(GROUP_NORMALIZED, SAMPLED),
    "rloo": {**SAMPLED, "num_generations": ("rollout.n_samples_per_prompt", 2), "beta": ("algorithm.kl_coef", 0.05)},
    "sft": {"learning_rate": ("train.lr", 2e-5), "max_length": ("rollout.max_context_len", 1024)},
    "dpo": {
        "learning_rate": ("train.lr", 1e-6),
        "beta": ("algorithm.beta", 0.1),
        "max_length": ("rollout.max_context_len", 1024),
    },
    "reward_model": {"learning_rate": ("train.lr", 1e-4), "max_length": ("rollout.max_context_len", 1024)},
    "ppo": {
        "learning_rate": ("train.lr", 5e-5),
        "kl_coef": ("algorithm.kl_coef", 0.05),
        "response_length": ("rollout.max_response_len", 53),
        "temperature": ("rollout.temperature", 0.7),
        "num_generations": ("rollout.n_samples_per_prompt", 1),
    },
}
"""Defaults of each trainer by argument: TRL 1.16.0, of ppo 0.24.0."""
ASYNCHRONOUS: Defaults = {
    "lr_scheduler_type": ("train.lr_decay_style", "constant"),
    "max_completion_length": ("rollout.max_response_len", 2048),
    "max_staleness": ("run.max_staleness", 4),
    "use_vllm": ("engine.backend", "vllm"),
    "vllm_server_base_url": ("engine.url", ["http://localhost:8000"]),
}
"""Defaults of AsyncGRPOConfig where they differ from those of GRPOConfig."""
CUT = "rows that are longer than max_length (1024 where not given) are cut there; here they are left out and counted"
LISTED: Mapping[str, Mapping[str, str]] = {
    "sft": {
        "assistant_only_loss": "every turn of a chat is trained on there; here only those of the assistant are",
        "truncation_mode": CUT,
    },
    "dpo": {"truncation_mode": CUT},
    "ppo": {"num_ppo_epochs": "every round is trained on 4 times there, and once here"},
}
"""Defaults of each trainer that settings cannot have."""
DECISIVE = {
    "trainer.class": "is a trainer of your own: set what it overrides by hand",
    **dict.fromkeys(("trainer.tools", "trainer.rollout_func", "trainer.environment_factory"), f"set by hand: {TOOLS}"),
}
"""Arguments without a row of their own that decide what is trained, and what to do."""
TELLING = {
    "grpo": "delta scale_rewards importance_sampling_level top_entropy_quantile use_bias_correction_kl entropy_coef "
    "sapo_temperature_pos sapo_temperature_neg vllm_importance_sampling_correction vllm_importance_sampling_mode "
    "vllm_importance_sampling_cap vllm_importance_sampling_clip_max off_policy_mask_threshold",
    "rloo": "reward_clip_range rloo_k",
    "sft": "packing packing_strategy assistant_only_loss completion_only_loss dataset_text_field",
    "dpo": "precompute_ref_log_probs f_divergence_type label_smoothing ld_alpha discopop_tau use_weighting rpo_alpha",
    "reward_model": "center_rewards_coefficient",
    "ppo": "num_ppo_epochs cliprange cliprange_value vf_coef",
}
"""Arguments that one trainer alone has, where neither a class nor a program names it."""
SAMPLING = {"num_generations", "reward_funcs", "max_completion_length", "reward_weights", "use_vllm"}
"""Arguments of the trainers that sample, which are GRPO and RLOO."""
LOSSES = {
    **dict.fromkeys(("grpo", "dapo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo"), "grpo"),
    **dict.fromkeys(("nll", "chunked_nll", "dft"), "sft"),
    "sigmoid": "dpo",
}
SERVED_LOSSES = ("grpo", "dapo", "bnpo", "dr_grpo", "cispo", "sapo", "nll", "chunked_nll", "sigmoid")
ADAPTERS = {"LoraConfig": (8, 8), "get_peft_model": (16, 16)}
"""Rank and alpha without arguments, of peft and of Unsloth; those of TRL's ModelConfig are 16 and 32."""


def unlisted(conversion: Conversion, flag: Any) -> None:
    """List an argument without a row; ask for the values of a table that only the program has."""
    if flag.name == "**":
        conversion.omit(flag, "is a table that the program makes; set its values by hand", by_hand=True)
        return
    conversion.omit(flag, "is no argument that this table knows; look for it by `slimectl settings explain`")


def settle(conversion: Conversion) -> None:
    """Join what TRL decides by several arguments together."""
    name, is_named = _settle_algorithm(conversion)
    _settle_loss(conversion, name)
    _settle_engine(conversion, name)
    steps = _settle_sizes(conversion, name)
    _settle_intervals(conversion, steps)
    _settle_schedule(conversion)
    _settle_adapter(conversion)
    _settle_processes(conversion)
    _settle_names(conversion)
    for argument, reason in DECISIVE.items():
        if argument in conversion.flags:
            conversion.unlist(argument)
            conversion.omit(conversion.flags[argument], reason, by_hand=True)
    defaults = {**DEFAULTS[name], **(ASYNCHRONOUS if _class(conversion) == "AsyncGRPOConfig" else {})}
    for argument, (key, value) in defaults.items():
        _default(conversion, argument, key, value)
    for argument, reason in LISTED.get(name, {}).items():
        if argument not in conversion.flags:
            conversion.omissions.append(Omission(f"the default of TRL for {argument}", "", reason))
    if name not in ROWS and (is_named or conversion.flags.keys() & SAMPLING):
        settle_rewards(conversion)
    if not is_named:
        _require_algorithm(conversion)


def _default(conversion: Conversion, argument: str, key: str, value: Any) -> None:
    """Set what TRL does without an argument, unless the argument is there."""
    row = conversion.dialect.row(argument)
    names = row.names.split() if row else [argument]
    if key not in conversion.values and not any(name in conversion.flags for name in names):
        conversion.put(key, value, f"the default of TRL for {argument}")


def _class(conversion: Conversion) -> str:
    return conversion.text("configuration").replace("Trainer", "Config")


def _settle_algorithm(conversion: Conversion) -> tuple[str, bool]:
    """Set the algorithm that a class, a subcommand, a script, or else an argument names.

    Return it, and whether it is named; if not, it is grpo.
    """
    name, source = own_algorithm(conversion.text("configuration")), "configuration"
    if _class(conversion) == "GMPOConfig":
        name = "gmpo"
    if not name:
        served, absent = algorithms_in(stem(conversion.text("launcher")))
        names = {own_algorithm(word) for word in served}
        name, source = (names.pop() if len(names) == 1 and not absent else ""), "launcher"
    argument = ""
    if not name:
        name, argument = _told(conversion)
    if name == "dapo":  # a script of that name may train by any loss_type
        name = ""
    if name and not (argument and name == "grpo"):
        conversion.put("algorithm.name", name, argument or source)
    if _class(conversion) == "AsyncGRPOConfig":
        conversion.put("run.async_level", 1, "AsyncGRPOConfig samples while it trains")
    return ("grpo" if name in ("", "gspo") else name), bool(name)


def _told(conversion: Conversion) -> tuple[str, str]:
    """The algorithm that arguments of one trainer alone tell, and the argument; empty if there is none, or several."""
    sources = {
        name: argument for name, row in TELLING.items() for argument in row.split() if argument in conversion.flags
    }
    if loss := LOSSES.get(conversion.text("loss_type")):
        sources.setdefault(loss, "loss_type")
    return next(iter(sources.items())) if len(sources) == 1 else ("", "")


def _require_algorithm(conversion: Conversion) -> None:
    """Ask for the algorithm before all else where the file does not name it."""
    place = str(next(iter(conversion.flags.values())).place) if conversion.flags else ""
    is_sampled = conversion.flags.keys() & SAMPLING
    candidates = "grpo (as written here) or rloo" if is_sampled else "sft, dpo, reward_model, grpo or rloo"
    reason = f"neither a class nor a program in this file names it: set it by hand, {candidates}"
    conversion.omissions.insert(0, Omission("algorithm.name", place, reason, by_hand=True))


def _settle_loss(conversion: Conversion, name: str) -> None:
    """Reduction, clipping, normalization and divergence of the loss."""
    values, losses = conversion.values, conversion.flags["loss_type"].texts if "loss_type" in conversion.flags else []
    loss = ", ".join(losses)
    if loss and loss not in SERVED_LOSSES:
        raise SettingsError(
            f"{conversion.flags['loss_type'].place}: loss_type {loss} has no counterpart. Give one of "
            f"{', '.join(SERVED_LOSSES)}, or your own by train.custom_loss_function_path"
        )
    if name in (*ROWS, "rloo", "ppo"):
        values.pop("algorithm.calculate_per_token_loss", None)
        conversion.settled |= {"algorithm.calculate_per_token_loss", "algorithm.grpo_std_normalization"}
    _settle_divergence(conversion, name)
    if name != "grpo":
        if name == "gmpo":
            values.pop("algorithm.calculate_per_token_loss", None)
            conversion.settled |= {"algorithm.eps_clip", "algorithm.calculate_per_token_loss"}
        return
    _settle_scale(conversion)
    if loss in ("dr_grpo", "cispo", "sapo"):
        conversion.put("algorithm.name", loss, "loss_type")
        values.pop("algorithm.calculate_per_token_loss", None)
    if loss == "dr_grpo":
        conversion.put("algorithm.fixed_length", conversion.number("max_completion_length", 512), "loss_type")
    if loss == "cispo":
        _settle_cispo(conversion)
    elif conversion.text("importance_sampling_level") == "sequence":
        conversion.put("algorithm.name", "gspo", "importance_sampling_level")
    elif "importance_sampling_level" in conversion.flags:
        conversion.put("algorithm.name", values.get("algorithm.name", "grpo"), "importance_sampling_level")
    if values.get("algorithm.name") == "gspo" and "epsilon_high" not in conversion.flags:
        epsilon = conversion.real("epsilon", 0.2)
        conversion.put(
            "algorithm.eps_clip_high", epsilon, "epsilon" if "epsilon" in conversion.flags else "epsilon_high"
        )


def _settle_scale(conversion: Conversion) -> None:
    """Divisors of advantages other than the group's standard deviation."""
    scale = conversion.text("scale_rewards")
    if scale == "mean":
        conversion.values.pop("algorithm.grpo_std_normalization", None)
        conversion.settled.add("algorithm.grpo_std_normalization")
        conversion.put("algorithm.name", "maxrl", "scale_rewards")
    elif scale == "batch":
        reason = "divides by the deviation of the batch there, and of the group here; set algorithm.name by hand"
        conversion.omit(conversion.flags["scale_rewards"], reason, by_hand=True)


def _settle_cispo(conversion: Conversion) -> None:
    """CISPO there bounds the ratio itself by epsilon_high, and not from below."""
    bound = conversion.real("epsilon_high", conversion.real("epsilon", 0.2))
    conversion.values.pop("algorithm.eps_clip_high", None)
    conversion.put("algorithm.eps_clip", 1.0, "CISPO there has no lower bound")
    if bound > 1:
        conversion.put("algorithm.eps_clip_high", bound - 1, "epsilon_high")
        return
    place = str(conversion.flags["loss_type"].place)
    reason = f"the ratio is bounded by {bound:g} there, below 1; set epsilon_high less 1 by hand"
    conversion.omissions.append(Omission("algorithm.eps_clip_high", place, reason, by_hand=True))


def _settle_divergence(conversion: Conversion, name: str) -> None:
    """`beta` is in the loss of grpo, in the reward of rloo, and the strength of the reference of dpo."""
    key = {"dpo": "algorithm.beta", "rloo": "algorithm.kl_coef"}.get(name)
    if key and "algorithm.kl_loss_coef" in conversion.values:
        conversion.put(key, conversion.values.pop("algorithm.kl_loss_coef"), "beta")
    if conversion.switch("sync_ref_model"):
        _default(conversion, "ref_model_sync_steps", "algorithm.ref_update_interval", 512)
    else:
        conversion.take_back("algorithm.ref_update_interval", "has no effect there without sync_ref_model")
    if name not in GROUP_NORMALIZED or not conversion.real("beta", 0.0):
        conversion.values.pop("algorithm.use_unbiased_kl", None)
    elif name != "gmpo":
        _default(conversion, "use_bias_correction_kl", "algorithm.use_unbiased_kl", True)


def _settle_engine(conversion: Conversion, name: str) -> None:
    """Engines of vLLM on the trainer's GPUs or elsewhere, and the correction for their probabilities."""
    if name in ROWS:
        conversion.settled |= {"rollout.shuffle", "engine.dtype"}
        if conversion.text("train_sampling_strategy") != "sequential":
            conversion.put("rollout.shuffle", True, "TRL shuffles rows in every epoch")
        return
    has_address = any(name.startswith(("vllm_server_", "vllm_url")) for name in conversion.flags)
    uses_vllm = conversion.switch("use_vllm") or _class(conversion) == "AsyncGRPOConfig"
    if not uses_vllm:
        for key in ("engine.url", "cluster.colocate", "vllm.args.gpu_memory_utilization"):
            conversion.take_back(key, "use_vllm is off")
        for key in [key for key in conversion.values if key.startswith(("algorithm.tis_", "algorithm.use_tis"))]:
            conversion.take_back(key, "use_vllm is off")
    elif _class(conversion) == "AsyncGRPOConfig":
        pass  # its servers are a default
    elif conversion.text("vllm_mode", "server" if has_address else "colocate") == "colocate":
        conversion.put("cluster.colocate", True, "vllm_mode", "use_vllm")
        gpus = conversion.number("num_processes", conversion.number("nproc_per_node", 0))
        if gpus:
            conversion.put("cluster.rollout_num_gpus", gpus, "num_processes", "nproc_per_node")
        _default(conversion, "vllm_gpu_memory_utilization", "vllm.args.gpu_memory_utilization", 0.3)
    elif not conversion.flags.keys() & {"vllm_server_base_url", "vllm_url"}:
        host = conversion.text("vllm_server_host", "127.0.0.1").replace("0.0.0.0", "127.0.0.1")
        port = conversion.text("vllm_server_port", "8000")
        conversion.put("engine.url", [f"http://{host}:{port}"], "use_vllm", "vllm_server_host", "vllm_server_port")
    if uses_vllm and name in GROUP_NORMALIZED and _class(conversion) != "AsyncGRPOConfig":
        _settle_correction(conversion)


def _settle_correction(conversion: Conversion) -> None:
    """With vLLM, TRL corrects for its probabilities unless it is told not to."""
    switch = "vllm_importance_sampling_correction"
    if switch in conversion.flags and not conversion.switch(switch):
        return
    for key, value in (("use_tis", True), ("tis_level", "sequence"), ("tis_mode", "mask"), ("tis_clip", 3.0)):
        if f"algorithm.{key}" not in conversion.values:
            conversion.put(f"algorithm.{key}", value, "the default of TRL with use_vllm")
    has_lower = conversion.real("vllm_importance_sampling_clip_min", 0.0) > 0
    if conversion.values["algorithm.tis_mode"] == "truncate" and has_lower:
        conversion.put("algorithm.tis_mode", "clip", "vllm_importance_sampling_mode")


def _settle_sizes(conversion: Conversion, name: str) -> int:
    """Set samples of a step: processes x per_device_train_batch_size x gradient_accumulation_steps there.

    Return the number of steps of a round.
    """
    sizes = ("per_device_train_batch_size", "gradient_accumulation_steps")
    names: list[str] = [size for size in sizes if size in conversion.flags]
    device = conversion.number("per_device_train_batch_size", 8)
    accumulation = conversion.number("gradient_accumulation_steps", 1)
    processes = next((item for item in ("num_processes", "nproc_per_node") if item in conversion.flags), None)
    ranks = conversion.number(processes, 1) if processes else 1
    if processes == "nproc_per_node":
        ranks *= conversion.number("nnodes", 1)
    samples = device * accumulation * ranks
    source = [*names, *([processes] if processes else [])] or ["the default of TRL for per_device_train_batch_size"]
    conversion.put("train.global_batch_size", samples, *source)
    if not processes and names:
        reason = f"is multiplied by the processes, which this file does not tell; {samples} is that of one process"
        conversion.omit(conversion.flags[names[0]], f"{reason}: set train.global_batch_size by hand", by_hand=True)
    if name in ROWS:
        conversion.take_back("run.rollout_batch_size", f"rows are read, not sampled, by {name}")
        return 1
    group = conversion.number("num_generations", DEFAULTS[name]["num_generations"][1])
    batch = conversion.number("generation_batch_size", 0)
    batch = batch or device * ranks * conversion.number("steps_per_generation", accumulation)
    sized = ("generation_batch_size", "steps_per_generation", "num_generations")
    if batch % group == 0:
        conversion.put("run.rollout_batch_size", batch // group, *source, *(i for i in sized if i in conversion.flags))
    else:
        conversion.take_back("run.rollout_batch_size", f"{batch} samples of a round are no multiple of {group}")
    return max(1, batch // samples)


def _settle_intervals(conversion: Conversion, steps: int) -> None:
    """Steps of TRL as rounds, which have `steps` of them."""
    rounds = conversion.number("max_steps", -1)
    if rounds > 0:
        conversion.put("run.num_rollout", max(1, rounds // steps), "max_steps")
        conversion.take_back("run.num_epoch", "max_steps goes before it")
    for argument, key in (("save_steps", "run.save_interval"), ("eval_steps", "eval.interval")):
        interval = conversion.real(argument, 500.0 if argument == "save_steps" else 0.0)
        name = "save_strategy" if argument == "save_steps" else "eval_strategy"
        default = "steps" if argument == "save_steps" else conversion.text("evaluation_strategy", "no")
        strategy = conversion.text(name, default)
        conversion.values.pop(key, None)
        if argument == "eval_steps" and strategy == "steps" and not interval:
            interval = conversion.real("logging_steps", 10.0)
        if conversion.is_unknown(argument) or strategy in ("no", "none", "false"):
            continue
        if strategy == "epoch" or 0 < interval < 1:
            shown = argument if argument in conversion.flags else argument.replace("steps", "strategy")
            conversion.omit(conversion.flags[shown], f"is in parts of an epoch there; set {key} by hand", by_hand=True)
        elif interval >= 1:
            source = argument if argument in conversion.flags else f"the default of TRL for {argument}"
            conversion.put(key, max(1, int(interval) // steps), source)
    held_out = [key for key in conversion.values if key.startswith("eval.data.")]
    strategies = (conversion.text("eval_strategy"), conversion.text("evaluation_strategy"))
    if "eval.interval" not in conversion.values and "epoch" not in strategies:
        for key in held_out:
            conversion.take_back(key, "is not evaluated on there, as eval_strategy is no")
    elif held_out and conversion.flags.keys() & SAMPLING:
        group = conversion.values.get("rollout.n_samples_per_prompt", 8)
        _default(conversion, "num_generations_eval", "eval.n_samples_per_prompt", int(group))
    if "save_total_limit" not in conversion.flags:
        conversion.put("run.keep_checkpoints", None, "the default of TRL for save_total_limit")


def _settle_schedule(conversion: Conversion) -> None:
    """Warm-up and final learning rate, which may be shares there."""
    share, total = conversion.values.pop("train.lr_warmup_iters", None), conversion.number("max_steps", -1)
    argument = "warmup_ratio" if conversion.real("warmup_ratio", 0.0) else "warmup_steps"
    share = conversion.converted(argument) if share is not None else None
    if share is not None and share >= 1:
        conversion.put("train.lr_warmup_iters", int(share), argument)
    elif share and total > 0:
        conversion.put("train.lr_warmup_iters", math.ceil(share * total), argument, "max_steps")
    elif share:
        reason = "is a share of all steps, which this file does not tell; set train.lr_warmup_iters by hand"
        conversion.omit(conversion.flags[argument], reason, by_hand=True)
    rate = conversion.converted("lr_scheduler_kwargs.min_lr_rate")
    if rate is not None:
        peak = conversion.real("learning_rate", 1e-6)
        conversion.put("train.min_lr", rate * peak, "lr_scheduler_kwargs.min_lr_rate")


def _settle_adapter(conversion: Conversion) -> None:
    """LoRA of peft: only with use_peft, with its defaults, and its scale under use_rslora."""
    values = conversion.values
    of_table = any(name.startswith("peft_config.") for name in conversion.flags)
    if not (conversion.switch("use_peft") or of_table or "lora_rank" in conversion.flags):
        for key in [key for key in values if key.startswith("train.lora_")]:
            conversion.take_back(key, "has no effect there without use_peft")
        return
    if conversion.is_unknown("lora_r", "peft_config.r", "lora_rank"):
        return
    rank, alpha = ADAPTERS.get(conversion.text("peft_class"), (8, 8) if of_table else (16, 32))
    values.setdefault("train.lora_rank", rank)
    conversion.put("train.lora_rank", int(values["train.lora_rank"]), "lora_r", "lora_rank", "peft_config.r")
    scale = float(values.get("train.lora_alpha", alpha))
    names = ["lora_alpha", "peft_config.lora_alpha"]
    for scaled in ("use_rslora", "lora_use_rslora"):
        if conversion.switch(scaled):
            scale *= math.sqrt(values["train.lora_rank"])
            names.append(scaled)
            conversion.unlist(scaled)
    conversion.put("train.lora_alpha", scale, *names)
    if "peft_class" not in conversion.flags and not of_table and "lora_dropout" not in conversion.flags:
        reason = "adapters have a dropout of 0.05 there, and none here"
        conversion.omissions.append(Omission("the default of TRL for lora_dropout", "", reason))
    for name in ("use_peft", "peft_class"):
        if name in conversion.flags:
            conversion.unlist(name)
    all_linear = conversion.text("peft_class") == "get_peft_model"
    if "train.lora_targets" not in values and not all_linear:
        _default(conversion, "lora_target_modules", "train.lora_targets", ["q_proj", "v_proj"])


def _settle_processes(conversion: Conversion) -> None:
    """Machines and precision."""
    machines = max(conversion.number("num_machines", 1), conversion.number("nnodes", 1))
    if machines > 1:
        conversion.put("cluster.executor", "ray", "num_machines", "nnodes")
        if "num_processes" in conversion.flags and not conversion.is_unknown("num_processes", "num_machines"):
            gpus = conversion.number("num_processes", machines) // machines  # those of all machines there
            conversion.put("cluster.actor_num_gpus_per_node", max(1, gpus), "num_processes", "num_machines")
    names = ("dtype", "torch_dtype", "model_init_kwargs.dtype", "model_init_kwargs.torch_dtype")
    dtype = next((conversion.text(name) for name in names if conversion.text(name)), "")
    if conversion.values.get("train.dtype") == "float32" and dtype.endswith("bfloat16"):
        conversion.put("train.dtype", "bfloat16", "dtype", "torch_dtype", "bf16")
    if conversion.values.get("train.dtype", "bfloat16") == "bfloat16" and "engine.dtype" not in conversion.settled:
        conversion.put("engine.dtype", "bfloat16", "answers are sampled in the precision of training")


def _settle_names(conversion: Conversion) -> None:
    """The run's folder, its data set's configuration, and arguments of the chat template."""
    values = conversion.values
    if isinstance(values.get("run.dir"), str):
        folder, _, name = str(values["run.dir"]).rstrip("/").rpartition("/")
        conversion.put("run.dir", folder or ".", "output_dir")
        if "run.name" not in values:
            conversion.put("run.name", name, "output_dir")
    config, data = conversion.text("dataset_config", conversion.text("dataset_configs")), values.get("rollout.data")
    if config and isinstance(data, list) and len(data) == 1 and data[0].count("/") == 1:
        if config not in ("default", "none", "None"):
            names = ("dataset_name", "trainer.train_dataset", "dataset_config", "dataset_configs")
            conversion.put("rollout.data", [f"{data[0]}/{config}"], *(n for n in names if n in conversion.flags))
        for name in conversion.flags.keys() & {"dataset_config", "dataset_configs"}:
            conversion.unlist(name)
    if isinstance(values.get("rollout.apply_chat_template_kwargs"), list | str):
        conversion.take_back("rollout.apply_chat_template_kwargs", "write it as a table by hand")
    for name in [key for key in conversion.flags if key.startswith("chat_template_kwargs.")]:
        flag = conversion.flags[name]
        conversion.put(f"rollout.apply_chat_template_kwargs.{name.partition('.')[2]}", typed(flag), name)
        conversion.unlist(name)


TRL = Dialect("trl", "TRL", GROUPS, settle, unlisted, negation="no_", programs=r"^(grpo|rloo|sft|dpo|reward|ppo)$")
