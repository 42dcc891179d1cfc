"""TRL's arguments, as its YAML files, commands and Python configurations have them, and their settings."""

from __future__ import annotations

from slimectl.settings.launch_scripts.conversion import Conversion, Dialect, Many, Row, stem, typed
from slimectl.settings.launch_scripts.flags import Flag
from slimectl.settings.launch_scripts.values import (
    choice,
    integer,
    number,
    on,
    positive,
    share,
    texts,
    trackers,
    warmup,
)

HUB = "nothing is sent to the hub; a checkpoint is a Hugging Face directory that `hf upload` takes"
LOADING = "the tokenizer and the weights are those of model.path, in train.dtype"
REPORTS = "every step is reported; records are in the run's folder"
PARALLEL = "processes are started by slimectl: cluster.actor_num_gpus_per_node and actor_num_nodes"
KERNELS = "kernels are chosen by the trainer; packs have no padding"
TOOLS = "an agent is rollout.custom_generate_function_path or a program, rollout.agent (docs/agents.md)"
REWARDS = (
    "TRL's functions run as they are: score.custom_rm_path = FILE.py:NAME, or score.rm for several (docs/verifiers.md)"
)
ENDS = "training ends after run.num_rollout rounds or run.num_epoch passes"

MODEL = (
    Row("model_name_or_path model trainer.model model_name", "model.path"),
    Row(
        "dtype torch_dtype",
        "train.dtype",
        convert=choice(bfloat16="bfloat16", float32="float32", auto="bfloat16", **{"torch.bfloat16": "bfloat16"}),
    ),
    Row(
        "model_revision trust_remote_code attn_implementation model_init_kwargs tokenizer_name_or_path "
        "trainer.processing_class processing_class chat_template_path chat_template cast_lm_head_to_fp32 "
        "disable_dropout device_map use_cache",
        text=LOADING,
    ),
    Row("use_peft", text="train.lora_rank switches adapters on"),
    Row("lora_r lora_rank", "train.lora_rank", "0 is none", positive),
    Row("lora_alpha", "train.lora_alpha"),
    Row("lora_target_modules", "train.lora_targets", convert=texts),
    Row(
        "lora_dropout lora_bias lora_task_type lora_modules_to_save use_rslora use_dora"
        " trainer.peft_config peft_config "
        "lora_inference_mode",
        text="adapters have no dropout and no other parts",
    ),
    Row(
        "load_in_4bit load_in_8bit bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_compute_dtype",
        text="weights of training are not quantized",
    ),
)
DATA = (
    Row(
        "dataset_name datasets dataset_id_or_path dataset_path trainer.train_dataset train_dataset dataset",
        "rollout.data",
        convert=texts,
    ),
    Row("trainer.eval_dataset eval_dataset eval_dataset_path", "eval.data.eval"),
    Row(
        "dataset_config dataset_train_split dataset_test_split dataset_splits dataset_num_proc dataset_text_field "
        "dataset_streaming dataset_mixture dataloader_num_workers dataloader_pin_memory remove_unused_columns "
        "dataloader_persistent_workers dataloader_prefetch_factor dataloader_drop_last ignore_data_skip",
        text="a data set of the hub is org/name/FILES in rollout.data (docs/records.md)",
    ),
    Row("dataset_prompt_column", "rollout.input_key"),
    Row("system_prompt", text="put the system message into the rows: a prompt is a list of messages"),
    Row("shuffle_dataset", "rollout.shuffle", convert=on, default=True),
    Row("max_prompt_length", "rollout.max_prompt_len"),
    Row("chat_template_kwargs", "rollout.apply_chat_template_kwargs", convert=typed),
    Row("seed", "run.seed", default=42),
    Row("data_seed", "rollout.seed"),
)
GENERATION = (
    Row("num_generations", "rollout.n_samples_per_prompt"),
    Row("num_generations_eval", "eval.n_samples_per_prompt"),
    Row("max_completion_length response_length", "rollout.max_response_len"),
    Row("temperature", "rollout.temperature"),
    Row("top_p", "rollout.top_p"),
    Row("top_k", "rollout.top_k", "0 and null are -1", positive),
    Row("min_p", "rollout.min_p"),
    Row("repetition_penalty", "rollout.repetition_penalty", "only vLLM also counts the prompt here"),
    Row(
        "generation_kwargs cache_implementation use_transformers_paged "
        "vllm_guided_decoding_regex vllm_structured_outputs_regex",
        text="answers are sampled from the policy as it is, or its gradient would be another policy's",
    ),
    Row("use_vllm", "engine.backend", convert=lambda flag: "vllm" if on(flag) else "embedded"),
    Row("vllm_mode", "cluster.colocate", "server is engine.url", choice(colocate=True, server=False)),
    Row("vllm_server_base_url vllm_url", "engine.url", convert=texts),
    Row("vllm_server_host vllm_server_port", "engine.url", "the two together are an address"),
    Row("vllm_server_timeout", "engine.connect_timeout_s"),
    Row("vllm_gpu_memory_utilization", "vllm.args.gpu_memory_utilization", convert=typed),
    Row("vllm_max_model_length vllm_max_model_len", "rollout.max_context_len"),
    Row("vllm_tensor_parallel_size", "cluster.rollout_num_gpus_per_engine"),
    Row(
        "vllm_group_port vllm_model_impl vllm_enable_sleep_mode vllm_device vllm_dtype vllm_enable_prefix_caching "
        "ds3_gather_for_generation max_tool_calling_iterations",
        text="engines free their memory with cluster.colocate",
    ),
    Row("trainer.tools trainer.rollout_func trainer.environment_factory", text=TOOLS),
)
ALGORITHM = (
    Row(
        "configuration",
        "algorithm.name",
        "the class names it",
        choice(
            GRPOConfig="grpo",
            grpoconfig="grpo",
            rlooconfig="rloo",
            sftconfig="sft",
            dpoconfig="dpo",
            ppoconfig="ppo",
            rewardconfig="reward_model",
        ),
    ),
    Row("beta", "algorithm.kl_loss_coef", "the divergence in the loss; algorithm.beta of dpo"),
    Row("num_iterations", text="a sample is trained on once; train.num_steps_per_rollout divides a round"),
    Row("epsilon", "algorithm.eps_clip", default=0.2),
    Row("epsilon_high", "algorithm.eps_clip_high"),
    Row("delta", "algorithm.eps_clip_c"),
    Row("sapo_temperature_pos", "algorithm.tau_pos"),
    Row("sapo_temperature_neg", "algorithm.tau_neg"),
    Row(
        "loss_type",
        "algorithm.calculate_per_token_loss",
        "dapo and bnpo are true, grpo false; dr_grpo, cispo and sapo are algorithm.name",
        choice(
            dapo=True,
            bnpo=True,
            grpo=False,
            dr_grpo=False,
            cispo=True,
            sapo=False,
            luspo=False,
            sigmoid=False,
            nll=False,
        ),
        default=True,
    ),
    Row("importance_sampling_level", "algorithm.name", "sequence is gspo", choice(token="grpo", sequence="gspo")),
    Row(
        "scale_rewards",
        "algorithm.grpo_std_normalization",
        "group is true, none false",
        choice(true=True, group=True, false=False, none=False),
    ),
    Row("mask_truncated_completions", text="set rollout.sample_filter_path to a function that removes them"),
    Row("sync_ref_model ref_model_mixup_alpha", text="algorithm.ref_update_interval renews the reference"),
    Row("ref_model_sync_steps", "algorithm.ref_update_interval", "with sync_ref_model"),
    Row(
        "top_entropy_quantile off_policy_mask_threshold use_bias_correction_kl multi_objective_aggregation",
        text="the loss is one of docs/algorithms.md; train.custom_loss_function_path is one of yours",
    ),
    Row("use_liger_kernel use_liger_loss", text=KERNELS),
    Row("vllm_importance_sampling_correction", "algorithm.use_tis", convert=on),
    Row("vllm_importance_sampling_cap vllm_importance_sampling_clip_max", "algorithm.tis_clip"),
    Row("vllm_importance_sampling_clip_min", "algorithm.tis_clip_low"),
    Row(
        "vllm_importance_sampling_mode",
        "algorithm.tis_level",
        "its first half; the second is algorithm.tis_mode",
        lambda flag: correction_mode(flag),
    ),
    Row("label_smoothing", "algorithm.label_smoothing"),
    Row("reward_funcs trainer.reward_funcs", text=REWARDS),
    Row("reward_weights", text="give weights in score.rm: [{path = 'FILE.py:NAME', weight = …}, …]"),
    Row(
        "reward_model_name_or_path reward_model_path trainer.reward_processing_classes",
        text="a reward model is score.rm_type = reward_model with its directory in score.rm_options",
    ),
    Row(
        "max_length packing padding_free assistant_only_loss completion_only_loss eos_token",
        text="demonstrations are packed, and masks follow from the chat template",
    ),
)
TRAINING = (
    Row("learning_rate", "train.lr", default=1e-6),
    Row(
        "lr_scheduler_type",
        "train.lr_decay_style",
        "constant_with_warmup is constant",
        choice(
            linear="linear",
            cosine="cosine",
            constant="constant",
            constant_with_warmup="constant",
            cosine_with_min_lr="cosine",
            inverse_sqrt="inverse-square-root",
            warmup_stable_decay="WSD",
        ),
        default="linear",
    ),
    Row("warmup_steps", "train.lr_warmup_iters", "a number below 1 is train.lr_warmup_fraction", warmup),
    Row("warmup_ratio", "train.lr_warmup_fraction", convert=share),
    Row("lr_scheduler_kwargs.num_decay_steps", "train.lr_wsd_decay_iters"),
    Row(
        "lr_scheduler_kwargs.decay_type",
        "train.lr_wsd_decay_style",
        convert=choice(linear="linear", cosine="cosine", **{"1_sqrt": "minus_sqrt"}),
        default="cosine",
    ),
    Row("lr_scheduler_kwargs.min_lr", "train.min_lr"),
    Row(
        "lr_scheduler_kwargs lr_scheduler_kwargs.min_lr_rate lr_scheduler_kwargs.min_lr_ratio",
        text="set train.min_lr, lr_wsd_decay_iters and lr_wsd_decay_style",
    ),
    Row("weight_decay", "train.weight_decay"),
    Row("adam_beta1", "train.adam_beta1"),
    Row("adam_beta2", "train.adam_beta2", default=0.999),
    Row("adam_epsilon", "train.adam_eps"),
    Row("max_grad_norm", "train.clip_grad"),
    Row("optim optim_args", text="the optimizer is AdamW"),
    Row(
        "per_device_train_batch_size",
        "train.global_batch_size",
        "times processes and accumulation, as samples of a step",
        default=8,
    ),
    Row("gradient_accumulation_steps", "train.global_batch_size", "as above"),
    Row("steps_per_generation", "run.rollout_batch_size", "rounds of several steps: prompts of a round"),
    Row("generation_batch_size", "run.rollout_batch_size", "divided by num_generations"),
    Row("per_device_eval_batch_size eval_accumulation_steps", text="prompts of an evaluation are sampled all at once"),
    Row("num_train_epochs", "run.num_epoch", convert=lambda flag: max(1, round(number(flag))), default=3),
    Row("max_steps", "run.num_rollout", "steps divided by those of a round; negative is none", positive),
    Row("bf16", "train.dtype", convert=lambda flag: "bfloat16" if on(flag) else "float32", default="bfloat16"),
    Row("fp16 tf32", text="training is in bfloat16 or float32: train.dtype"),
    Row("gradient_checkpointing", "train.gradient_checkpointing", convert=on),
    Row(
        "gradient_checkpointing_kwargs gradient_checkpointing_kwargs.use_reentrant torch_compile "
        "torch_empty_cache_steps auto_find_batch_size group_by_length full_determinism activation_offloading",
        text=KERNELS,
    ),
    Row(
        "num_processes nproc_per_node num_gpus",
        "cluster.actor_num_gpus_per_node",
        "of `accelerate launch`, divided by num_machines, or `torchrun`",
        convert=integer,
    ),
    Row("num_machines nnodes", "cluster.actor_num_nodes", "of `accelerate launch` or `torchrun`", integer),
    Row(
        "deepspeed fsdp fsdp_config ddp_timeout ddp_find_unused_parameters local_rank accelerator_config config_file "
        "main_process_port main_process_ip master_port machine_rank rdzv_backend rdzv_endpoint node_rank "
        "ddp_backend standalone mixed_precision accelerate_config",
        text=PARALLEL,
    ),
)
RUNNING = (
    Row("output_dir", "run.dir", "its last part is run.name"),
    Row("run_name", "run.name"),
    Row("save_steps", "run.save_interval", convert=lambda flag: positive(flag)),
    Row("save_total_limit", "run.keep_checkpoints", convert=positive),
    Row(
        "save_strategy save_only_model save_safetensors save_on_each_node load_best_model_at_end metric_for_best_model "
        "greater_is_better resume_from_checkpoint overwrite_output_dir do_train do_eval",
        text=ENDS,
    ),
    Row("eval_steps", "eval.interval", convert=positive),
    Row("eval_strategy evaluation_strategy", text="eval.interval and eval.before_train say when"),
    Row("eval_on_start", "eval.before_train", convert=on, default=False),
    Row("report_to", "track.with", convert=trackers),
    Row(
        "logging_steps logging_first_step logging_strategy logging_dir log_level log_completions "
        "wandb_log_unique_prompts disable_tqdm log_unique_prompts log_completions_hub_repo",
        text=REPORTS,
    ),
    Row("num_completions_to_print", "track.samples"),
    Row("wandb_project trackio_space_id project_name", "track.project"),
    Row("wandb_entity", "track.entity"),
    Row(
        "push_to_hub hub_model_id hub_strategy hub_private_repo hub_token hub_model_revision push_to_hub_revision "
        "callbacks benchmarks project hub_always_push",
        text=HUB,
    ),
    Row("env.NAME", text="export variables before `slimectl run`; ranks inherit them"),
    Row("config", text="its keys are read before those of the command"),
    Row("max_staleness", "run.max_staleness"),
    Row("trainer.args trainer.callbacks args", text="the configuration is read beside it"),
)
GROUPS = {
    "Model": MODEL, "Data": DATA, "Generation": GENERATION, "Algorithm": ALGORITHM, "Training": TRAINING,
    "Running": RUNNING,
}  # fmt: skip


