# Every group of OpenRLHF's dotted flags once: engines ahead of the trainer, a correction of their probabilities.
DIR=/work/dotted
ENGINES=(--vllm.num_engines 2 --vllm.tensor_parallel_size 4 --vllm.enable_sleep --vllm.moe_backend triton)
python3 -m openrlhf.cli.train_ppo_ray "${ENGINES[@]}" \
  --actor.num_nodes 1 --actor.num_gpus_per_node 8 --ref.num_nodes 1 --train.colocate_all \
  --actor.model_name_or_path /models/a --reward.remote_url http://10.0.0.1:5000/score \
  --data.prompt_dataset /data/p.jsonl --data.input_key question --data.max_len 6000 --data.image_key pictures \
  --rollout.batch_size 32 --rollout.n_samples_per_prompt 4 --train.batch_size 128 \
  --train.async_enable --train.async_queue_size 2 --train.partial_rollout_enable \
  --algo.advantage.estimator group_norm --algo.kl.use_loss --algo.kl.init_coef 1e-3 --algo.kl.estimator k3 \
  --algo.advantage.is_correction_enable --algo.advantage.is_correction_type icepop \
  --algo.advantage.is_correction_threshold 0.25 4.0 --actor.eps_clip_low_high 0.1 0.3 \
  --actor.adam.lr 2e-6 --actor.adam.betas 0.9 0.99 --actor.min_lr_ratio 0.5 --actor.freeze_visual_encoder \
  --actor.optim adam --ds.lora.rank 16 --ds.zero_stage 2 --fsdp.param_dtype bf16 \
  --ckpt.output_dir "$DIR" --ckpt.save_hf --logger.wandb.key abcdef0123456789abcdef0123456789
