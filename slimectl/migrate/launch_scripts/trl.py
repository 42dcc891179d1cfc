"""Sets what depends on several of TRL's arguments together, and on its defaults."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from slimectl.migrate.launch_scripts.conversion import ROWS, Conversion, Dialect, Omission, omit_unlisted, typed
from slimectl.migrate.launch_scripts.trl_algorithms import (
    GROUP_NORMALIZED,
    SAMPLING,
    class_of,
    require_algorithm,
    settle_algorithm,
    settle_loss,
    settle_rewards,
)
from slimectl.migrate.launch_scripts.trl_names import GROUPS

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
    "dpo": {"learning_rate": ("train.lr", 1e-6), "max_length": ("rollout.max_context_len", 1024),
            "beta": ("algorithm.beta", 0.1)},
    "reward_model": {"learning_rate": ("train.lr", 1e-4), "max_length": ("rollout.max_context_len", 1024)},
    "ppo": {"learning_rate": ("train.lr", 5e-5), "kl_coef": ("algorithm.kl_coef", 0.05),
            "response_length": ("rollout.max_response_len", 53), "temperature": ("rollout.temperature", 0.7),
            "num_generations": ("rollout.n_samples_per_prompt", 1), "num_ppo_epochs": ("train.ppo_epochs", 4)},
}  # fmt: skip
"""Defaults of each trainer by argument: TRL 1.16.0, for ppo 0.24.0."""
ASYNCHRONOUS: Defaults = {
    "lr_scheduler_type": ("train.lr_decay_style", "constant"),
    "max_completion_length": ("rollout.max_response_len", 2048),
    "max_staleness": ("run.max_staleness", 4),
    "use_vllm": ("engine.backend", "vllm"),
    "vllm_server_base_url": ("engine.url", ["http://localhost:8000"]),
}
"""Defaults of AsyncGRPOConfig that differ from GRPOConfig's."""
CUT = "TRL truncates rows that are longer than max_length. slimectl skips and counts them"
LISTED: Mapping[str, Mapping[str, str]] = {
    "sft": {
        "assistant_only_loss": "TRL trains on every turn of a chat. slimectl trains on the turns of the assistant only",
        "truncation_mode": CUT,
    },
    "dpo": {"truncation_mode": CUT},
}
"""Defaults of each trainer that settings cannot express."""
ADAPTERS = {"LoraConfig": (8, 8), "get_peft_model": (16, 16)}
"""Default rank and alpha of peft and of Unsloth. TRL's ModelConfig has 16 and 32."""


def unlisted(conversion: Conversion, flag: Any) -> None:
    """List an argument without a row. Ask for the values of a table that only the program has."""
    if flag.name == "**":
        conversion.omit(flag, "is a table that the program makes. Set its values by hand", by_hand=True)
        return
    omit_unlisted(conversion, flag)


def settle(conversion: Conversion) -> None:
    """Set what depends on several of TRL's arguments together."""
    name, is_named = settle_algorithm(conversion)
    settle_loss(conversion, name)
    _settle_engine(conversion, name)
    steps = _settle_sizes(conversion, name)
    _settle_intervals(conversion, steps)
    _settle_schedule(conversion)
    _settle_adapter(conversion)
    _settle_processes(conversion)
    _settle_names(conversion)
    defaults = {**DEFAULTS[name], **(ASYNCHRONOUS if class_of(conversion) == "AsyncGRPOConfig" else {})}
    for argument, (key, value) in defaults.items():
        conversion.put_default(argument, key, value)
    for argument, reason in LISTED.get(name, {}).items():
        if argument not in conversion.flags:
            conversion.note_default(argument, None, reason)
    if name not in ROWS and (is_named or conversion.flags.keys() & SAMPLING):
        settle_rewards(conversion)
    if conversion.text("multi_objective_aggregation") == "normalize_then_sum":
        conversion.put("algorithm.name", "gdpo", "multi_objective_aggregation")
    if not is_named:
        require_algorithm(conversion)


