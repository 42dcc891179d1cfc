# Distillation by verl's trainer; bounds of a correction as LOW_HIGH; what only newer versions have.
ARGS=(
  model_engine=megatron
  algorithm.adv_estimator=grpo
  algorithm.rollout_correction.rollout_is=token
  algorithm.rollout_correction.rollout_is_threshold="0.5_2.0"
  data.train_files="[/data/a.parquet,/data/b.parquet]" data.train_batch_size=16
  actor_rollout_ref.model.path=/models/small
  actor_rollout_ref.actor.ppo_mini_batch_size=16 actor_rollout_ref.nccl_timeout=3600
  actor_rollout_ref.rollout.name=sglang +actor_rollout_ref.rollout.val_kwargs.max_tokens=100
  actor_rollout_ref.rollout.drafter.training.step=20 actor_rollout_ref.ref.veomni.param_offload=True
  reward.num_workers=4
  distillation.enabled=True distillation.n_gpus_per_node=4
  distillation.teacher_models.one.model_path=/models/large
  trainer.nnodes=1 trainer.n_gpus_per_node=4 trainer.logger=[console,tensorboard]
  ${STEPS:+trainer.total_training_steps=$STEPS}
)
if [[ "${1:-}" == --check ]]; then
  exec python -m verl.trainer.main_ppo "${ARGS[@]}" --cfg job
fi
for path in /data/a.parquet /models/small; do
  [[ -f "$path" ]] || { echo "missing $path" >&2; exit 2; }
done
exec python -m verl.trainer.main_ppo "${ARGS[@]}" "$@" 2>&1 | tee "log_$(date +%F).txt"
