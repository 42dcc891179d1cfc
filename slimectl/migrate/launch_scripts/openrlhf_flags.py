"""The table of OpenRLHF's flags by their flat names (`--actor_num_nodes`), and dotted names (`--actor.num_nodes`)."""

from __future__ import annotations

from slimectl.migrate.launch_scripts.conversion import Row, namesakes, renamed, typed
from slimectl.migrate.launch_scripts.values import (
    FILTERED,
    KERNELS,
    LOSS,
    OBJECTIVE,
    OFF,
    REWARD,
    Always,
    choice,
    comma_separated,
    integer,
    layers,
    number,
    off,
    on,
    positive,
    share,
)

DEEPSPEED = "training is sharded by train.backend, not by DeepSpeed"
PLACES = "reference and critic share the trainer's GPUs"

CLUSTER = (
    *renamed("actor_num_nodes=cluster.actor_num_nodes vllm_tensor_parallel_size=cluster.rollout_num_gpus_per_engine"),
    Row("actor_num_gpus_per_node", "cluster.actor_num_gpus_per_node", default=8),
    Row("nproc_per_node num_gpus", "cluster.actor_num_gpus_per_node", "of `torchrun` or `deepspeed`", integer),
    Row("ref_num_nodes ref_num_gpus_per_node reward_num_nodes reward_num_gpus_per_node critic_num_nodes "
        "critic_num_gpus_per_node colocate_actor_ref colocate_critic_reward ref_reward_offload actor_init_on_gpu",
        text=PLACES),
    Row("colocate_all_models", "cluster.colocate", convert=on),
    Row("vllm_num_engines", "cluster.rollout_num_gpus", "times vllm_tensor_parallel_size", positive),
    Row("vllm_gpu_memory_utilization", "vllm.args.gpu_memory_utilization", convert=typed, default=0.95),
    *namesakes("vllm.args", "enforce_eager enable_prefix_caching", typed),
    Row("vllm_sync_backend", "sync.transport", "nccl is distributed", choice(nccl="auto", gloo="auto")),
    Row("vllm_sync_with_ray vllm_enable_sleep deepspeed_enable_sleep vllm_generate_batch_size rollout_tasks_per_gpu",
        text="with cluster.colocate, engines and trainer take turns to free their memory"),
    Row("async_train", "run.async_level", convert=Always(1)),
    Row("async_queue_size", "run.async_level", "with async_train", integer),
    Row("partial_rollout", "rollout.partial_rollout", convert=on),
)  # fmt: skip
MODEL = (
    *renamed("pretrain=model.path critic_pretrain=algorithm.critic_load lora_alpha=train.lora_alpha"),
    Row("reward_pretrain", "score.rm_options.path", "also score.rm_type = reward_model"),
    Row("remote_rm_url", "score.rm_url",
        "also score.rm_type = remote_rm; FILE.py is score.custom_rm_path = FILE.py:reward_func"),
    Row("reward_model_path value_head_prefix save_value_network", text="a critic and a reward model have a value head"),
    Row("agent_func_path", "rollout.custom_generate_function_path", "to be adapted (docs/agents.md)"),
    Row("bf16", "train.dtype", convert=Always("bfloat16")),
    Row("param_dtype", "train.dtype", convert=choice(bf16="bfloat16", fp32="float32"), default="bfloat16"),
    Row("lora_rank", "train.lora_rank", "0 turns it off", positive),
    Row("target_modules", "train.lora_targets", convert=layers),
    Row("load_model", text="weights come from model.path, a Hugging Face directory. Convert a .pt file first"),
    Row("lora_dropout load_in_4bit", text="adapters have no dropout, and weights are not quantized"),
    Row("gradient_checkpointing", "train.gradient_checkpointing", convert=on),
    Row("adam_offload", "train.offload", convert=Always("optimizer")),
    Row("zero_stage backend zpg overlap_comm grad_accum_dtype deepcompile local_rank ds_tensor_parallel_size "
        "gradient_checkpointing_use_reentrant disable_ds_ckpt use_ds_universal_ckpt deepspeed", text=DEEPSPEED),
    Row("packing_samples flash_attn attn_implementation use_liger_kernel disable_fast_tokenizer perf use_ms "
        "experts_implementation", text=KERNELS),
    Row("ring_attn_size ring_head_stride", text="set megatron.context_parallel_size with train.backend = megatron"),
    Row("enable_ema ema_beta", text="weights are not averaged over steps"),
    Row("actor.freeze_visual_encoder", "train.freeze_vision_tower", convert=on),
    Row("actor.gradient_checkpoint model.gradient_checkpoint", "train.gradient_checkpointing", "full is true",
        choice(full=True, selective=True, none=False)),
    Row("actor.optim actor.muon.NAME critic.optim critic.muon.NAME critic.NAME",
        text="both optimizers are the same AdamW"),
    Row("actor.loss_agg_mode", "algorithm.calculate_per_token_loss", "token-mean is true",
        choice(token_mean=True, seq_mean_token_mean=False), default=True),
    Row("vllm.NAME", text="set the argument of vLLM in [vllm.args], by its name there"),
    Row("ds.NAME", text=DEEPSPEED),
)  # fmt: skip
DATA = (
    Row("prompt_data dataset", "rollout.data", convert=comma_separated),
    Row("prompt_data_probs dataset_probs", "rollout.data_weights", convert=comma_separated),
    *namesakes("rollout", "image_key label_key temperature top_p top_k"),
    Row("chosen_key rejected_key prompt_key output_key", text="rows of preferences have prompt, chosen and rejected, "
        "demonstrations messages or prompt and label (docs/records.md)"),
    Row("data.max_images_per_prompt data.dataloader_num_workers", text="a prompt may have any number of images"),
    Row("input_key", "rollout.input_key", default="input"),
    Row("apply_chat_template", "rollout.apply_chat_template", convert=on),
    Row("input_template", text="put the template into the prompts, or set rollout.apply_chat_template", neutral=OFF),
    Row("prompt_split eval_split max_samples", text="take a part of a file by path@[a:b] in rollout.data"),
    *renamed("eval_dataset=eval.data.eval max_len=rollout.max_context_len "
             "micro_train_batch_size=train.micro_batch_size train_max_tokens_per_gpu=train.max_tokens_per_gpu"),
    Row("eval_temperature", "eval.temperature", default=0.6),
    Row("eval_n_samples_per_prompt", "eval.n_samples_per_prompt", default=4),
    Row("prompt_max_len", "rollout.max_prompt_len", default=1024),
    Row("generate_max_len", "rollout.max_response_len", default=1024),
    Row("n_samples_per_prompt", "rollout.n_samples_per_prompt", default=1),
    Row("rollout_batch_size", "run.rollout_batch_size", default=1024),
    Row("train_batch_size", "train.global_batch_size", default=128),
    Row("micro_rollout_batch_size", text="passes are filled up to train.max_tokens_per_gpu"),
    Row("use_dynamic_batch", "train.use_dynamic_batch_size", convert=on),
    Row("rollout_max_tokens_per_gpu", text="set train.max_tokens_per_gpu"),
    Row("dynamic_filtering", "rollout.dynamic_sampling_filter_path", "rewards that differ",
        Always("slimectl.stages.filters:nonzero_std")),
    Row("dynamic_filtering_reward_range", text=FILTERED, neutral="0,1 0.0,1.0 none"),
    Row("overlong_penalty_factor",
        text='write score.rm as a sum with {type = "overlong", weight = …} (docs/verifiers.md)'),
    Row("overlong_buffer_len normalize_reward", text=REWARD, neutral=OFF),
    Row("stop_properly_penalty_coef", text=REWARD, neutral="none null"),
)  # fmt: skip
ALGORITHM = (
    Row("advantage_estimator", "algorithm.name", "gae is ppo, group_norm grpo",
        choice("rloo dr_grpo", gae="ppo", reinforce="reinforce_plus_plus", group_norm="grpo",
               reinforce_baseline="reinforce_plus_plus_baseline")),  # flash_reinforce: its baseline is of the round
    Row("policy_loss_type", "algorithm.name", "gspo", choice("gspo", ppo="grpo")),
    Row("eps_clip", "algorithm.eps_clip", default=0.2),
    Row("eps_clip_low_high", "algorithm.eps_clip", "two numbers, the second is algorithm.eps_clip_high"),
    *renamed("dual_clip=algorithm.eps_clip_c entropy_loss_coef=algorithm.entropy_coef "
             "ref_model_name_or_path=algorithm.ref_load"),
    Row("value_clip", "algorithm.value_clip", default=0.5),
    Row("lambd", "algorithm.lambd", default=1.0),
    *namesakes("algorithm", "gamma beta label_smoothing"),
    Row("init_kl_coef", "algorithm.kl_coef", "with use_kl_loss algorithm.kl_loss_coef", number, default=0.01),
    Row("use_kl_loss", text="the coefficient is then algorithm.kl_loss_coef"),
    Row("kl_estimator", "algorithm.kl_loss_type", "with use_kl_loss", choice("k1 k2 k3"), default="k1"),
    Row("algo.kl.unbiased_gradient", "algorithm.use_unbiased_kl", convert=on),
    Row("kl_target kl_horizon", text="the coefficient is constant"),
    Row("aux_loss_coef", text="with train.backend = megatron it is megatron.args.moe_aux_loss_coeff"),
    Row("no_advantage_std_norm", "algorithm.grpo_std_normalization", "the opposite", off),
    Row("reward_clip_range", text="clip in score.custom_reward_post_process_path", default="-10 10"),
    Row("enable_vllm_is_correction", "algorithm.use_tis", convert=on),
    Row("algo.advantage.is_correction_level", "algorithm.use_tis", "token; seq is algorithm.use_rs, geometric"),
    Row("algo.advantage.is_correction_mode", "algorithm.tis_mode", convert=choice("clip mask")),
    Row("algo.advantage.is_correction_gating", text="the gate is the ratio of the probabilities"),
    Row("vllm_is_truncated_threshold", "algorithm.tis_clip", "of two numbers the first is tis_clip_low"),
    Row("vllm_is_correction_type", "algorithm.tis_mode", "tis is clip, icepop mask, seq-mask-tis algorithm.use_rs",
        choice(tis="clip", icepop="mask", seq_mask_tis="clip")),
    Row("use_icepop", "algorithm.tis_mode", convert=Always("mask")),
    Row("freezing_actor_steps", "algorithm.num_critic_only_steps", "negative turns it off", positive),
    Row("pretrain_data", text="slimectl adds no pre-training loss"),
    Row("ptx_coef ipo nll_loss_coef margin_loss", text=LOSS, neutral=OFF),
    Row("loss", text="sigmoid and logexp are the same loss, and reward_model uses it"),
    Row("compute_fp32_loss", text="losses are always computed in float32"),
    Row("teacher.model_name_or_path", "algorithm.opd_teacher_load", "with train_opd"),
    Row("opd.NAME", text="the divergence from the teacher is each token's own: algorithm.opd_kl_coef"),
    Row("algo.NAME", text=OBJECTIVE),
)  # fmt: skip
TRAINING = (
    Row("actor_learning_rate learning_rate", "train.lr", "5e-6 of sft, 1e-5 of dpo, 9e-6 of reward models without it"),
    Row("critic_learning_rate", "algorithm.critic_lr", default=9e-6),
    Row("lr_scheduler", "train.lr_decay_style", "cosine_with_min_lr is cosine, to a tenth of the rate",
        choice("cosine linear constant", cosine_with_min_lr="cosine", constant_with_warmup="constant"),
        default="cosine"),
    Row("lr_warmup_ratio", "train.lr_warmup_fraction", convert=share, default=0.03),
    Row("actor.min_lr_ratio", "train.min_lr", "times the learning rate"),
    *renamed("actor.adam.eps=train.adam_eps max_norm=train.clip_grad l2=train.weight_decay"),
    Row("adam_betas", "train.adam_beta1", "two numbers, the second is train.adam_beta2"),
    Row("seed", "run.seed", default=42),
    Row("full_determinism", "train.deterministic", convert=on),
    Row("num_episodes", "run.num_epoch", default=1),
    Row("max_epochs", "train.ppo_epochs", "of programs that read rows run.num_epoch"),
)  # fmt: skip
RUNNING = (
    Row("save_path", "run.dir", "its last part is run.name"),
    Row("ckpt_path save_hf_ckpt max_ckpt_mem load_checkpoint", text="resume with `slimectl run --resume runs/NAME`"),
    Row("max_ckpt_num", "run.keep_checkpoints", default=3),
    Row("save_steps", "run.save_interval", "negative turns it off", positive),
    Row("eval_steps", "eval.interval", "negative turns it off", positive),
    Row("logging_steps ckpt.best_metric_key", text="every step is reported, and checkpoints follow rounds"),
    Row("use_wandb", "track.with", "a key is not copied: track.api_key", Always(["stdout", "wandb"]), secret=True),
    *renamed("wandb_org=track.entity wandb_run_name=run.name"),
    *namesakes("track", "group project", flag="wandb_"),
    Row("use_tensorboard", "track.kwargs.tensorboard.log_dir", "also track.with = tensorboard"),
)  # fmt: skip
GROUPS = {
    "Cluster": CLUSTER, "Model": MODEL, "Data": DATA, "Algorithm": ALGORITHM, "Training": TRAINING,
    "Running": RUNNING,
}  # fmt: skip
DOTTED = """
actor: num_nodes= num_gpus_per_node= model_name_or_path=pretrain gradient_checkpointing_enable=gradient_checkpointing
  gradient_checkpointing_reentrant=gradient_checkpointing_use_reentrant eps_clip eps_clip_low_high dual_clip
  policy_loss_type aux_loss_coef entropy_coef=entropy_loss_coef max_norm
  lr_scheduler lr_warmup_ratio
actor.adam: lr=actor_learning_rate betas=adam_betas weight_decay=l2
ref: num_nodes= num_gpus_per_node= model_name_or_path= offload=ref_reward_offload
critic: num_nodes= num_gpus_per_node= model_name_or_path=critic_pretrain value_clip
  freezing_steps=freezing_actor_steps save_value_network
critic.adam: lr=critic_learning_rate
reward: num_nodes= num_gpus_per_node= model_name_or_path=reward_pretrain remote_url=remote_rm_url
  normalize_enable=normalize_reward clip_range= overlong_buffer_len overlong_penalty_factor stop_properly_penalty_coef
  offload=ref_reward_offload
vllm: num_engines= tensor_parallel_size= gpu_memory_utilization= sync_backend= sync_with_ray= enable_sleep=
  enforce_eager enable_prefix_caching
algo.kl: init_coef=init_kl_coef use_loss=use_kl_loss estimator=kl_estimator target=kl_target horizon=kl_horizon
algo.advantage: estimator=advantage_estimator gamma lambd no_std_norm=no_advantage_std_norm
  is_correction_enable=enable_vllm_is_correction is_correction_threshold=vllm_is_truncated_threshold
  is_correction_type=vllm_is_correction_type
data: dataset_split=prompt_split tokenizer_chat_template=input_template prompt_dataset=prompt_data
  prompt_probs=prompt_data_probs prompt_split dataset dataset_probs prompt_key chosen_key rejected_key output_key
  input_key label_key image_key input_template apply_chat_template max_samples max_len prompt_max_len
  disable_fast_tokenizer
adam: eps=actor.adam.eps lr=learning_rate betas= weight_decay=l2
algo: dynamic_filtering_enable=dynamic_filtering dynamic_filtering_range=dynamic_filtering_reward_range
ds: param_dtype zero_stage zpg overlap_comm grad_accum_dtype deepcompile use_universal_ckpt=use_ds_universal_ckpt
  tensor_parallel_size= enable_sleep=deepspeed_enable_sleep adam_offload attn_implementation experts_implementation
  use_liger_kernel packing_samples load_in_4bit ring_attn_size ring_attn_head_stride=ring_head_stride
  value_head_prefix
ds.lora: rank=lora_rank alpha=lora_alpha target_modules dropout=lora_dropout
rollout: batch_size= micro_batch_size=micro_rollout_batch_size n_samples_per_prompt max_new_tokens=generate_max_len
  temperature top_p max_tokens_per_gpu= vllm_generate_batch_size
generate: max_new_tokens=generate_max_len temperature top_p
train: batch_size= micro_batch_size=micro_train_batch_size max_epochs num_episodes
  dynamic_batch_enable=use_dynamic_batch max_tokens_per_gpu= colocate_all=colocate_all_models colocate_actor_ref
  colocate_critic_reward async_enable=async_train async_queue_size partial_rollout_enable=partial_rollout
  agent_func_path enable_ema ema_beta seed full_determinism_enable=full_determinism
eval: dataset= split= steps= temperature= n_samples_per_prompt=
ckpt: output_dir=save_path path= save_steps save_hf=save_hf_ckpt max_num=max_ckpt_num max_mem=max_ckpt_mem
  load_enable=load_checkpoint disable_ds=disable_ds_ckpt
logger: logging_steps tensorboard_dir=use_tensorboard
logger.wandb: key=use_wandb org=wandb_org group=wandb_group project=wandb_project run_name=wandb_run_name
model: model_name_or_path=pretrain gradient_checkpointing_enable=gradient_checkpointing beta label_smoothing
  ipo_enable=ipo aux_loss_coef nll_loss_coef loss_type=loss margin_loss_enable=margin_loss
  compute_fp32_loss_enable=compute_fp32_loss
"""
"""Names below each table. `NAME` is that flat flag, `NAME=` is TABLE_NAME, and `NAME=FLAT` is another flat flag."""
SINGLE = {
    "min_lr_ratio": "actor.min_lr_ratio", "optim": "actor.optim", "model_name_or_path": "pretrain",
    "ckpt_save_path": "save_path", "vllm_enable_is_correction": "enable_vllm_is_correction",
    "fsdp2_enable_sleep": "deepspeed_enable_sleep", "fsdp.": "ds.",
}  # fmt: skip
"""Spellings of single versions. Names below `fsdp.` used to be below `ds.`."""


def aliases() -> dict[str, str]:
    """Return the name in the table for every other spelling."""
    spellings: dict[str, str] = {}
    for line in DOTTED.replace("\n ", "").strip().splitlines():
        table, _, names = line.partition(": ")
        for name in names.split():
            name, sign, flat = name.partition("=")
            flat = flat or (f"{table}_{name}" if sign else name)
            spellings[f"{table}.{name}"] = flat
            if table.startswith("ds"):
                spellings[f"fsdp{table.removeprefix('ds')}.{name}"] = flat
    return spellings | SINGLE