def _settle_engine(conversion: Conversion, name: str) -> None:
    """Engines of vLLM on the trainer's GPUs or elsewhere, and the mismatch correction."""
    if name in ROWS:
        conversion.settled |= {"rollout.shuffle", "engine.dtype"}
        if conversion.text("train_sampling_strategy") != "sequential":
            conversion.put("rollout.shuffle", True, "TRL shuffles rows in every epoch")
        return
    has_address = any(name.startswith(("vllm_server_", "vllm_url")) for name in conversion.flags)
    uses_vllm = conversion.switch("use_vllm") or class_of(conversion) == "AsyncGRPOConfig"
    if not uses_vllm:
        for key in ("engine.url", "cluster.colocate", "vllm.args.gpu_memory_utilization"):
            conversion.take_back(key, "use_vllm is off")
        for key in [key for key in conversion.values if key.startswith(("algorithm.tis_", "algorithm.use_tis"))]:
            conversion.take_back(key, "use_vllm is off")
    elif class_of(conversion) == "AsyncGRPOConfig":
        pass  # its servers are a default
    elif conversion.text("vllm_mode", "server" if has_address else "colocate") == "colocate":
        conversion.put("cluster.colocate", True, "vllm_mode", "use_vllm")
        if gpus := conversion.number("num_processes", conversion.number("nproc_per_node", 0)):
            conversion.put("cluster.rollout_num_gpus", gpus, "num_processes", "nproc_per_node")
        conversion.put_default("vllm_gpu_memory_utilization", "vllm.args.gpu_memory_utilization", 0.3)
    elif not conversion.flags.keys() & {"vllm_server_base_url", "vllm_url"}:
        host = conversion.text("vllm_server_host", "127.0.0.1").replace("0.0.0.0", "127.0.0.1")
        port = conversion.text("vllm_server_port", "8000")
        conversion.put("engine.url", [f"http://{host}:{port}"], "use_vllm", "vllm_server_host", "vllm_server_port")
    if uses_vllm and name in GROUP_NORMALIZED and class_of(conversion) != "AsyncGRPOConfig":
        _settle_correction(conversion)


