#!/usr/bin/env bash
# A Hydra command line of verl, with the constructs of its recipes.
set -euxo pipefail

project='math'
max_prompt_length=$((1024 * 2))
max_response_length=$((1024 * 4))
n=5
MODEL=${MODEL:-"${HOME}/models/Qwen2.5-7B"}
train_files="['$HOME/data/gsm8k/train.parquet', '$HOME/data/math/train.parquet']"
rollout_mode="async"
if [ "$rollout_mode" = "async" ]; then
    export VLLM_USE_V1=1
    raw_chat="True"
fi

ray job submit --no-wait --runtime-env="${WORKING_DIR:-.}/env.yaml" -- \
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="$train_files" \
    data.val_files=${HOME}/data/aime/test.parquet \
    data.return_raw_chat=$raw_chat \
    data.train_batch_size=512 \
    data.max_prompt_length=${max_prompt_length} \
    data.max_response_length=${max_response_length} \
    data.truncation='error' \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.optim.lr_warmup_steps=10 \
    actor_rollout_ref.actor.optim.weight_decay=0.1 \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$((max_prompt_length + max_response_length)) \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.actor.clip_ratio_low=0.2 \
    actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.clip_ratio_c=10.0 \
    actor_rollout_ref.actor.loss_agg_mode=token-mean \
    actor_rollout_ref.actor.entropy_coeff=0 \
    actor_rollout_ref.actor.fsdp_config.param_offload=False \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=True \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.mode=$rollout_mode \
    actor_rollout_ref.rollout.n=$n \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    actor_rollout_ref.rollout.val_kwargs.temperature=0.6 \
    actor_rollout_ref.rollout.val_kwargs.n=4 \
    +actor_rollout_ref.rollout.engine_kwargs.vllm.disable_mm_preprocessor_cache=True \
    algorithm.use_kl_in_reward=False \
    algorithm.filter_groups.enable=True \
    reward_model.reward_manager=dapo \
    trainer.logger='["console","wandb"]' \
    trainer.project_name="${project}" \
    trainer.experiment_name=qwen_${n}x \
    trainer.n_gpus_per_node=8 trainer.nnodes=2 \
    trainer.save_freq=-1 trainer.test_freq=5 \
    trainer.val_before_train=False \
    trainer.total_epochs=15 trainer.stamp=$(date +%s) $@
