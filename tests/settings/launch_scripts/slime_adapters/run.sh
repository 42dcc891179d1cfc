# Adapters, an offloaded optimizer, and flags of newer versions of slime.
OPTIMIZER=(--lr 1e-5 --optimizer-cpu-offload --use-precision-aware-optimizer --overlap-cpu-optimizer-d2h-h2d
           --main-grads-dtype fp32 --lora-weight-decay 0.2)
python3 train.py --hf-checkpoint /models/a --prompt-data /data/p.jsonl --rollout-batch-size 4 --num-rollout 5 \
  --use-lora --lora-rank 8 --lora-alpha 16 --lora-target-preset moe_language_all --save-lora /out/{rollout_id} \
  --advantage-estimator grpo --use-mopd --mopd-alpha 0.5 --opd-top-k 4 --megatron-to-hf-mode bridge \
  --tensor-model-parallel-size 2 --actor-num-gpus-per-node 4 --colocate --use-slime-router --qkv-format bshd \
  --delta-dtype fp32 --int4-params-rollout "${OPTIMIZER[@]}"