def correction_mode(flag: Flag) -> Many:
    """`LEVEL_MODE`, as in sequence_mask. Raises ValueError for others."""
    level, _, mode = flag.text.partition("_")
    if level not in ("token", "sequence") or mode not in ("truncate", "mask"):
        raise ValueError(f"{flag.text} has no counterpart; algorithm.tis_level and tis_mode are its two halves")
    return Many({"algorithm.tis_level": level, "algorithm.tis_mode": mode})


COMMANDS = {"grpo": "grpo", "rloo": "rloo", "sft": "sft", "dpo": "dpo", "reward": "reward_model", "ppo": "ppo"}
"""Subcommands of `trl`, and the scripts of the same names."""
ABSENT = {
    **dict.fromkeys(("kto", "bco"), "trains on answers that are good or bad by themselves; dpo takes pairs of them"),
    **dict.fromkeys(("orpo", "cpo"), "trains on pairs without a reference; dpo is the nearest"),
    **dict.fromkeys(("gkd", "minillm"), "distils from a teacher; opd is the nearest, with algorithm.opd_teacher_load"),
    **dict.fromkeys(
        ("online_dpo", "onlinedpo", "xpo", "nash_md", "nashmd"), "trains on pairs that it samples; grpo is the nearest"
    ),
    "prm": "trains a model that rewards single steps; reward_model rewards whole answers",
}
"""Commands without a counterpart, and their purpose."""


