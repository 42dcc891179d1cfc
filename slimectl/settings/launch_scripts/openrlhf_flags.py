"""The table of OpenRLHF's flags, by the flat names of its earlier versions, with the setting that each becomes."""

from __future__ import annotations

from slimectl.settings.launch_scripts.conversion import Row, typed
from slimectl.settings.launch_scripts.values import (
    Always,
    choice,
    comma_separated,
    integer,
    layers,
    number,
    on,
    positive,
    share,
)

DEEPSPEED = "training is sharded by train.backend, not by DeepSpeed"
PLACES = "reference and critic share the trainer's GPUs"
KERNELS = "kernels are chosen by the trainer; packs have no padding"
OVERLONG = 'write score.rm as a sum with {type = "overlong", weight = …} (docs/verifiers.md)'

CLUSTER = (
    Row("actor_num_nodes", "cluster.actor_num_nodes"),
    Row("actor_num_gpus_per_node", "cluster.actor_num_gpus_per_node", default=8),
    Row("nproc_per_node num_gpus", "cluster.actor_num_gpus_per_node", "of `torchrun` or `deepspeed`", integer),
    Row(
        "ref_num_nodes ref_num_gpus_per_node reward_num_nodes reward_num_gpus_per_node critic_num_nodes "
        "critic_num_gpus_per_node colocate_actor_ref colocate_critic_reward ref_reward_offload actor_init_on_gpu",
        text=PLACES,
    ),
    Row("colocate_all_models", "cluster.colocate", convert=on),
    Row("vllm_num_engines", "cluster.rollout_num_gpus", "times vllm_tensor_parallel_size", positive),
    Row("vllm_tensor_parallel_size", "cluster.rollout_num_gpus_per_engine"),
    Row("vllm_gpu_memory_utilization", "vllm.args.gpu_memory_utilization", convert=typed, default=0.95),
    Row("enforce_eager", "vllm.args.enforce_eager", convert=typed),
    Row("enable_prefix_caching", "vllm.args.enable_prefix_caching", convert=typed),
    Row("vllm_sync_backend", "sync.transport", "nccl is distributed", choice(nccl="auto", gloo="auto")),
    Row(
        "vllm_sync_with_ray vllm_enable_sleep deepspeed_enable_sleep vllm_generate_batch_size rollout_tasks_per_gpu",
        text="engines and trainer free their memory in turn with cluster.colocate",
    ),
    Row("async_train", "run.async_level", convert=Always(1)),
    Row("async_queue_size", "run.async_level", "with async_train", integer),
    Row("partial_rollout", "rollout.partial_rollout", convert=on),
)
MODEL = (
    Row("pretrain", "model.path"),
    Row("reward_pretrain", "score.rm_options.path", "also score.rm_type = reward_model"),
    Row("critic_pretrain", "algorithm.critic_load"),
    Row(
        "remote_rm_url",
        "score.rm_url",
        "also score.rm_type = remote_rm; FILE.py is score.custom_rm_path = FILE.py:reward_func",
    ),
    Row("reward_model_path value_head_prefix save_value_network", text="a critic and a reward model have a value head"),
    Row("agent_func_path", "rollout.custom_generate_function_path", "to be adapted (docs/agents.md)"),
    Row("bf16", "train.dtype", convert=Always("bfloat16")),
    Row("param_dtype", "train.dtype", convert=choice(bf16="bfloat16", fp32="float32"), default="bfloat16"),
    Row("lora_rank", "train.lora_rank", "0 is none", positive),
    Row("lora_alpha", "train.lora_alpha"),
    Row("target_modules", "train.lora_targets", convert=layers),
    Row("load_model", text="weights are those of model.path, a Hugging Face directory; save a .pt file as one first"),
    Row("lora_dropout load_in_4bit", text="adapters have no dropout, and weights are not quantized"),
    Row("gradient_checkpointing", "train.gradient_checkpointing", convert=on),
    Row("adam_offload", "train.offload", convert=Always("optimizer")),
    Row(
        "zero_stage backend zpg overlap_comm grad_accum_dtype deepcompile local_rank ds_tensor_parallel_size "
        "gradient_checkpointing_use_reentrant disable_ds_ckpt use_ds_universal_ckpt deepspeed",
        text=DEEPSPEED,
    ),
    Row(
        "packing_samples flash_attn attn_implementation use_liger_kernel disable_fast_tokenizer perf use_ms "
        "experts_implementation",
        text=KERNELS,
    ),
    Row(
        "ring_attn_size ring_head_stride",
        text='tokens of a sequence are shared by train.backend = "megatron" and megatron.context_parallel_size',
    ),
    Row("enable_ema ema_beta", text="weights are not averaged over steps"),
    Row("actor.freeze_visual_encoder", "train.freeze_vision_tower", convert=on),
    Row(
        "actor.gradient_checkpoint model.gradient_checkpoint",
        "train.gradient_checkpointing",
        "full is true",
        choice(full=True, selective=True, none=False),
    ),
    Row(
        "actor.optim actor.muon.NAME critic.optim critic.muon.NAME critic.NAME",
        text="the optimizer is AdamW, and the critic's but its rate is the policy's",
    ),
    Row(
        "actor.loss_agg_mode",
        "algorithm.calculate_per_token_loss",
        "token-mean is true",
        choice(token_mean=True, seq_mean_token_mean=False),
        default=True,
    ),
    Row("vllm.NAME", text="set the argument of vLLM in [vllm.args], by its name there"),
    Row("ds.NAME", text=DEEPSPEED),
)
DATA = (
    Row("prompt_data dataset", "rollout.data", convert=comma_separated),
    Row("prompt_data_probs dataset_probs", "rollout.data_weights", convert=comma_separated),
    Row("image_key", "rollout.image_key"),
    Row(
        "chosen_key rejected_key prompt_key output_key",
        text="rows of preferences have prompt, chosen and rejected, "
        "demonstrations messages or prompt and label (docs/records.md)",
    ),
    Row("data.max_images_per_prompt data.dataloader_num_workers", text="a prompt may have any number of images"),
    Row("input_key", "rollout.input_key", default="input"),
    Row("label_key", "rollout.label_key"),
    Row("apply_chat_template", "rollout.apply_chat_template", convert=on),
    Row("input_template", text="put the template into the prompts, or set rollout.apply_chat_template"),
    Row("prompt_split eval_split max_samples", text="take a part of a file by path@[a:b] in rollout.data"),
    Row("eval_dataset", "eval.data.eval"),
    Row("eval_temperature", "eval.temperature", default=0.6),
    Row("eval_n_samples_per_prompt", "eval.n_samples_per_prompt", default=4),
    Row("prompt_max_len", "rollout.max_prompt_len", default=1024),
    Row("generate_max_len", "rollout.max_response_len", default=1024),
    Row("max_len", "rollout.max_context_len"),
    Row("temperature", "rollout.temperature"),
    Row("top_p", "rollout.top_p"),
    Row("top_k", "rollout.top_k"),
    Row("n_samples_per_prompt", "rollout.n_samples_per_prompt", default=1),
    Row("rollout_batch_size", "run.rollout_batch_size", default=1024),
    Row("train_batch_size", "train.global_batch_size", default=128),
    Row("micro_train_batch_size", "train.micro_batch_size"),
    Row("micro_rollout_batch_size", text="passes are filled up to train.max_tokens_per_gpu"),
    Row("use_dynamic_batch", "train.use_dynamic_batch_size", convert=on),
    Row("train_max_tokens_per_gpu", "train.max_tokens_per_gpu"),
    Row("rollout_max_tokens_per_gpu", text="train.max_tokens_per_gpu is the limit of every pass"),
    Row(
        "dynamic_filtering",
        "rollout.dynamic_sampling_filter_path",
        "rewards that differ",
        Always("slimectl.stages.filters:nonzero_std"),
    ),
    Row("dynamic_filtering_reward_range", text="the filter looks for rewards that differ; write one of yours"),
    Row("overlong_buffer_len overlong_penalty_factor stop_properly_penalty_coef", text=OVERLONG),
)
ALGORITHM = (
    Row(
        "advantage_estimator",
        "algorithm.name",
        "gae is ppo, group_norm grpo",
        choice(  # flash_reinforce has no counterpart: its baseline is the mean of the whole round
            gae="ppo",
            reinforce="reinforce_plus_plus",
            reinforce_baseline="reinforce_plus_plus_baseline",
            rloo="rloo",
            group_norm="grpo",
            dr_grpo="dr_grpo",
        ),
    ),
    Row("policy_loss_type", "algorithm.name", "gspo", choice(ppo="grpo", gspo="gspo")),
    Row("eps_clip", "algorithm.eps_clip", default=0.2),
    Row("eps_clip_low_high", "algorithm.eps_clip", "two numbers, the second is algorithm.eps_clip_high"),
    Row("dual_clip", "algorithm.eps_clip_c"),
    Row("value_clip", "algorithm.value_clip", default=0.5),
    Row("lambd", "algorithm.lambd", default=1.0),
    Row("gamma", "algorithm.gamma"),
    Row("init_kl_coef", "algorithm.kl_coef", "with use_kl_loss algorithm.kl_loss_coef", number, default=0.01),
    Row("use_kl_loss", text="the coefficient is then algorithm.kl_loss_coef"),
    Row("kl_estimator", "algorithm.kl_loss_type", "with use_kl_loss", choice(k1="k1", k2="k2", k3="k3"), default="k1"),
    Row("algo.kl.unbiased_gradient", "algorithm.use_unbiased_kl", convert=on),
    Row("kl_target kl_horizon", text="the coefficient is constant"),
    Row("entropy_loss_coef", "algorithm.entropy_coef"),
    Row("aux_loss_coef", text="with train.backend = megatron it is megatron.args.moe_aux_loss_coeff"),
    Row("no_advantage_std_norm", "algorithm.grpo_std_normalization", "the opposite", lambda flag: not on(flag)),
    Row("normalize_reward", text="advantages are normalised, rewards are not"),
    Row(
        "reward_clip_range",
        text="rewards are taken as they are; score.custom_reward_post_process_path clips",
        default="-10 10",
    ),
    Row("enable_vllm_is_correction", "algorithm.use_tis", convert=on),
    Row("algo.advantage.is_correction_level", "algorithm.use_tis", "token; seq is algorithm.use_rs, geometric"),
    Row("algo.advantage.is_correction_mode", "algorithm.tis_mode", convert=choice(clip="clip", mask="mask")),
    Row("algo.advantage.is_correction_gating", text="the gate is the ratio of the probabilities"),
    Row(
        "vllm_is_truncated_threshold",
        "algorithm.tis_clip",
        "0.5 and 5 there; of two numbers the first is algorithm.tis_clip_low",
    ),
    Row(
        "vllm_is_correction_type",
        "algorithm.tis_mode",
        "tis is clip, icepop mask, seq-mask-tis algorithm.use_rs",
        choice(tis="clip", icepop="mask", seq_mask_tis="clip"),
    ),
    Row("use_icepop", "algorithm.tis_mode", convert=Always("mask")),
    Row("freezing_actor_steps", "algorithm.num_critic_only_steps", "negative is none", positive),
    Row("ptx_coef pretrain_data", text="there is no pre-training loss beside the policy's"),
    Row("beta", "algorithm.beta"),
    Row("label_smoothing", "algorithm.label_smoothing"),
    Row("ipo nll_loss_coef", text="preferences are learned by the loss of DPO, without a second one"),
    Row("ref_model_name_or_path", "algorithm.ref_load"),
    Row("teacher.model_name_or_path", "algorithm.opd_teacher_load", "with train_opd"),
    Row("opd.NAME", text="the divergence from the teacher is each token's own: algorithm.opd_kl_coef"),
    Row("algo.NAME", text="the loss is one of docs/algorithms.md; train.custom_loss_function_path is one of yours"),
)
TRAINING = (
    Row("actor_learning_rate learning_rate", "train.lr", "5e-6 of sft, 1e-5 of dpo, 9e-6 of reward models without it"),
    Row("critic_learning_rate", "algorithm.critic_lr", default=9e-6),
    Row(
        "lr_scheduler",
        "train.lr_decay_style",
        "cosine_with_min_lr is cosine, to a tenth of the rate",
        choice(
            cosine_with_min_lr="cosine",
            cosine="cosine",
            linear="linear",
            constant="constant",
            constant_with_warmup="constant",
        ),
        default="cosine",
    ),
    Row("lr_warmup_ratio", "train.lr_warmup_fraction", convert=share, default=0.03),
    Row("actor.min_lr_ratio", "train.min_lr", "times the learning rate"),
    Row("actor.adam.eps", "train.adam_eps"),
    Row("max_norm", "train.clip_grad"),
    Row("l2", "train.weight_decay"),
    Row("adam_betas", "train.adam_beta1", "two numbers, the second is train.adam_beta2"),
    Row("seed", "run.seed", default=42),
    Row("full_determinism", "train.deterministic", convert=on),
    Row("num_episodes", "run.num_epoch", default=1),
    Row(
        "max_epochs",
        text="a sample is trained on once; of rows that are read (train_sft, train_dpo) it is run.num_epoch",
    ),
)
RUNNING = (
    Row("save_path", "run.dir", "its last part is run.name"),
    Row(
        "ckpt_path save_hf_ckpt max_ckpt_mem load_checkpoint",
        text="checkpoints are in the run's folder, and a run goes on by `slimectl run --resume runs/NAME`",
    ),
    Row("max_ckpt_num", "run.keep_checkpoints", default=3),
    Row("save_steps", "run.save_interval", "negative is none", positive),
    Row("eval_steps", "eval.interval", "negative is none", positive),
    Row("logging_steps ckpt.best_metric_key", text="every step is reported, and checkpoints are those of rounds"),
    Row(
        "use_wandb", "track.with", "a key itself is not copied: track.api_key", Always(["stdout", "wandb"]), secret=True
    ),
    Row("wandb_org", "track.entity"),
    Row("wandb_group", "track.group"),
    Row("wandb_project", "track.project"),
    Row("wandb_run_name", "run.name"),
    Row("use_tensorboard", "track.kwargs.tensorboard.log_dir", "also track.with = tensorboard"),
)
GROUPS = {
    "Cluster": CLUSTER, "Model": MODEL, "Data": DATA, "Algorithm": ALGORITHM, "Training": TRAINING,
    "Running": RUNNING,
}  # fmt: skip
