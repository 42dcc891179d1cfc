#!/bin/sh
# TRL's command line: a launcher's flags, a recipe of YAML, and flags over it.
accelerate launch --num_processes 4 --config_file zero3.yaml -m trl.scripts.grpo \
  --config recipe.yaml \
  --learning_rate 2e-6 \
  --num_generations 4 --per_device_train_batch_size 8 \
  --use_vllm --vllm_server_host 10.0.0.2 --vllm_server_port 8001 \
  --num_train_epochs 2
