# The asynchronous trainer of verl on Megatron, with tables of Megatron's fields and corrections of probabilities.
STEPS=$((2 * 8 * 100))
ACTOR=actor_rollout_ref.actor
exec python3 -m verl.experimental.fully_async_policy.fully_async_main \
  --config-path=config --config-name=fully_async_ppo_megatron_trainer.yaml \
  algorithm.adv_estimator=grpo data.train_files=/data/p.parquet data.train_batch_size=0 data.gen_batch_size=1 \
  actor_rollout_ref.model.path=/models/a actor_rollout_ref.model.lora.rank=8 actor_rollout_ref.model.lora.dropout=0.1 \
  +actor_rollout_ref.model.override_config.max_position_embeddings=32768 actor_rollout_ref.model.mtp.enable=True \
  actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=4 actor_rollout_ref.hybrid_engine=False \
  ++actor_rollout_ref.rollout.engine_kwargs.vllm.max_num_seqs=64 actor_rollout_ref.rollout.prometheus.enable=True \
  $ACTOR.ppo_mini_batch_size=8 $ACTOR.optim.lr=1e-6 $ACTOR.optim.lr_decay_steps=500 $ACTOR.entropy_checkpointing=True \
  +$ACTOR.optim.override_optimizer_config.optimizer_cpu_offload=True \
  +$ACTOR.optim.override_optimizer_config.use_precision_aware_optimizer=True \
  +$ACTOR.megatron.override_transformer_config.recompute_granularity=full \
  +$ACTOR.megatron.override_transformer_config.recompute_num_layers=1 \
  +$ACTOR.megatron.override_transformer_config.apply_rope_fusion=True \
  $ACTOR.megatron.tensor_model_parallel_size=2 $ACTOR.fsdp_config.grad_offload=False \
  algorithm.rollout_correction.rollout_is=sequence algorithm.rollout_correction.rollout_is_threshold=3.0 \
  algorithm.rollout_correction.rollout_rs=seq_mean_k1 algorithm.rollout_correction.rollout_rs_threshold=0.9_1.1 \
  critic.strategy=fsdp2 reward_model.rollout.name=vllm ~trainer.resume_mode=auto \
  trainer.nnodes=1 trainer.n_gpus_per_node=4 rollout.nnodes=1 rollout.n_gpus_per_node=4 \
  rollout.total_rollout_steps=$STEPS rollout.test_freq=10 async_training.staleness_threshold=0.5 \
  async_training.trigger_parameter_sync_step=2 async_training.require_batches=1 \
  async_training.partial_rollout=True async_training.use_rollout_log_probs=True async_training.compute_prox_log_prob=True
