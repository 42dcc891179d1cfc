"""The table of TRL's arguments in YAML files, commands and Python configurations, with their settings."""

from __future__ import annotations

from slimectl.migrate.launch_scripts.conversion import Many, Row, namesakes, renamed, typed
from slimectl.migrate.launch_scripts.flags import Flag
from slimectl.migrate.launch_scripts.foreign import own_algorithm
from slimectl.migrate.launch_scripts.values import (
    KERNELS,
    LOSS,
    NOT_TRUNCATED,
    OBJECTIVE,
    OFF,
    Always,
    choice,
    integer,
    layers,
    number,
    on,
    optimizer,
    positive,
    texts,
    trackers,
)

HUB = "nothing is sent to the hub. Upload a checkpoint: `hf upload ORG/NAME runs/NAME/latest/policy`"
LOADING = "tokenizer and weights come from model.path, in train.dtype"
REPORTS = "every step is reported; records are in the run's folder"
PARALLEL = "processes are started by slimectl: cluster.actor_num_gpus_per_node and actor_num_nodes"
TOOLS = "an agent is rollout.custom_generate_function_path or a program, rollout.agent (docs/agents.md)"
REWARDS = "functions run as they are, by score.custom_rm_path or score.rm (docs/verifiers.md)"
ENTROPY = "algorithm.entropy_coef is constant"
ENDS = "training ends after run.num_rollout rounds or run.num_epoch passes"

