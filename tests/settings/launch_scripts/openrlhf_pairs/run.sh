# Preferences: the program names the algorithm, and its rows are read, not sampled.
read -r -d '' words <<EOF
openrlhf.cli.train_dpo --model.model_name_or_path /models/a --ref.model_name_or_path /models/b \
  --data.dataset /data/pairs.jsonl --data.chosen_key better --data.max_len 2048 --model.beta 0.2 \
  --train.batch_size 64 --train.max_epochs 3 --adam.lr 5e-7 --fsdp.attn_implementation sdpa
EOF
torchrun --standalone --nproc_per_node 4 -m $words