def unlisted(conversion: Conversion, flag: Flag) -> None:
    """List an argument without a row."""
    conversion.omit(flag, "is no argument that this table knows; look for it by `slimectl settings explain`")


def _settle_inverse_square_root(conversion: Conversion) -> None:
    """Drop this schedule without a warm-up: transformers then falls with the root of 10,000 steps."""
    has_warmup = any(conversion.values.get(f"train.lr_warmup_{kind}") for kind in ("iters", "fraction"))
    if conversion.values.get("train.lr_decay_style") == "inverse-square-root" and not has_warmup:
        conversion.take_back(
            "train.lr_decay_style", "falls slowly there without a warm-up. Set train.lr_decay_style and a warm-up"
        )


def settle(conversion: Conversion) -> None:
    """Join what TRL decides by several arguments together."""
    values = conversion.values
    _settle_algorithm(conversion)
    _settle_sizes(conversion)
    _settle_inverse_square_root(conversion)
    if conversion.switch("use_vllm"):
        if conversion.text("vllm_mode", "server") == "colocate":
            conversion.put("cluster.colocate", True, "use_vllm", "vllm_mode")
            gpus = conversion.number("num_processes", conversion.number("nproc_per_node", 0))
            if gpus:
                conversion.put("cluster.rollout_num_gpus", gpus, "num_processes", "vllm_mode")
        elif not conversion.flags.keys() & {"vllm_server_base_url", "vllm_url"}:
            host = conversion.text("vllm_server_host", "127.0.0.1").replace("0.0.0.0", "127.0.0.1")
            port = conversion.text("vllm_server_port", "8000")
            conversion.put("engine.url", [f"http://{host}:{port}"], "use_vllm", "vllm_server_host", "vllm_server_port")
        if values.get("algorithm.name", "grpo") in ("grpo", "dr_grpo", "gspo", "cispo", "sapo"):
            _settle_correction(conversion)
    else:
        conversion.take_back("engine.url", "use_vllm is off")
        conversion.take_back("cluster.colocate", "use_vllm is off")
    machines = max(conversion.number("num_machines", 1), conversion.number("nnodes", 1))
    if machines > 1:
        conversion.put("cluster.executor", "ray", "num_machines", "nnodes")
        if "num_processes" in conversion.flags and not conversion.is_unknown("num_processes", "num_machines"):
            gpus = conversion.number("num_processes", machines) // machines  # those of all machines there
            conversion.put("cluster.actor_num_gpus_per_node", max(1, gpus), "num_processes", "num_machines")
    if values.get("train.dtype", "bfloat16") == "bfloat16":
        conversion.put("engine.dtype", "bfloat16", "answers are sampled in the precision of training")
    if isinstance(values.get("run.dir"), str):
        folder, _, name = str(values["run.dir"]).rstrip("/").rpartition("/")
        conversion.put("run.dir", folder or ".", "output_dir")
        if "run.name" not in values:
            conversion.put("run.name", name, "output_dir")
    if isinstance(values.get("rollout.apply_chat_template_kwargs"), list):
        conversion.take_back("rollout.apply_chat_template_kwargs", "write it as a table by hand")
    for name in [key for key in conversion.flags if key.startswith("chat_template_kwargs.")]:
        conversion.put(
            f"rollout.apply_chat_template_kwargs.{name.partition('.')[2]}", typed(conversion.flags[name]), name
        )
        conversion.omissions = [item for item in conversion.omissions if item.flag != str(conversion.flags[name])]