MODEL = (
    Row("model_name_or_path model trainer.model model_name", "model.path"),
    Row("model_revision trust_remote_code attn_implementation model_init_kwargs model_init_kwargs.NAME dtype "
        "torch_dtype tokenizer_name_or_path router_aux_loss_coef pad_to_multiple_of trainer.processing_class "
        "processing_class chat_template_path chat_template cast_lm_head_to_fp32 disable_dropout device_map use_cache",
        text=LOADING),
    Row("use_peft peft_class", text="train.lora_rank switches adapters on; without it lora_r has no effect there"),
    Row("lora_r lora_rank peft_config.r", "train.lora_rank", "0 turns it off", positive),
    Row("lora_alpha peft_config.lora_alpha", "train.lora_alpha", "times the root of the rank with use_rslora", number),
    Row("lora_target_modules peft_config.target_modules", "train.lora_targets",
        "all-linear is the default here. Without it, TRL uses q_proj and v_proj",
        layers),
    Row("lora_dropout lora_bias lora_task_type lora_modules_to_save use_rslora lora_use_rslora use_dora "
        "lora_use_dora trainer.peft_config peft_config peft_config.NAME lora_inference_mode lora_target_parameters "
        "lora_random_state lora_use_gradient_checkpointing lora_max_seq_length",
        text="adapters have no dropout and no other parts"),
    Row("load_in_4bit load_in_8bit bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_compute_dtype "
        "bnb_4bit_quant_storage bnb_4bit_use_double_quant trainer.quantization_config",
        text="weights of training are not quantized"),
)  # fmt: skip
DATA = (
    Row("dataset_name datasets dataset_id_or_path dataset_path trainer.train_dataset train_dataset dataset",
        "rollout.data", convert=texts),
    Row("trainer.eval_dataset eval_dataset eval_dataset_path", "eval.data.eval"),
    Row("dataset_config dataset_configs dataset_mixer dataset_mixer.NAME dataset_train_split dataset_test_split "
        "dataset_splits dataset_num_proc dataset_text_field dataset_kwargs dataset_kwargs.NAME "
        "train_sampling_strategy pad_token streaming dataset_streaming dataset_mixture dataloader_num_workers "
        "dataloader_pin_memory remove_unused_columns dataloader_persistent_workers dataloader_prefetch_factor "
        "dataloader_drop_last ignore_data_skip",
        text="a data set of the hub is org/name/FILES in rollout.data (docs/records.md)"),
    Row("dataset_mixture.datasets", neutral=OFF, text="set rollout.data to its parts, as org/name/CONFIG@SPLIT, "
        "and rollout.data_weights to their weights"),
    *renamed("dataset_prompt_column=rollout.input_key max_prompt_length=rollout.max_prompt_len "
             "data_seed=rollout.seed"),
    Row("system_prompt", text="put the system message into the rows: a prompt is a list of messages"),
    Row("shuffle_dataset", "rollout.shuffle", "rows of sft and dpo are shuffled in any case", on, default=True),
    Row("chat_template_kwargs", "rollout.apply_chat_template_kwargs", convert=typed),
    Row("seed", "run.seed", convert=integer, default=42),
)  # fmt: skip
GENERATION = (
    *renamed("num_generations=rollout.n_samples_per_prompt num_generations_eval=eval.n_samples_per_prompt "
             "vllm_server_timeout=engine.connect_timeout_s "
             "vllm_tensor_parallel_size=cluster.rollout_num_gpus_per_engine"),
    Row("max_completion_length response_length", "rollout.max_response_len"),
    *namesakes("rollout", "temperature top_p min_p"),
    Row("top_k", "rollout.top_k", "0 and null are -1", positive),
    Row("repetition_penalty", "rollout.repetition_penalty", "only vLLM also counts the prompt here"),
    Row("generation_kwargs generation_kwargs.NAME cache_implementation use_transformers_paged "
        "use_transformers_continuous_batching transformers_continuous_batching_config vllm_guided_decoding_regex "
        "vllm_structured_outputs_regex", text="responses are sampled by the settings of [rollout] only"),
    Row("use_vllm", "engine.backend", convert=lambda flag: "vllm" if on(flag) else "auto"),
    Row("vllm_mode", "cluster.colocate", "server is engine.url; colocate there", choice(colocate=True, server=False)),
    Row("vllm_server_base_url vllm_url", "engine.url", convert=texts),
    Row("vllm_server_host vllm_server_port", "engine.url", "the two together are an address"),
    Row("vllm_gpu_memory_utilization", "vllm.args.gpu_memory_utilization", convert=typed),
    Row("vllm_max_model_length vllm_max_model_len", "rollout.max_context_len"),
    Row("vllm_group_port vllm_model_impl vllm_enable_sleep_mode vllm_device vllm_dtype vllm_enable_prefix_caching "
        "ds3_gather_for_generation max_tool_calling_iterations",
        text="engines free their memory with cluster.colocate"),
    Row("trainer.tools trainer.rollout_func trainer.environment_factory", text=f"set by hand: {TOOLS}",
        neutral=""),
)  # fmt: skip
ALGORITHM = (
    Row("configuration", "algorithm.name", "the class, the subcommand or the script names it",
        lambda flag: own_algorithm(flag.text) or flag.text),
    Row("trainer.dataset_changes", neutral=OFF, text="the program changes the rows. "
        "Save the rows that it makes as a file, and set rollout.data to that file"),
    Row("trainer.class", text="is a trainer of your own. Set what it overrides by hand", neutral=""),
    Row("beta", "algorithm.kl_loss_coef", "of dpo algorithm.beta, of rloo algorithm.kl_coef", number),
    Row("kl_coef", "algorithm.kl_coef", "of ppo"),
    Row("cliprange", "algorithm.eps_clip", "of ppo"),
    Row("cliprange_value", "algorithm.value_clip", "of ppo"),
    Row("gamma", "algorithm.gamma", "of ppo"),
    Row("lam", "algorithm.lambd", "of ppo"),
    *namesakes("algorithm", "entropy_coef label_smoothing"),
    Row("use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target", text=ENTROPY),
    Row("normalize_advantages", "algorithm.normalize_advantages", "of rloo", on),
    Row("reward_clip_range vf_coef num_mini_batches whiten_rewards missing_eos_penalty stop_token "
        "local_rollout_forward_batch_size sft_model_path num_sample_generations",
        text="has no counterpart in rloo and ppo here: clip rewards in your own function (score.custom_rm_path)"),
    Row("num_iterations num_ppo_epochs", "train.ppo_epochs"),
    Row("multi_objective_aggregation", "algorithm.name", "normalize_then_sum is gdpo"),
    Row("top_entropy_quantile", text=LOSS, neutral="1 1.0"),
    Row("off_policy_mask_threshold mtp_enabled", text=LOSS, neutral=OFF),
    Row("epsilon", "algorithm.eps_clip", default=0.2),
    Row("epsilon_high", "algorithm.eps_clip_high", "less 1 of cispo", number),
    *renamed("delta=algorithm.eps_clip_c sapo_temperature_pos=algorithm.tau_pos "
             "sapo_temperature_neg=algorithm.tau_neg vllm_importance_sampling_clip_min=algorithm.tis_clip_low"),
    Row("loss_type", "algorithm.calculate_per_token_loss",
        "dapo and bnpo are true, grpo false; dr_grpo, cispo and sapo are algorithm.name; others are refused",
        choice(dapo=True, bnpo=True, grpo=False, dr_grpo=False, cispo=True, sapo=False, sigmoid=False, nll=True,
            chunked_nll=True), default=True),
    Row("importance_sampling_level", "algorithm.name", "sequence is gspo", choice(token="grpo", sequence="gspo")),
    Row("scale_rewards", "algorithm.grpo_std_normalization",
        "group is true, none false; mean is algorithm.name = maxrl",
        choice(true=True, group=True, false=False, none=False, batch=True, mean=True), default=True),
    Row("mask_truncated_completions", "rollout.sample_filter_path", convert=Always(NOT_TRUNCATED)),
    Row("sync_ref_model ref_model_mixup_alpha", text="algorithm.ref_update_interval renews the reference"),
    Row("ref_model_sync_steps", "algorithm.ref_update_interval", "with sync_ref_model"),
    Row("vespo_k_pos vespo_k_neg "
        "vespo_lambda_pos vespo_lambda_neg f_divergence_type f_alpha_divergence_coef ld_alpha loss_weights "
        "discopop_tau use_weighting rpo_alpha center_rewards_coefficient precompute_ref_log_probs "
        "precompute_ref_batch_size average_tokens_across_devices label_smoothing_factor neftune_noise_alpha",
        text=OBJECTIVE),
    Row("use_bias_correction_kl", "algorithm.use_unbiased_kl", "true there with beta", on),
    Row("use_liger_kernel use_liger_loss", text=KERNELS),
    Row("vllm_importance_sampling_correction", "algorithm.use_tis", convert=on),
    Row("vllm_importance_sampling_cap vllm_importance_sampling_clip_max", "algorithm.tis_clip"),
    Row("vllm_importance_sampling_mode", "algorithm.tis_level", "also algorithm.tis_mode",
        lambda flag: correction_mode(flag)),
    Row("reward_funcs trainer.reward_funcs", text=REWARDS),
    Row("reward_weights", text="give weights in score.rm: [{path = 'FILE.py:NAME', weight = …}, …]"),
    Row("reward_model_name_or_path reward_model_path", "score.rm_options.path", "with score.rm_type = reward_model"),
    Row("trainer.reward_processing_classes trainer.reward_model trainer.value_model trainer.ref_model", text=LOADING),
    Row("max_length max_seq_length", "rollout.max_context_len", "rows above it are skipped here, cut there", integer),
    Row("packing packing_strategy eval_packing padding_free assistant_only_loss completion_only_loss eos_token "
        "truncation_mode", text="demonstrations are packed, and only turns of the assistant are trained on"),
)  # fmt: skip
TRAINING = (
    Row("learning_rate", "train.lr", "1e-6 there, of sft 2e-5, of reward_model 1e-4, of ppo 5e-5"),
    Row("lr_scheduler_type", "train.lr_decay_style", "constant_with_warmup is constant",
        choice("linear cosine constant", constant_with_warmup="constant", inverse_sqrt="inverse-square-root",
            warmup_stable_decay="WSD", cosine_with_min_lr="cosine"), default="linear"),
    Row("warmup_steps warmup_ratio", "train.lr_warmup_iters", "a share is times max_steps", number),
    *renamed("lr_scheduler_kwargs.min_lr=train.min_lr lr_scheduler_kwargs.num_decay_steps=train.lr_wsd_decay_iters "
             "adam_epsilon=train.adam_eps max_grad_norm=train.clip_grad"),
    Row("lr_scheduler_kwargs.min_lr_rate", "train.min_lr", "times learning_rate", number),
    Row("lr_scheduler_kwargs.decay_type", "train.lr_wsd_decay_style",
        convert=choice("linear cosine", **{"1_sqrt": "minus_sqrt"}), default="cosine"),
    Row("lr_scheduler_kwargs lr_scheduler_kwargs.NAME", text="set train.min_lr"),
    Row("full_determinism", "train.deterministic", convert=on),
    *namesakes("train", "weight_decay adam_beta1"),
    Row("adam_beta2", "train.adam_beta2", default=0.999),
    Row("optim", "train.optimizer", "8-bit variants are train.optimizer_state_dtype = int8", optimizer),
    Row("optim_args optim_args.NAME optim_target_modules", text="all matrices have one optimizer"),
    Row("per_device_train_batch_size", "train.global_batch_size", "times processes and accumulation", default=8),
    Row("gradient_accumulation_steps", "train.global_batch_size", "as above"),
    Row("steps_per_generation", "run.rollout_batch_size", "rounds of several steps: prompts of a round"),
    Row("generation_batch_size", "run.rollout_batch_size", "divided by num_generations"),
    Row("per_device_eval_batch_size eval_accumulation_steps batch_eval_metrics eval_do_concat_batches eval_delay "
        "eval_use_gather_object include_for_metrics label_names",
        text="prompts of an evaluation are sampled all at once"),
    Row("num_train_epochs", "run.num_epoch", convert=lambda flag: max(1, round(number(flag))), default=3),
    Row("max_steps", "run.num_rollout", "all steps divided by the steps of a round. Negative turns it off", positive),
    Row("bf16", "train.dtype", convert=lambda flag: "bfloat16" if on(flag) else "float32", default="bfloat16"),
    Row("fp16 tf32", text="training is in bfloat16 or float32: train.dtype"),
    Row("gradient_checkpointing", "train.gradient_checkpointing", convert=on, default=True),
    Row("gradient_checkpointing_kwargs gradient_checkpointing_kwargs.NAME torch_compile torch_compile_backend "
        "torch_compile_mode use_cpu liger_kernel_config length_column_name torch_empty_cache_steps "
        "auto_find_batch_size group_by_length activation_offloading", text=KERNELS),
    Row("num_processes nproc_per_node num_gpus", "cluster.actor_num_gpus_per_node", "divided by num_machines", integer),
    Row("num_machines nnodes", "cluster.actor_num_nodes", "of `accelerate launch` or `torchrun`", integer),
    Row("deepspeed fsdp fsdp_config ddp_timeout ddp_find_unused_parameters local_rank accelerator_config config_file "
        "main_process_port main_process_ip master_port machine_rank rdzv_backend rdzv_endpoint node_rank ddp_backend "
        "ddp_broadcast_buffers ddp_bucket_cap_mb ddp_static_graph parallelism_config standalone mixed_precision "
        "accelerate_config", text=PARALLEL),
)  # fmt: skip
RUNNING = (
    Row("output_dir", "run.dir", "its last part is run.name"),
    *renamed("run_name=run.name num_completions_to_print=track.samples wandb_entity=track.entity"),
    Row("save_steps", "run.save_interval", "in rounds here; 500 steps there", number),
    Row("save_total_limit", "run.keep_checkpoints", convert=positive),
    Row("save_strategy enable_jit_checkpoint restore_callback_states_from_checkpoint do_predict fp16_full_eval "
        "bf16_full_eval prediction_loss_only trackio_bucket_id save_safetensors save_on_each_node "
        "load_best_model_at_end metric_for_best_model greater_is_better resume_from_checkpoint overwrite_output_dir "
        "do_train do_eval", text=ENDS),
    Row("save_only_model", "train.no_save_optim", convert=on),
    Row("eval_steps", "eval.interval", "in rounds here", number),
    Row("eval_strategy evaluation_strategy", text="set eval.interval and eval.before_train"),
    Row("eval_on_start", "eval.before_train", convert=on, default=False),
    Row("report_to", "track.with", convert=trackers),
    Row("logging_steps logging_first_step logging_strategy logging_dir log_level log_completions log_level_replica "
        "logging_nan_inf_filter include_num_input_tokens_seen skip_memory_metrics debug wandb_log_unique_prompts "
        "log_multimodal log_on_each_node disable_tqdm log_unique_prompts log_completions_hub_repo", text=REPORTS),
    Row("wandb_project trackio_space_id project_name", "track.project"),
    Row("push_to_hub hub_model_id hub_strategy hub_private_repo hub_token hub_model_revision push_to_hub_revision "
        "hub_revision trackio_static_space_id callbacks benchmarks project hub_always_push", text=HUB),
    Row("env.NAME", text="export variables before `slimectl run`; ranks inherit them"),
    Row("config", text="its keys are read first, and the command's arguments override them"),
    Row("max_staleness", "run.max_staleness", "of AsyncGRPOConfig; 4 there"),
    Row("request_timeout weight_sync_timeout weight_sync_steps max_inflight_tasks queue_maxsize token_budget "
        "heartbeat_stale_after_s fork_threshold_tokens",
        text="of AsyncGRPOConfig; rounds are sampled ahead by run.async_level"),
    Row("trainer.args trainer.callbacks args", text="the configuration is read instead"),
)  # fmt: skip


def correction_mode(flag: Flag) -> Many:
    """`LEVEL_MODE`, as in sequence_mask. Raises ValueError for others."""
    level, _, mode = flag.text.partition("_")
    if level not in ("token", "sequence") or mode not in ("truncate", "mask"):
        raise ValueError(f"{flag.text} has no counterpart; algorithm.tis_level and tis_mode are its two halves")
    return Many({"algorithm.tis_level": level, "algorithm.tis_mode": mode})


GROUPS = {
    "Model": MODEL, "Data": DATA, "Generation": GENERATION, "Algorithm": ALGORITHM, "Training": TRAINING,
    "Running": RUNNING,
}  # fmt: skip
