"""The table of ROLL's YAML keys, with the setting for each."""

from __future__ import annotations

import re
from dataclasses import replace

from slimectl.migrate.launch_scripts.conversion import Row, namesakes, renamed
from slimectl.migrate.launch_scripts.flags import Flag
from slimectl.migrate.launch_scripts.values import (
    FILTERED,
    KERNELS,
    LOSS,
    OBJECTIVE,
    OFF,
    REWARD,
    Always,
    ahead,
    choice,
    integer,
    layers,
    named_datasets,
    off,
    on,
    positive,
    share,
    texts,
    trackers,
    weights,
)
from slimectl.migrate.launch_scripts.verl_keys import SIZES, prefixed

TRAIN, INFER = "actor_train.", "actor_infer."
LAYOUT = "the reference and rewards have no GPUs of their own; verifiers run in worker processes"
REPORTS = "records are in the run's folder, and every step is reported"
OWN_ENVIRONMENT = "rollout.env has its own prompts and rewards: python:FILE.py:CLASS is yours (docs/environments.md)"
MIXED = "the loss is one of docs/algorithms.md, without a second term. topr leaves out or weighs negative responses"
REWARDS = "set score.rm_type to a verifier (docs/verifiers.md): math, code, ifeval, judge, …"

RUNNING = (
    *renamed("exp_name=run.name output_dir=run.dir num_gpus_per_node=cluster.num_gpus_per_node "
             "num_nodes=cluster.actor_num_nodes"),
    Row("seed", "run.seed", default=42),
    Row("max_steps", "run.num_rollout", convert=positive, default=500),
    Row("save_steps", "run.save_interval", convert=positive, default=50),
    Row("eval_steps", "eval.interval", convert=positive, default=10),
    Row("max_ckpt_to_keep", "run.keep_checkpoints", "0 is all", lambda flag: integer(flag) or None),
    Row("track_with", "track.with", "tensorboard there without it, only stdout here", trackers),
    Row("trackio_max_traces_per_step", text="traces are not sent; track.samples sends samples of evaluations"),
    Row("model_update_buffer_size_mb", "sync.update_weight_buffer_size", "in MiB here, too", integer, default=1024),
    Row("defaults", text="the files lie elsewhere: allow their folder by --root DIR"),
    Row("logging_dir logging_steps profiler_output_dir rollout_dump_dir render_save_dir system_envs.NCCL_DEBUG "
        "profiler_timeline resume_from_checkpoint rpc_timeout max_running_requests generate_opt_level model_name "
        "track_name checkpoint_config.NAME hydra.NAME profiler.NAME num_env_workers base_dir local_rank "
        "length_profiler_dir profiler_memory report_length_and_rewards save_logging_board_dir", text=REPORTS),
    Row("is_offload_states", "cluster.offload_train", "with cluster.colocate", on),
    Row("is_offload_optimizer_states_in_train_step", "train.offload", "true is optimizer", Always("optimizer")),
    Row("model_download_type", text="names of models are of Hugging Face's hub; others are folders"),
    Row("rollout_mock.NAME", text="run.keep_samples keeps samples, and `slimectl train SAMPLES` trains on them"),
    Row("router_args.NAME", text="engine.router is the policy of the router"),
)  # fmt: skip
ROLLOUT = (
    Row("rollout_batch_size", "run.rollout_batch_size", "with environments episodes, by group_size", default=128),
    Row("prompt_length", "rollout.max_prompt_len", default=1024),
    Row("response_length", "rollout.max_response_len", "sequence_length less prompt_length without it"),
    *renamed("sequence_length=rollout.max_context_len train_batch_size=train.global_batch_size "
             "prompt_key=rollout.input_key response_key=rollout.label_key "
             "validation.generating_args.num_return_sequences=eval.n_samples_per_prompt "
             "validation.generating_args.max_new_tokens=eval.max_response_len"),
    Row("num_return_sequences_in_group", "rollout.n_samples_per_prompt", default=1),
    Row("system_key query_key", text="put the text of the column into messages (docs/records.md)"),
    Row("chosen_key rejected_key", text="rows of preferences have prompt, chosen and rejected (docs/records.md)"),
    Row("global_template validation.data_args.NAME", text="the chat template is the model's"),
    Row("validation.eval_steps", text="eval_steps is eval.interval"),
    Row("is_num_return_sequences_expand val_batch_size", text="requests are sent one by one to the engines"),
    Row("async_generation_ratio", "run.async_level", "rounds, rounded up. 0 turns it off", ahead),
    Row("use_additional_prompts dynamic_sampling_cfg", text="rollout.dynamic_sampling_filter_path replaces groups"),
    Row("is_use_additional_prompts", text="rollout.over_sampling_batch_size starts more prompts than a round needs"),
    Row("max_additional_running_prompts", "rollout.over_sampling_batch_size", "added to rollout_batch_size"),
    Row("val_greedy", "eval.temperature", "true is 0", Always(0.0)),
    Row("val_n_sample", "eval.n_samples_per_prompt"),
    Row("val_prompt_length", text="rollout.max_prompt_len limits every prompt"),
    Row("val_sequence_length", text="rollout.max_context_len limits every conversation"),
    Row("user_defined_rollout_loop_cls", text="set rollout.function_path to your own function"),
    Row("vlm_filter.NAME", text="longer prompts than rollout.max_prompt_len are skipped and counted"),
    Row("dataset_filter.NAME", text="slice or filter the file of rollout.data", neutral=""),
    Row("pretrain actor_train.model_args.model_name_or_path", "model.path"),
    Row("critic.model_args.model_name_or_path reward_pretrain", "algorithm.critic_load"),
    Row("critic.training_args.learning_rate", "algorithm.critic_lr", default=5e-5),
    Row(f"{INFER}generating_args.max_new_tokens", "rollout.max_response_len"),
    Row(f"{INFER}generating_args.top_p", "rollout.top_p", default=0.7),
    Row(f"{INFER}generating_args.top_k", "rollout.top_k", default=50),
    Row(f"{INFER}generating_args.temperature", "rollout.temperature", default=0.95),
    *(Row(f"{role}.generating_args.{name}", f"{section}.{name}", text)
      for role, section in (("actor_infer", "rollout"), ("validation", "eval"))
      for name, text in (("repetition_penalty", "only vLLM also counts the prompt"), ("presence_penalty", ""),
                         ("frequency_penalty", ""))),
    Row(f"{INFER}generating_args.num_return_sequences", "rollout.n_samples_per_prompt"),
    Row(f"{INFER}generating_args.num_beams {INFER}generating_args.do_sample validation.generating_args.num_beams",
        text="responses are sampled"),
    Row(f"{INFER}generating_args.stop_strings", "rollout.stop", convert=texts),
    Row(f"{INFER}generating_args.include_stop_str_in_output", text="a response has what its engine returns"),
    Row(f"{INFER}generating_args.NAME", text="responses are sampled from the policy as it is"),
    Row("max_tokens_per_step", "rollout.env_turn_tokens", "with rollout.env"),
    Row("max_actions_per_traj", "rollout.env_max_turns", "with rollout.env"),
    Row("train_env_manager.group_size", "rollout.n_samples_per_prompt", "episodes of one start"),
    Row("train_env_manager.num_env_groups", "rollout.env_concurrency", "times group_size, with rollout.env"),
    Row("custom_envs.NAME custom_env.NAME", text=OWN_ENVIRONMENT),
    Row("val_env_manager.NAME train_env_manager.NAME", text="rollout.env_concurrency episodes are played at a time"),
    Row("env_manager_cls agent_config_common.NAME env_config.NAME agent_system_template agent_template "
        "single_prompt_agent_system_template single_prompt_agent_template all_response_pattern action_pattern "
        "think_action_pattern sokoban_format_penalty frozen_format_penalty format_penalty default_history_length",
        text=OWN_ENVIRONMENT),
    Row(f"{INFER}strategy_args.strategy_name", "engine.backend",
        convert=choice("vllm sglang", hf_infer="transformers")),
    Row(prefixed(INFER, "num_gpus_per_worker strategy_args.strategy_config.tensor_parallel_size "
                 "strategy_args.strategy_config.tp_size"), "cluster.rollout_num_gpus_per_engine"),
    Row(prefixed(f"{INFER}strategy_args.strategy_config.", "load_format sleep_level"),
        text="engines load model.path"),
    Row(f"{INFER}device_mapping", "cluster.rollout_num_gpus", "the number of devices", lambda flag: len(devices(flag))),
    Row(f"{INFER}model_args.dtype {INFER}model_args.torch_dtype", "engine.dtype",
        convert=choice(bf16="bfloat16", fp32="float32", fp16="float16"), default="bfloat16"),
    Row(f"{INFER}worker_cls {TRAIN}worker_cls", text="an agent or a reward of yours is a hook (docs/hooks.md)"),
    Row(prefixed(INFER, "infer_batch_size use_sequence_packing data_args.template name model_args.NAME"),
        text="engines form batches"),
    Row("validation.data_args.file_name", "eval.data", "each file becomes a table, called after it", named_datasets),
    Row("validation.generating_args.top_p", "eval.top_p", default=0.7),
    Row("validation.generating_args.top_k", "eval.top_k", default=50),
    Row("validation.generating_args.temperature", "eval.temperature", default=0.95),
)  # fmt: skip
ALGORITHM = (
    Row("adv_estimator", "algorithm.name", "gae is ppo",
        choice("grpo rloo gspo gigpo step_reinforce", gae="ppo", reinforce="reinforce_plus_plus",
               agentic_reinforce="step_reinforce")),
    Row("pg_variant actor_train.pg_variant", "algorithm.name",
        "tis is cispo with bounds of its own", choice("gspo cispo topr", vanilla="grpo", ppo="grpo", tis="cispo")),
    Row("use_topr_loss", "algorithm.name", "true is topr", Always("topr")),
    *renamed("actor_train.topr_positive_weight=algorithm.topr_positive_weight "
             "actor_train.topr_negative_weight=algorithm.topr_negative_weight"),
    *namesakes("algorithm", "gamma lambd kl_loss_coef"),
    Row("pg_clip", "algorithm.eps_clip", default=0.2),
    Row("pg_clip_low", "algorithm.eps_clip", "with use_pg_clip_range"),
    Row("pg_clip_high", "algorithm.eps_clip_high", "with use_pg_clip_range; pg_clip without it"),
    Row("value_clip", "algorithm.value_clip", "no bound there without it"),
    Row("dual_clip_loss", "algorithm.eps_clip_c", "true is 1 + 2 pg_clip", lambda flag: 1.4 if on(flag) else None),
    Row("loss_agg_mode", "algorithm.calculate_per_token_loss", "token-mean is true, seq-mean-token-mean false",
        choice(token_mean=True, seq_mean_token_mean=False, seq_mean_token_sum=False, seq_mean_token_sum_norm=False),
        default=False),
    Row("whiten_advantages", "algorithm.normalize_advantages", convert=on),
    Row("use_kl_loss", "algorithm.kl_loss_coef", "a coefficient above 0 switches it on"),
    Row("add_token_level_kl", "algorithm.kl_coef", "a coefficient above 0 switches it on"),
    *renamed("init_kl_coef=algorithm.kl_coef entropy_loss_coef=algorithm.entropy_coef "
             "critic_warmup=algorithm.num_critic_only_steps"),
    Row("actor_train.cispo_epsilon_low cispo_epsilon_low", "algorithm.eps_clip", "with cispo; 0.1 without it"),
    Row("actor_train.cispo_epsilon_high cispo_epsilon_high", "algorithm.eps_clip_high", "with cispo; 0.1 without it"),
    Row("actor_train.tis_lower_bound tis_lower_bound", "algorithm.eps_clip", "with tis, which is cispo: 1 less this"),
    Row("actor_train.tis_upper_bound tis_upper_bound", "algorithm.eps_clip_high", "with tis: this less 1"),
    Row("actor_train.cispo_use_unified_mask cispo_use_unified_mask", text=LOSS, neutral=OFF),
    Row("actor_train.kimi15_beta kimi15_beta actor_train.kimi15_tau kimi15_tau", text="kimi15 has no counterpart here"),
    Row("importance_sampling", "algorithm.name", "seq is gspo", choice(seq="gspo", token=None)),
    Row("train_infer_correction.is_weight.enabled", "algorithm.use_tis", convert=on),
    Row("train_infer_correction.is_weight.weight_type", "algorithm.tis_level"),
    Row("train_infer_correction.is_weight.upper_bound", "algorithm.tis_clip", "1.2 without it"),
    Row("train_infer_correction.filters", "algorithm.use_rs", "the first filter of the ratio, with its bounds"),
    *namesakes("algorithm", "advantage_clip reward_clip step_reward_weight episode_reward_weight "
               "difficulty_low_threshold difficulty_high_threshold error_max_len_threshold"),
    Row("difficulty_loss_weight length_loss_weight ipo", text=LOSS, neutral=OFF),
    *namesakes("algorithm", "max_len_mask difficulty_mask", on),
    Row("error_max_len_clip", "algorithm.error_max_len_threshold", "with error_max_len_threshold", Always(None)),
    *namesakes("algorithm", "norm_mean_type norm_std_type"),
    Row("reward_norm", "algorithm.norm_mean_type", "and norm_std_type", choice("group batch running")),
    Row("reward_shift reward_scale", text="with reward_norm, only the mean or only the deviation", neutral=OFF),
    Row("reward_normalization.grouping reward_normalization.norm_mean_type", "algorithm.norm_mean_type",
        "traj_group_id is group, batch is batch", choice("batch group running", traj_group_id="group")),
    Row("reward_normalization.method reward_normalization.norm_std_type", "algorithm.norm_std_type",
        "mean_std has both, mean only the mean, identity is off", choice("batch group running", mean_std="group")),
    Row("step_reward_gamma", "algorithm.turn_gamma", "0.95 without it"),
    Row("whiten_rewards", text=REWARD, neutral=OFF),
    Row("query_filter_config.type", text=FILTERED, neutral="no_filter"),
    Row("postive_loss_coef use_topr_neg_loss_coef", text=MIXED, neutral=OFF),
    Row("rl_loss_coef", text=MIXED, neutral="1 1.0"),
    Row("use_policy_loss_type", text="with one step a round both are the same. The ratio is clipped", neutral="ppo"),
    Row("kl_penalty", text="the penalty in the reward is k1, the difference of log-probabilities", neutral="kl"),
    Row("target_kl", text="coefficients of divergences are constant", neutral=OFF),
    Row("kl_horizon", text="it matters with target_kl only"),
    Row("batch_adjust_mode", text="a step may have any number of rows"),
    Row("enable_old_logprobs_recompute force_disable_old_logprobs_recompute",
        text="old log-probabilities are recomputed. algorithm.use_rollout_logprobs takes the engine's"),
    Row("ratio_type", text="algorithm.name = gspo takes the ratio of a whole response", neutral="token"),
    Row("l2 use_reward_scaling use_reward_norm add_len_reward", text=REWARD, neutral=OFF),
    Row("mask_type", text="masks leave responses out of the loss, not out of the baseline", neutral="loss"),
    Row("balance_length minibatch_data_iter_num", text="train.balance_data divides rows by their length"),
    Row("use_pg_clip_range reward_normalization.NAME loss_agg_mode_NAME query_filter_config.NAME rlvr_option.NAME",
        text=OBJECTIVE),
    Row("beta", "algorithm.beta", "of dpo"),
    Row("label_smoothing", "algorithm.label_smoothing", "of dpo"),
    Row("teacher.model_args.model_name_or_path", "algorithm.opd_teacher_load", "with student_train"),
    Row("teacher.opd_kl_coef opd_kl_coef", "algorithm.opd_kl_coef"),
    Row("is_pure_opd use_opd", text="with a teacher only, algorithm.name is opd. Else algorithm.opd_kl_coef adds it"),
    Row("opsd_mode", "algorithm.opd_self_teacher", "true is start; another teacher is opd_teacher_load",
        Always("start")),
    Row("opsd_solution_key", "algorithm.opd_teacher_template", "the prompt and this column; solution without it"),
    Row("opsd_max_solution_length", text="the teacher reads the whole solution"),
    Row("teacher.NAME distill_loss_weight distill_on_prompt logits_topk teacher_temperature student_temperature "
        "kd_objective adaptive_kl_alpha kd_temperature skew_lambda logits_transfer_backend question_key answer_key",
        text="the teacher is scored with the trainer's own parallelism (docs/guides/distillation.md)"),
    Row("enable_reference", text="there is a reference where a coefficient of divergence is above 0"),
    Row("ppo_epochs", "train.ppo_epochs"),
)  # fmt: skip
TRAINING = (
    Row(f"{TRAIN}training_args.learning_rate", "train.lr", default=5e-5),
    *namesakes("train", "weight_decay adam_beta1", flag=f"{TRAIN}training_args."),
    *renamed("training_args.warmup_steps=train.lr_warmup_iters model_update_frequency=sync.update_weights_interval "
             "model_args.lora_alpha=train.lora_alpha max_tokens_per_microbatch_in_train=train.max_tokens_per_gpu "
             "data_args.prompt=rollout.input_key data_args.messages=rollout.input_key", flag=TRAIN),
    Row(f"{TRAIN}training_args.lr_scheduler_type", "train.lr_decay_style",
        convert=choice("constant linear cosine", constant_with_warmup="constant"), default="linear"),
    Row(f"{TRAIN}training_args.max_grad_norm max_grad_norm", "train.clip_grad"),
    Row(f"{TRAIN}training_args.adam_beta2", "train.adam_beta2", default=0.999),
    Row(prefixed(f"{TRAIN}training_args.", "per_device_train_batch_size gradient_accumulation_steps"),
        "train.global_batch_size", "the product of both and of the ranks"),
    Row(f"{TRAIN}training_args.bf16", text="train.dtype is bfloat16 without actor_train.model_args.dtype"),
    Row(f"{TRAIN}training_args.warmup_ratio", "train.lr_warmup_fraction", convert=share),
    Row(f"{TRAIN}training_args.num_train_epochs {TRAIN}training_args.max_steps", text="max_steps is run.num_rollout"),
    Row(f"{TRAIN}model_args.dtype {TRAIN}model_args.torch_dtype", "train.dtype",
        convert=choice(bf16="bfloat16", fp32="float32"), default="bfloat16"),
    Row(f"{TRAIN}model_args.disable_gradient_checkpointing", "train.gradient_checkpointing", "the opposite", off,
        default=True),
    Row(f"{TRAIN}model_args.lora_rank", "train.lora_rank", convert=positive),
    Row(f"{TRAIN}model_args.lora_target", "train.lora_targets", convert=layers),
    Row(f"{TRAIN}model_args.freeze_module_prefix", "train.freeze_vision_tower", "vision_model is true",
        choice(vision_model=True)),
    Row("lora_rank lora_alpha lora_target", text="actor_train takes them over by ${…}: train.lora_rank"),
    Row(f"{TRAIN}model_args.lora_dropout {TRAIN}model_args.autocast_adapter_dtype", text="adapters are in float32"),
    Row(f"{TRAIN}model_args.model_config_kwargs.NAME", text="the model's shape comes from its config.json"),
    Row(prefixed(TRAIN, "model_args.NAME use_remove_padding offload_nccl logits_in_fp32 infer_batch_size "
                 "use_sequence_packing name sequence_packing_args.NAME sequence_length_round_in_train "
                 "sequence_length_round_in_infer apply_loss_scale num_gpus_per_worker world_size backend_timeout "
                 "max_concurrency system_envs.NAME generating_args.NAME"), text=KERNELS),
    Row(f"{TRAIN}use_dynamic_batching_in_train", "train.use_dynamic_batch_size", convert=on),
    Row(f"{TRAIN}use_dynamic_batching_in_infer {TRAIN}max_tokens_per_microbatch_in_infer",
        text="set train.max_tokens_per_gpu"),
    Row(f"{TRAIN}data_args.file_name", "rollout.data", convert=texts),
    Row(f"{TRAIN}data_args.tag {TRAIN}data_args.response {TRAIN}data_args.id", text="set score.rm_options.column"),
    Row(f"{TRAIN}data_args.interleave_probs", "rollout.data_weights", "one number for each file", weights),
    Row(f"{TRAIN}data_args.domain_interleave_probs.NAME {TRAIN}data_args.domain_interleave_probs",
        text="rollout.domain_weights draws prompts by domain. One domain needs no weight"),
    Row(prefixed(f"{TRAIN}data_args.", "template dataset_dir preprocessing_num_workers dataset_type"),
        text="the chat template is the model's, and files have whole paths"),
    Row(f"{TRAIN}strategy_args.strategy_name", "train.backend",
        convert=choice(megatron_train="megatron", deepspeed_train="fsdp", fsdp2_train="fsdp", fsdp_train="fsdp")),
    *(Row(f"{TRAIN}strategy_args.strategy_config.{size}", f"megatron.{size}",
          "1 turns it off" if "virtual" in size else "",
          (lambda flag: max(2, integer(flag)) if integer(flag) > 1 else None) if "virtual" in size else None)
      for size in SIZES),
    Row(f"{TRAIN}strategy_args.strategy_config.use_distributed_optimizer", "megatron.use_distributed_optimizer",
        convert=on),
    Row(f"{TRAIN}strategy_args.strategy_config.NAME", "megatron.args.NAME", "also additional_configs"),
    Row(f"{TRAIN}strategy_args.strategy_config.sequence_parallel", text="on with tensor parallelism"),
    Row(f"{TRAIN}device_mapping", "cluster.actor_num_gpus_per_node", "the number of devices",
        lambda flag: len(devices(flag))),
)  # fmt: skip
GROUPS = {"Running": RUNNING, "Rollout": ROLLOUT, "Algorithm": ALGORITHM, "Training": TRAINING}
DEVICES = re.compile(r"list\(range\((\d+)(?:,\s*(\d+))?\)\)")


def devices(flag: Flag) -> list[int]:
    """The devices of a mapping: a list, `list(range(0, 8))`, or a sum of these. Raises ValueError for others."""
    if len(flag.values) == 1 and "+" in flag.texts[0]:
        parts = [replace(flag, values=(replace(flag.values[0], text=text),)) for text in flag.texts[0].split("+")]
        return [device for part in parts for device in devices(part)]
    if len(flag.values) == 1 and (match := DEVICES.fullmatch(flag.texts[0].strip())):
        first, last = match.groups()
        start, end = (0, int(first)) if last is None else (int(first), int(last))
        if end - start > 100_000:
            raise ValueError("has too many devices")
        return list(range(start, end))
    numbers = [word for text in flag.texts for word in text.strip("[]").split(",") if word.strip()]
    if not numbers or not all(word.strip().isdigit() for word in numbers):
        raise ValueError("is an expression of Python. Set the number of GPUs by hand")
    return [int(word) for word in numbers]