def _settle_correction(conversion: Conversion) -> None:
    """With vLLM, TRL corrects for its probabilities unless it is told not to."""
    source = "the default of TRL with use_vllm"
    name = "vllm_importance_sampling_correction"
    if name in conversion.flags and not conversion.switch(name):
        return
    for key, value in (("use_tis", True), ("tis_level", "sequence"), ("tis_mode", "mask"), ("tis_clip", 3.0)):
        if f"algorithm.{key}" not in conversion.values:
            conversion.put(f"algorithm.{key}", value, source)


def _settle_algorithm(conversion: Conversion) -> None:
    values, text = conversion.values, conversion.text
    script = stem(text("launcher"))
    if script in COMMANDS and "configuration" not in conversion.flags:
        conversion.put("algorithm.name", COMMANDS[script], "launcher")
    name, loss = values.get("algorithm.name", "grpo"), text("loss_type")
    if loss in ("dr_grpo", "cispo", "sapo"):
        conversion.put("algorithm.name", loss, "loss_type")
        values.pop("algorithm.calculate_per_token_loss", None)
        if loss == "dr_grpo":
            conversion.put("algorithm.fixed_length", conversion.number("max_completion_length", 256), "loss_type")
    if text("importance_sampling_level") == "sequence":
        conversion.put("algorithm.name", "gspo", "importance_sampling_level")
    elif "importance_sampling_level" in conversion.flags and loss not in ("dr_grpo", "cispo", "sapo"):
        conversion.put("algorithm.name", name if name != "gspo" else "grpo", "importance_sampling_level")
    if "beta" in conversion.flags and "algorithm.kl_loss_coef" in values:
        key = {"dpo": "algorithm.beta", "rloo": "algorithm.kl_coef"}.get(str(name))
        if key is not None:
            conversion.put(key, values.pop("algorithm.kl_loss_coef"), "beta")


