"""The table of verl's keys in Hydra command lines and YAML files, with the setting for each."""

from __future__ import annotations

from slimectl.migrate.launch_scripts.conversion import Row, namesakes, renamed, typed
from slimectl.migrate.launch_scripts.values import (
    KERNELS,
    LOSS,
    OFF,
    Always,
    above_one,
    ahead,
    bounds,
    choice,
    comma_separated,
    layers,
    named_datasets,
    off,
    on,
    positive,
    share,
    trackers,
)

MEMORY = "passes are filled up to train.max_tokens_per_gpu"
SHARDS = "FSDP shards every layer over all ranks"
RESUME = "resume with `slimectl run --resume runs/NAME`"
AGENT = "an agent is rollout.custom_generate_function_path or a program, rollout.agent (docs/agents.md)"
REWARD_MODEL = "a reward model is score.rm_type = reward_model with its directory in score.rm_options"
SEQUENCE = "set megatron.context_parallel_size with train.backend = megatron"
SAMPLED = "the engine's log-probabilities come with every sample"


def prefixed(prefix: str, names: str) -> str:
    """Names below a prefix, with blanks between them."""
    return " ".join(f"{prefix}{name}" for name in names.split())


ACTOR, ROLLOUT, OPTIM = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.actor.optim."
SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
         "expert_model_parallel_size", "expert_tensor_parallel_size",
         "virtual_pipeline_model_parallel_size")  # fmt: skip