def _settle_correction(conversion: Conversion) -> None:
    """With vLLM, TRL applies the mismatch correction by default."""
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
    """Set samples of a step: processes x per_device_train_batch_size x gradient_accumulation_steps in TRL.

    Return the number of steps of a round.
    """
    sizes = ("per_device_train_batch_size", "gradient_accumulation_steps")
    names = [size for size in sizes if size in conversion.flags]
    device = conversion.number("per_device_train_batch_size", 8)
    accumulation = conversion.number("gradient_accumulation_steps", 1)
    processes = next((item for item in ("num_processes", "nproc_per_node") if item in conversion.flags), None)
    ranks = conversion.number(processes, 1) if processes else 1
    if processes == "nproc_per_node":
        ranks *= conversion.number("nnodes", 1)
    samples = device * accumulation * ranks
    source = [*names, *([processes] if processes else [])] or [sizes[0]]
    conversion.put("train.global_batch_size", samples, *source)
    if not processes and names:
        reason = f"is multiplied by the number of processes, which is not in this file. {samples} is for one process"
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
        reason = (
            f"{batch} samples per round are not a multiple of {group} responses. Set run.rollout_batch_size by hand"
        )
        place = str(conversion.flags["num_generations"].place) if "num_generations" in conversion.flags else ""
        conversion.omissions.append(Omission("num_generations", place, reason, by_hand=True))
    return max(1, batch // samples)


def _settle_intervals(conversion: Conversion, steps: int) -> None:
    """Convert TRL's steps to rounds of `steps` steps."""
    rounds = conversion.number("max_steps", -1)
    if rounds > 0:
        conversion.put("run.num_rollout", max(1, rounds // steps), "max_steps")
        conversion.take_back("run.num_epoch", "max_steps overrides it")
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
            conversion.omit(conversion.flags[shown], f"is in parts of an epoch there. Set {key} by hand", by_hand=True)
        elif interval >= 1:
            conversion.put(key, max(1, int(interval) // steps), argument)
    held_out = [key for key in conversion.values if key.startswith("eval.data.")]
    strategies = (conversion.text("eval_strategy"), conversion.text("evaluation_strategy"))
    if "eval.interval" not in conversion.values and "epoch" not in strategies:
        for key in held_out:
            conversion.take_back(key, "is not used for evaluation there, as eval_strategy is no")
    elif held_out and conversion.flags.keys() & SAMPLING:
        group = conversion.values.get("rollout.n_samples_per_prompt", 8)
        conversion.put_default("num_generations_eval", "eval.n_samples_per_prompt", int(group))
    if "save_total_limit" not in conversion.flags:
        conversion.put("run.keep_checkpoints", None, "the default of TRL for save_total_limit")


def _settle_schedule(conversion: Conversion) -> None:
    """Warm-up and final learning rate, which may be fractions in TRL."""
    share = conversion.values.pop("train.lr_warmup_iters", None)
    argument = "warmup_ratio" if conversion.real("warmup_ratio", 0.0) else "warmup_steps"
    share = conversion.converted(argument) if share is not None else None
    if share is not None and share >= 1:
        conversion.put("train.lr_warmup_iters", int(share), argument)
    elif share:
        conversion.put("train.lr_warmup_fraction", share, argument)
    elif conversion.values.get("train.lr_decay_style") == "inverse-square-root":
        conversion.take_back(
            "train.lr_decay_style", "falls slowly there without a warm-up. Set train.lr_decay_style and a warm-up"
        )
    rate = conversion.converted("lr_scheduler_kwargs.min_lr_rate")
    if rate is not None:
        peak = conversion.real("learning_rate", 1e-6)
        conversion.put("train.min_lr", rate * peak, "lr_scheduler_kwargs.min_lr_rate")


RANKS = ("lora_r", "lora_rank", "peft_config.r")
"""Arguments that give the rank of adapters."""


def _settle_adapter(conversion: Conversion) -> None:
    """LoRA of peft: only with use_peft, with its defaults, and its scale under use_rslora."""
    values = conversion.values
    of_table = any(name.startswith("peft_config.") for name in conversion.flags)
    has_no_rank = any(conversion.number(name, 1) <= 0 for name in RANKS)
    if has_no_rank or not (conversion.switch("use_peft") or of_table or "lora_rank" in conversion.flags):
        reason = "a rank of 0 means no adapter" if has_no_rank else "has no effect there without use_peft"
        for key in [key for key in values if key.startswith("train.lora_")]:
            conversion.take_back(key, reason)
        return
    if conversion.is_unknown(*RANKS):
        return
    rank, alpha = ADAPTERS.get(conversion.text("peft_class"), (8, 8) if of_table else (16, 32))
    values.setdefault("train.lora_rank", rank)
    conversion.put("train.lora_rank", int(values["train.lora_rank"]), *RANKS)
    scale = float(values.get("train.lora_alpha", alpha))
    names = ["lora_alpha", "peft_config.lora_alpha"]
    for scaled in ("use_rslora", "lora_use_rslora"):
        if conversion.switch(scaled):
            scale *= math.sqrt(values["train.lora_rank"])
            names.append(scaled)
            conversion.unlist(scaled)
    conversion.put("train.lora_alpha", scale, *names)
    if "peft_class" not in conversion.flags and not of_table and "lora_dropout" not in conversion.flags:
        conversion.note_default("lora_dropout", None, "TRL's adapters have a dropout of 0.05. slimectl has none")
    conversion.unlist("use_peft", "peft_class")
    all_linear = conversion.text("peft_class") == "get_peft_model"
    if "train.lora_targets" not in values and not all_linear:
        conversion.put_default("lora_target_modules", "train.lora_targets", ["q_proj", "v_proj"])


def _settle_processes(conversion: Conversion) -> None:
    """Machines and precision."""
    machines = max(conversion.number("num_machines", 1), conversion.number("nnodes", 1))
    if machines > 1 and "num_processes" in conversion.flags:
        gpus = max(1, conversion.number("num_processes", machines) // machines)  # TRL counts GPUs of all machines
        conversion.put_known("cluster.actor_num_gpus_per_node", gpus, "num_processes", "num_machines")
    names = ("dtype", "torch_dtype", "model_init_kwargs.dtype", "model_init_kwargs.torch_dtype")
    dtype = next((conversion.text(name) for name in names if conversion.text(name)), "")
    if conversion.values.get("train.dtype") == "float32" and dtype.endswith("bfloat16"):
        conversion.put("train.dtype", "bfloat16", "dtype", "torch_dtype", "bf16")
    if conversion.values.get("train.dtype", "bfloat16") == "bfloat16" and "engine.dtype" not in conversion.settled:
        conversion.put("engine.dtype", "bfloat16", "responses are sampled in the precision of training")


def _settle_names(conversion: Conversion) -> None:
    """The run's folder, its data set's configuration, and arguments of the chat template."""
    values = conversion.values
    conversion.name_run("output_dir")
    if values.get("algorithm.name") in ROWS:
        conversion.put_default("output_dir", "run.name", "trainer_output")
    config, data = conversion.text("dataset_config", conversion.text("dataset_configs")), values.get("rollout.data")
    if config and isinstance(data, list) and len(data) == 1 and data[0].count("/") == 1:
        if config not in ("default", "none", "None"):
            names = ("dataset_name", "trainer.train_dataset", "dataset_config", "dataset_configs")
            conversion.put("rollout.data", [f"{data[0]}/{config}"], *(n for n in names if n in conversion.flags))
        conversion.unlist("dataset_config", "dataset_configs")
    if isinstance(values.get("rollout.apply_chat_template_kwargs"), list | str):
        conversion.take_back("rollout.apply_chat_template_kwargs", "write it as a table by hand")
    for name in [key for key in conversion.flags if key.startswith("chat_template_kwargs.")]:
        flag = conversion.flags[name]
        conversion.put(f"rollout.apply_chat_template_kwargs.{name.partition('.')[2]}", typed(flag), name)
        conversion.unlist(name)


TRL = Dialect("trl", "TRL", GROUPS, settle, unlisted, negation="no_", programs=r"^[a-z_]+$")