def _settle_sizes(conversion: Conversion) -> None:
    """Steps have processes x per_device_train_batch_size x gradient_accumulation_steps samples there."""
    values = conversion.values
    sizes: tuple[str, ...] = ("per_device_train_batch_size", "gradient_accumulation_steps")
    names = [name for name in sizes if name in conversion.flags]
    device = conversion.number("per_device_train_batch_size", 8)
    accumulation = conversion.number("gradient_accumulation_steps", 1)
    processes = next((name for name in ("num_processes", "nproc_per_node") if name in conversion.flags), None)
    ranks = conversion.number(processes, 1) if processes else 1
    if conversion.text("num_machines") == "" and processes == "nproc_per_node":
        ranks *= conversion.number("nnodes", 1)
    samples = device * accumulation * ranks
    source = [*names, *([processes] if processes else [])] or ["the default of TRL for per_device_train_batch_size"]
    conversion.put("train.global_batch_size", samples, *source)
    group = conversion.number("num_generations", 8)
    steps = conversion.number("steps_per_generation", accumulation)
    batch = conversion.number("generation_batch_size", device * ranks * steps)
    if values.get("algorithm.name", "grpo") in ("sft", "dpo", "reward_model"):
        conversion.take_back("run.rollout_batch_size", f"rows are read, not sampled, by {values['algorithm.name']}")
        return
    used = [
        name
        for name in ("generation_batch_size", "steps_per_generation", "num_generations")
        if name in conversion.flags
    ]
    if batch % group == 0:
        conversion.put("run.rollout_batch_size", batch // group, *source, *used)
    else:
        conversion.take_back("run.rollout_batch_size", f"{batch} samples of a round are no multiple of {group}")
    if not processes and names:
        name = names[0]
        reason = f"is multiplied by the processes, which this file does not tell; {samples} is that of one process"
        conversion.omit(conversion.flags[name], f"{reason}: set train.global_batch_size by hand", by_hand=True)
    rounds = conversion.number("max_steps", -1)
    if rounds > 0:
        per_round = max(1, batch // samples)
        conversion.put("run.num_rollout", max(1, rounds // per_round), "max_steps")
        conversion.take_back("run.num_epoch", "max_steps goes before it")


TRL = Dialect(
    "trl", "TRL", GROUPS, settle, unlisted, negation="no_", programs=rf"^({'|'.join(COMMANDS)})$", absent=ABSENT
)