DATA = (
    Row("data.train_files", "rollout.data", convert=comma_separated),
    Row("data.val_files", "eval.data", "each file becomes a table, called after it", named_datasets),
    *renamed("data.prompt_key=rollout.input_key data.gen_batch_size=rollout.over_sampling_batch_size"),
    Row("data.train_batch_size", "run.rollout_batch_size", "prompts of a round", default=1024),
    Row("data.max_prompt_length", "rollout.max_prompt_len", default=512),
    Row("data.max_response_length actor_rollout_ref.rollout.response_length", "rollout.max_response_len", default=512),
    Row("data.shuffle", "rollout.shuffle", convert=on, default=True),
    *namesakes("rollout", "seed image_key", flag="data."),
    Row("data.truncation data.filter_overlong_prompts data.filter_overlong_prompts_workers "
        "actor_rollout_ref.rollout.prompt_length", text="prompts above rollout.max_prompt_len are skipped and counted",
        default="error"),
    Row("data.reward_fn_key", "score.rm_options.column", "with score.rm_type = by_column"),
    Row("data.return_raw_chat data.return_raw_input_ids data.return_full_prompt data.tokenizer data.use_shm "
        "data.dataloader_num_workers data.trust_remote_code data.return_multi_modal_inputs",
        text="prompts are chats, and the tokenizer is the model's"),
    Row("data.apply_chat_template_kwargs", "rollout.apply_chat_template_kwargs", "a table", typed),
    Row("data.video_key", text="videos are not read by this version"),
    Row("data.custom_cls.path data.custom_cls.name data.datagen.path data.sampler.class_path",
        text="rollout.data takes module:function, and rollout.data_source_path a class of yours"),
    Row("data.val_batch_size data.train_max_samples data.val_max_samples",
        text="write path@[a:b] for a part of a file"),
)  # fmt: skip
SUPERVISED = (
    Row("data.messages_key data.multiturn.messages_key", "rollout.input_key"),
    *renamed("data.response_key=rollout.label_key data.max_token_len_per_gpu=train.max_tokens_per_gpu"),
    Row("data.prompt_dict_keys", "rollout.input_key", "one, as a part of prompt_key"),
    Row("data.response_dict_keys", "rollout.label_key", "one, as a part of response_key"),
    Row("data.tools_key data.multiturn.tools_key", "rollout.tool_key"),
    Row("data.micro_batch_size_per_gpu data.micro_batch_size", "train.micro_batch_size"),
    Row("data.num_workers data.ignore_input_ids_mismatch data.enable_thinking_key data.enable_thinking_default",
        text="rows are rendered by the model's chat template; rollout.apply_chat_template_kwargs sets its arguments"),
    Row("data.max_length data.multiturn.NAME data.balance_dp_token data.pad_mode",
        text="rows are messages, or prompt and label, in packs of train.max_tokens_per_gpu (docs/records.md)"),
    Row("data.use_dynamic_bsz", "train.use_dynamic_batch_size", convert=on),
    Row("ulysses_sequence_parallel_size", text=SEQUENCE),
    Row("use_remove_padding actor_rollout_ref.model.fsdp_config.NAME engine.NAME checkpoint.NAME", text=KERNELS),
)  # fmt: skip
MODEL = (
    Row("actor_rollout_ref.model.path actor_rollout_ref.model.partial_pretrain", "model.path"),
    Row("actor_rollout_ref.model.enable_gradient_checkpointing", "train.gradient_checkpointing", convert=on,
        default=True),
    Row("actor_rollout_ref.model.lora_rank actor_rollout_ref.model.lora.rank", "train.lora_rank", "0 turns it off",
        positive),
    Row("actor_rollout_ref.model.lora_alpha actor_rollout_ref.model.lora.alpha", "train.lora_alpha"),
    Row("actor_rollout_ref.model.lora.NAME", text="adapters have no dropout and no other parts"),
    Row("actor_rollout_ref.model.override_config.NAME", text="edit the model's config.json"),
    Row("actor_rollout_ref.model.mtp.NAME", text="these layers are kept and not trained"),
    Row("actor_rollout_ref.model.lora_adapter_path", "train.lora_load"),
    Row(prefixed("actor_rollout_ref.model.", "target_modules lora.target_modules"), "train.lora_targets",
        "the last parts of Hugging Face names; all-linear is the default here", layers),
    Row(prefixed("actor_rollout_ref.model.", "use_remove_padding use_liger use_fused_kernels use_shm "
                 "fused_kernel_options.impl_backend enable_activation_offload use_rmpad use_prefix_grouper "
                 "tiled_mlp.NAME"), text=KERNELS),
    Row(prefixed("actor_rollout_ref.model.", "trust_remote_code external_lib tokenizer_path hf_config_path "
                 "custom_chat_template"),
        text="the folder of model.path is the model; code in it is never run"),
    Row("actor_rollout_ref.model.exclude_modules", text="name the layers with an adapter in train.lora_targets"),
    Row("actor_rollout_ref.hybrid_engine", "cluster.colocate", "engines and trainer share GPUs", on),
)  # fmt: skip
POLICY = (
    Row(f"{ACTOR}strategy actor_rollout_ref.model.strategy", "train.backend", "fsdp2 is fsdp",
        choice("fsdp megatron", fsdp2="fsdp")),
    Row(f"{ACTOR}ppo_mini_batch_size", "train.global_batch_size", "times rollout.n, as samples", default=256),
    Row(f"{ACTOR}ppo_micro_batch_size_per_gpu {ACTOR}ppo_micro_batch_size", "train.micro_batch_size"),
    Row(f"{ACTOR}use_dynamic_bsz", "train.use_dynamic_batch_size", convert=on),
    *renamed("ppo_max_token_len_per_gpu=train.max_tokens_per_gpu grad_clip=train.clip_grad "
             "clip_ratio_high=algorithm.eps_clip_high entropy_coeff=algorithm.entropy_coef "
             "kl_loss_coef=algorithm.kl_loss_coef", flag=ACTOR),
    Row(f"{ACTOR}loss_scale_factor", "algorithm.fixed_length", "with loss_agg_mode = seq-mean-token-sum-norm"),
    Row(f"{ACTOR}ppo_epochs", "train.ppo_epochs"),
    Row(f"{ACTOR}use_gpg_loss", text=LOSS, neutral=OFF),
    Row(f"{ACTOR}shuffle {ACTOR}data_loader_seed", text="samples are dealt to steps in their order"),
    Row(f"{ACTOR}clip_ratio_low {ACTOR}clip_ratio", "algorithm.eps_clip", default=0.2),
    Row(f"{ACTOR}clip_ratio_c", "algorithm.eps_clip_c", default=3.0),
    Row(f"{ACTOR}loss_agg_mode", "algorithm.calculate_per_token_loss",
        "token-mean is true, seq-mean-token-mean false; seq-mean-token-sum is algorithm.fixed_length = 1",
        choice(token_mean=True, seq_mean_token_mean=False, seq_mean_token_sum=False, seq_mean_token_sum_norm=False),
        default=True),
    Row(f"{ACTOR}use_token_level_loss", "algorithm.calculate_per_token_loss", convert=on),
    Row(f"{ACTOR}policy_loss.loss_mode", "algorithm.name", "vanilla is the estimator's own; geo_mean is gmpo",
        choice("gspo cispo sapo", vanilla="grpo", geo_mean="gmpo")),
    *namesakes("algorithm", "tau_pos tau_neg", flag=ACTOR),
    Row(f"{ACTOR}use_kl_loss", "algorithm.kl_loss_coef", "a coefficient above 0 switches it on"),
    Row(f"{ACTOR}kl_loss_type", "algorithm.kl_loss_type", "kl is k1, mse is k2",
        choice("k1 k2 k3 low_var_kl", kl="k1", mse="k2")),
    Row(f"{ACTOR}tis_imp_ratio_cap", "algorithm.tis_clip", "above 0 also algorithm.use_tis", positive),
    Row(f"{ACTOR}freeze_vision_tower", "train.freeze_vision_tower", convert=on, default=False),
    *namesakes("train", "lr lr_wsd_decay_style min_lr clip_grad", flag=OPTIM),
    Row(f"{OPTIM}lr_warmup_steps", "train.lr_warmup_iters", "negative turns it off", positive),
    Row(prefixed(OPTIM, "lr_scheduler_type warmup_style lr_scheduler lr_decay_style"), "train.lr_decay_style",
        convert=choice(constant="constant", cosine="cosine", linear="linear",
                       inverse_square_root="inverse-square-root", wsd="WSD")),
    *renamed("lr_wsd_decay_steps=train.lr_wsd_decay_iters lr_decay_steps=train.lr_decay_iters", flag=OPTIM),
    Row(f"{OPTIM}min_lr_ratio", "train.min_lr", "times the learning rate"),
    Row(f"{OPTIM}weight_decay", "train.weight_decay", default=0.01),
    Row(f"{OPTIM}betas", "train.adam_beta1", "two numbers, the second is train.adam_beta2"),
    Row(prefixed(OPTIM, "lr_warmup_steps_ratio warmup_steps_ratio"), "train.lr_warmup_fraction", convert=share),
    Row(f"{OPTIM}total_training_steps {OPTIM}num_cycles {OPTIM}optimizer {OPTIM}optimizer_impl {OPTIM}lr_warmup_init "
        f"{OPTIM}zero_indexed_step", text="the optimizer is AdamW, whose schedule ends with the run"),
    Row(f"{ACTOR}fsdp_config.full_determinism {ACTOR}megatron.full_determinism engine.full_determinism "
        "actor_rollout_ref.model.fsdp_config.full_determinism", "train.deterministic", convert=on),
    Row("actor_rollout_ref.rollout.full_determinism", text="set sglang.args.enable_deterministic_inference"),
    Row(f"{ACTOR}fsdp_config.param_offload", "train.offload", convert=Always("parameters")),
    Row(f"{ACTOR}fsdp_config.optimizer_offload {ACTOR}fsdp_config.offload_policy", "train.offload",
        convert=Always("optimizer")),
    Row(f"{ACTOR}ulysses_sequence_parallel_size actor_rollout_ref.ref.ulysses_sequence_parallel_size "
        f"{ACTOR}fsdp_config.ulysses_sequence_parallel_size", text=SEQUENCE),
    *(Row(f"{ACTOR}megatron.{size}", f"megatron.{size}") for size in SIZES),
    Row(f"{ACTOR}megatron.param_offload {ACTOR}megatron.grad_offload", text="set cluster.offload_train"),
    Row(f"{ACTOR}megatron.optimizer_offload", "megatron.optimizer_cpu_offload", convert=on),
    Row(f"{ACTOR}megatron.sequence_parallel", text="on with tensor parallelism"),
    Row(f"{ACTOR}megatron.use_distributed_optimizer", "megatron.use_distributed_optimizer", convert=on),
    Row(f"{ACTOR}megatron.use_dist_checkpointing {ACTOR}megatron.dist_checkpointing_path {ACTOR}megatron.use_mbridge "
        f"{ACTOR}megatron.vanilla_mbridge", text="models are read from Hugging Face directories"),
    Row(f"{ACTOR}megatron.dtype", "train.dtype", convert=choice("bfloat16 float32")),
    Row(f"{ACTOR}fsdp_config.NAME {ACTOR}megatron.override_ddp_config.NAME {ACTOR}megatron.seed "
        f"{ACTOR}megatron.dist_checkpointing_prefix {ACTOR}megatron.forward_only "
        f"{ACTOR}megatron.override_mcore_model_config.NAME", text=SHARDS),
    Row(f"{ACTOR}megatron.override_transformer_config.NAME {OPTIM}override_optimizer_config.NAME", "megatron.args.NAME",
        "where the name is a field of Megatron's; others as in slime's table"),
    Row(f"{ACTOR}entropy_checkpointing {ACTOR}entropy_from_logits_with_chunking {ACTOR}use_fused_kernels "
        f"{ACTOR}use_remove_padding {ACTOR}calculate_entropy {ACTOR}use_prefix_grouper {ACTOR}use_torch_compile "
        "actor_rollout_ref.ref.use_torch_compile", text=KERNELS),
    Row(f"{ACTOR}policy_loss.NAME {ACTOR}kl_cov_ratio", text="see docs/algorithms.md"),
    Row(f"{ACTOR}profiler.NAME actor_rollout_ref.ref.profiler.NAME actor_rollout_ref.rollout.profiler.NAME "
        "critic.profiler.NAME global_profiler.NAME actor_rollout_ref.profiler.NAME profile.NAME",
        text="run.profile sets the rounds to profile"),
    Row(f"{ACTOR}checkpoint.async_save", "run.async_save", convert=on),
    Row(f"{ACTOR}checkpoint.NAME", text="a checkpoint has all that a run needs to resume"),
    Row("actor_rollout_ref.ref.sync_ref_model", neutral=OFF,
        text="set algorithm.ref_update_interval to renew the reference; it is not mixed"),
    Row("actor_rollout_ref.ref.NAME", text="the reference has the layout of the policy"),
    Row("actor_rollout_ref.ref.model.path", "algorithm.ref_load"),
    Row(prefixed("actor_rollout_ref.", "ref.log_prob_micro_batch_size ref.log_prob_micro_batch_size_per_gpu "
                 "ref.log_prob_use_dynamic_bsz ref.log_prob_max_token_len_per_gpu rollout.log_prob_micro_batch_size "
                 "rollout.log_prob_micro_batch_size_per_gpu rollout.log_prob_use_dynamic_bsz "
                 "rollout.log_prob_max_token_len_per_gpu"), text=MEMORY),
)  # fmt: skip
ENGINE = (
    Row(f"{ROLLOUT}name", "engine.backend", "vLLM replaces trtllm",
        choice("vllm sglang", sglang_async="sglang", trtllm="vllm"), default="vllm"),
    Row(f"{ROLLOUT}n", "rollout.n_samples_per_prompt", default=1),
    *namesakes("rollout", "temperature top_p top_k min_p", flag=ROLLOUT),
    Row(f"{ROLLOUT}repetition_penalty", "rollout.repetition_penalty", "only vLLM also counts the prompt"),
    Row(f"{ROLLOUT}ignore_eos", "rollout.ignore_eos", convert=on),
    Row(f"{ROLLOUT}tensor_model_parallel_size", "cluster.rollout_num_gpus_per_engine", default=2),
    Row(f"{ROLLOUT}dtype", "engine.dtype", default="bfloat16"),
    *renamed("max_model_len=rollout.max_context_len val_kwargs.n=eval.n_samples_per_prompt "
             "val_kwargs.max_tokens=eval.max_response_len", flag=ROLLOUT),
    Row(f"{ROLLOUT}gpu_memory_utilization", "vllm.args.gpu_memory_utilization",
        "with SGLang sglang.args.mem_fraction_static", typed),
    *(
        Row(f"{ROLLOUT}{name}", f"vllm.args.{name}", "with vLLM", typed)
        for name in ("max_num_batched_tokens", "max_num_seqs", "enforce_eager", "enable_chunked_prefill",
                     "enable_prefix_caching")
    ),
    Row(f"{ROLLOUT}data_parallel_size", "vllm.args.data_parallel_size", "with vLLM", above_one),
    Row(f"{ROLLOUT}pipeline_model_parallel_size", "vllm.args.pipeline_parallel_size", "with vLLM", above_one),
    Row(f"{ROLLOUT}expert_parallel_size", "vllm.args.enable_expert_parallel", "with vLLM",
        lambda flag: above_one(flag) > 1),
    Row(f"{ROLLOUT}mode {ROLLOUT}load_format {ROLLOUT}layered_summon_param {ROLLOUT}disable_log_stats "
        f"{ROLLOUT}free_cache_engine {ROLLOUT}skip_tokenizer_init {ROLLOUT}update_weights_bucket_megabytes "
        f"{ROLLOUT}swap_space {ROLLOUT}do_sample {ROLLOUT}use_fire_sampling",
        text="engines are servers that receive weights in memory. See cluster.colocate"),
    Row(f"{ROLLOUT}seed trainer.seed", "run.seed", default=42),
    Row(f"{ROLLOUT}prometheus.NAME {ROLLOUT}trace.NAME", text="track.prometheus_port serves the run's metrics"),
    Row(f"{ROLLOUT}quantization {ROLLOUT}quantization_config_file {ROLLOUT}checkpoint_engine.NAME "
        f"{ROLLOUT}cudagraph_capture_sizes {ROLLOUT}layered_summon {ROLLOUT}multi_stage_wake_up "
        f"{ROLLOUT}skip_rollout {ROLLOUT}skip_dump_dir {ROLLOUT}skip.NAME {ROLLOUT}over_sample_rate "
        f"{ROLLOUT}mtp.NAME {ROLLOUT}scheduling_policy {ROLLOUT}logprobs_mode {ROLLOUT}engine_kwargs.trtllm.NAME "
        f"{ROLLOUT}drafter.NAME {ROLLOUT}limit_images",
        text="set the argument of the engine in [vllm.args] or [sglang.args], by its name there"),
    Row(f"{ROLLOUT}enable_rollout_routing_replay", "train.use_rollout_routing_replay", convert=on),
    Row(f"{ROLLOUT}calculate_log_probs", text=SAMPLED),
    Row(f"{ROLLOUT}multi_turn.enable", neutral=OFF, text="each prompt gets one response. "
        "Set rollout.custom_generate_function_path or rollout.agent (docs/agents.md)"),
    Row(f"{ROLLOUT}multi_turn.NAME {ROLLOUT}agent.NAME", text=AGENT),
    Row(f"{ROLLOUT}val_kwargs.temperature", "eval.temperature", default=0.0),
    *namesakes("eval", "top_p top_k", flag=f"{ROLLOUT}val_kwargs."),
    Row(f"{ROLLOUT}val_kwargs.do_sample", text="a temperature of 0 is greedy: eval.temperature"),
)  # fmt: skip
ALGORITHM = (
    Row("algorithm.adv_estimator", "algorithm.name", "gae is ppo",
        choice("grpo rloo opo reinforce_plus_plus reinforce_plus_plus_baseline gdpo", gae="ppo", grpo_vectorized="grpo",
            rloo_vectorized="rloo")),
    *renamed("gamma=algorithm.gamma kl_ctrl.kl_coef=algorithm.kl_coef "
             "rollout_is_threshold_lower=algorithm.tis_clip_low "
             "rollout_correction.rollout_rs_threshold_lower=algorithm.rs_clip_low "
             "rollout_correction.rollout_token_veto_threshold=algorithm.tis_veto", flag="algorithm."),
    Row("algorithm.lam", "algorithm.lambd", default=1.0),
    Row("algorithm.norm_adv_by_std_in_grpo", "algorithm.grpo_std_normalization", convert=on),
    Row("algorithm.gdpo_reward_keys algorithm.gdpo_reward_weights", "algorithm.gdpo_weights", "a table of both"),
    Row("algorithm.use_kl_in_reward", "algorithm.kl_coef", "a coefficient above 0 switches it on"),
    Row("algorithm.kl_penalty", text="the divergence in the reward is k1; in the loss algorithm.kl_loss_type"),
    Row("algorithm.kl_ctrl.type algorithm.kl_ctrl.horizon algorithm.kl_ctrl.target_kl",
        text="the coefficient is constant"),
    Row("algorithm.filter_groups.enable", "rollout.dynamic_sampling_filter_path", "rewards that differ",
        Always("slimectl.stages.filters:nonzero_std")),
    Row("algorithm.filter_groups.metric algorithm.filter_groups.max_num_gen_batches", text="the filter reads rewards"),
    Row("algorithm.rollout_is algorithm.rollout_correction.rollout_is", "algorithm.use_tis", "also algorithm.tis_level",
        on),
    Row("algorithm.rollout_is_threshold algorithm.rollout_correction.rollout_is_threshold", "algorithm.tis_clip",
        "LOW_HIGH is also algorithm.tis_clip_low", bounds("algorithm.tis_clip")),
    Row("algorithm.rollout_correction.rollout_is_batch_normalize", "algorithm.tis_batch_normalize", convert=on),
    Row("algorithm.rollout_correction.rollout_rs", "algorithm.rs_level",
        "also algorithm.use_rs; geometric and seq_mean_k1 are geometric",
        choice("token sequence geometric", token_k1="token", seq_sum_k1="sequence", seq_mean_k1="geometric")),
    Row("algorithm.rollout_correction.rollout_rs_threshold", "algorithm.rs_clip",
        "LOW_HIGH is also algorithm.rs_clip_low", bounds("algorithm.rs_clip")),
    Row("distillation.enabled", "algorithm.name", "opd; with use_task_rewards algorithm.opd_kl_coef", Always("opd")),
    Row("distillation.distillation_loss.loss_mode", "algorithm.opd_divergence", "k1 is token",
        choice(k1="token", kl="token", forward_kl_topk="forward_kl", reverse_kl_topk="reverse_kl", jsd_topk="jsd")),
    Row("distillation.distillation_loss.topk", "algorithm.opd_top_k", "with a divergence of likeliest tokens"),
    Row("distillation.distillation_loss.distillation_loss_coef", "algorithm.opd_kl_coef"),
    Row("distillation.distillation_loss.use_task_rewards", text="true there where it is not given"),
    Row("distillation.teacher_key", "rollout.domain_key", "with several teachers; data_source without it"),
    Row("algorithm.rollout_correction.NAME algorithm.pf_ppo.NAME algorithm.use_pf_ppo distillation.NAME",
        text="docs/algorithms.md lists the algorithms; algorithm.opd is distillation from a teacher"),
    Row("algorithm.rollout_is_level", "algorithm.tis_level", convert=choice("token sequence geometric")),
    Row("algorithm.rollout_correction.bypass_mode", "algorithm.use_rollout_logprobs", convert=on),
    *renamed("critic.optim.lr=algorithm.critic_lr critic.model.path=algorithm.critic_load"),
    Row("critic.cliprange_value", "algorithm.value_clip", default=0.5),
    Row("critic.NAME", text="the critic trains as the policy does, apart from its learning rate"),
)  # fmt: skip
OVERLONG = ("reward_model.overlong_buffer", "custom_reward_function.overlong_buffer",
            "reward_model.reward_kwargs.overlong_buffer_cfg", "reward.reward_kwargs.overlong_buffer_cfg")  # fmt: skip
