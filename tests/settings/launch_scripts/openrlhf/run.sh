set -x
# OpenRLHF: underscores, a working directory for Ray, pairs of numbers.
export WORK=${WORK:-/openrlhf}
ray job submit --address="http://127.0.0.1:8265" \
   --runtime-env-json="{\"working_dir\": \"${WORK}\"}" \
   -- python3 -m openrlhf.cli.train_ppo_ray \
   --ref_num_nodes 1 --ref_num_gpus_per_node 8 \
   --actor_num_nodes 1 --actor_num_gpus_per_node 8 \
   --vllm_num_engines 4 --vllm_tensor_parallel_size 2 \
   --colocate_all_models --vllm_gpu_memory_utilization 0.6 \
   --pretrain org/Llama-3-8b-sft \
   --remote_rm_url http://10.0.0.3:5000/get_reward \
   --save_path ${WORK}/out/llama3-8b \
   --ckpt_path ${WORK}/ckpt \
   --save_steps 20 --max_ckpt_num 3 \
   --train_batch_size 128 --rollout_batch_size 128 --n_samples_per_prompt 8 \
   --micro_train_batch_size 2 --max_epochs 1 --num_episodes 2 \
   --prompt_max_len 1024 --generate_max_len 4096 \
   --advantage_estimator group_norm \
   --eps_clip_low_high 0.2 0.28 --dual_clip 3 \
   --init_kl_coef 1e-3 --use_kl_loss --kl_estimator k3 \
   --actor_learning_rate 5e-7 --critic_learning_rate 9e-6 --adam_betas 0.9 0.95 \
   --zero_stage 3 --param_dtype bf16 --gradient_checkpointing --packing_samples --adam_offload \
   --prompt_data org/a@[0:100],org/b --prompt_data_probs 0.7,0.3 \
   --input_key context_messages --apply_chat_template \
   --normalize_reward --dynamic_filtering \
   --enable_vllm_is_correction \
   --use_wandb abcdef0123456789 --wandb_project rl