"""Tables of DAPO's soft punishment of long responses, in different versions."""
REWARD = (
    Row("custom_reward_function.path reward.custom_reward_function.path", "score.custom_rm_path",
        "FILE.py:NAME, unchanged; without it score.rm_type = by_column, which reads data_source (docs/verifiers.md)"),
    Row("custom_reward_function.name reward.custom_reward_function.name", "score.custom_rm_path",
        "compute_score by default"),
    Row("reward.NAME", text="verifiers grade in worker processes, score.workers (docs/verifiers.md)"),
    Row("reward_model.reward_manager reward.reward_manager.name", text="a function or by_column grades"),
    Row("reward_model.model.path reward.reward_model.model_path reward.reward_model.model.path",
        "score.rm_options.path", "with reward_model.enable, also score.rm_type = reward_model"),
    Row("reward_model.NAME", text=REWARD_MODEL),
    Row(" ".join(f"{place}.{name}" for place in OVERLONG for name in ("enable", "len", "penalty_factor", "log")),
        "score.rm", "a sum of the reward and overlong"),
    Row("reward_model.reward_kwargs.max_resp_len reward.reward_kwargs.max_resp_len", "score.rm",
        "the limit of overlong; rollout.max_response_len without it"),
    Row("reward_model.sandbox_fusion.NAME sandbox_fusion.NAME", text="programs run in the sandbox of this machine"),
)  # fmt: skip
ASYNCHRONOUS = (
    Row("async_training.trigger_parameter_sync_step async_training.require_batches", "run.rollout_batch_size",
        "prompts between two pushes of weights"),
    Row("async_training.staleness_threshold", "run.async_level", "rounds, rounded up. 0 turns it off", ahead),
    Row("async_training.partial_rollout", "rollout.partial_rollout", convert=on),
    Row("async_training.use_rollout_log_probs", "algorithm.use_rollout_logprobs", convert=on),
    Row("async_training.compute_prox_log_prob", "algorithm.use_rollout_logprobs", "the opposite", off),
    Row("async_training.NAME", text="weights are pushed between rounds: run.async_level and run.max_staleness"),
    Row("rollout.nnodes rollout.n_gpus_per_node", "cluster.rollout_num_gpus", "the product of both"),
    Row("rollout.total_rollout_steps", "run.num_rollout", "all prompts divided by the prompts of a round"),
    Row("rollout.total_epochs", "run.num_epoch"),
    Row("rollout.test_freq", "eval.interval", "weight pushes, that is, rounds. Negative turns it off", positive),
)  # fmt: skip
TRAINER = (
    Row("trainer.total_epochs", "run.num_epoch", default=30),
    *renamed("total_training_steps=run.num_rollout nnodes=cluster.actor_num_nodes project_name=track.project "
             "experiment_name=run.name critic_warmup=algorithm.num_critic_only_steps "
             "log_val_generations=track.samples", flag="trainer."),
    Row("trainer.n_gpus_per_node", "cluster.actor_num_gpus_per_node", default=8),
    Row("trainer.save_freq", "run.save_interval", "negative turns it off", positive),
    Row("trainer.test_freq", "eval.interval", "negative turns it off", positive),
    Row("trainer.val_before_train", "eval.before_train", convert=on),
    Row("trainer.val_only", text="use `slimectl eval` to only evaluate"),
    Row("trainer.logger", "track.with", "console is stdout; console and wandb there, only stdout here", trackers),
    Row("trainer.default_local_dir", "run.dir", "its last part is run.name"),
    Row("trainer.balance_batch", "train.balance_data", convert=on),
    Row("trainer.max_actor_ckpt_to_keep trainer.max_ckpt_to_keep", "run.keep_checkpoints", "all by default", positive),
    Row("trainer.rollout_data_dir", "run.keep_samples", "samples are kept in the run's folder", Always(True)),
    Row("trainer.validation_data_dir", "eval.keep_samples", "kept in the run's folder", Always(True)),
    Row("trainer.resume_mode trainer.resume_from_path trainer.del_local_ckpt_after_load trainer.default_hdfs_dir "
        "trainer.max_critic_ckpt_to_keep trainer.esi_redundant_time", text=RESUME),
    Row("model_engine engine", "train.backend", "fsdp and megatron", choice("fsdp megatron", fsdp2="fsdp", dp="fsdp")),
    Row("optim", text="the optimizer is AdamW"),
    Row("actor_rollout_ref.nccl_timeout", text="slimectl has no such setting. sync.timeout_s limits a weight update"),
    Row(f"{ACTOR}veomni.NAME actor_rollout_ref.ref.veomni.NAME", text="train.backend is fsdp or megatron"),
    Row("trainer.v1.trainer_mode", "run.async_level", "sync is 0; the others are set by hand"),
    Row("trainer.v1.NAME", text="run.async_level and run.max_staleness bound how old samples may be"),
    Row("trainer.device", "train.device", convert=choice("cuda cpu")),
    Row("ray_init.num_cpus ray_kwargs.ray_init.num_cpus ray_kwargs.ray_init.runtime_env "
        "trainer.use_legacy_worker_impl trainer.ray_wait_register_center_timeout trainer.profile_steps "
        "trainer.use_v1 ray_kwargs.NAME ray_init.NAME transfer_queue.NAME hydra.NAME defaults",
        text="Ray is cluster.executor and cluster.ray_address; run.profile sets the rounds to profile"),
)  # fmt: skip
GROUPS = {
    "Data": DATA, "Supervised": SUPERVISED,
    "Model": MODEL, "Policy": POLICY, "Engine": ENGINE, "Algorithm": ALGORITHM, "Reward": REWARD,
    "Trainer": TRAINER, "Asynchronous": ASYNCHRONOUS,
}  # fmt: skip
