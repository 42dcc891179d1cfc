#!/usr/bin/env bash
# Every construct that launch scripts of slime have, in one.
pkill -9 sglang || true
sleep 3
ray stop --force
set -euxo pipefail

export PYTHONBUFFERED=16
NVLINKS=$(nvidia-smi topo -m 2>/dev/null | grep -o 'NV[0-9][0-9]*' | wc -l)
if [ "$NVLINKS" -gt 0 ]; then
  HAS_NVLINK=1
else
  HAS_NVLINK=0
fi
echo "NVLink: $HAS_NVLINK" > links.txt

HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${HERE}/models/small-moe.sh"

BASE=${BASE:-/data}
NAME="small moe"
CONTEXT=$((16 * 1024))
declare -A SEEDS=([rollout]=7 [train]=11)
readonly GPUS=8

CKPT_ARGS=(
  --hf-checkpoint ${BASE}/small-moe
  # --hf-checkpoint ${BASE}/small-moe-fp8
  --ref-load "${BASE}/small-moe_torch_dist"
  --save "${BASE}/runs/${NAME// /-}/"
  --save-interval 20
)

ROLLOUT_ARGS=(
  --prompt-data "${BASE}"/train.jsonl
  --input-key question --label-key answer
  --apply-chat-template
  --apply-chat-template-kwargs '{"enable_thinking": false}'
  --rollout-shuffle
  --rollout-seed ${SEEDS[rollout]}
  --num-rollout 300
  --rollout-batch-size 32
  --n-samples-per-prompt 8
  --rollout-max-context-len $CONTEXT
  --rollout-max-response-len $((CONTEXT / 2))
  --rollout-temperature 0.8
  --rollout-stop-token-ids 151643 151645
  --rm-type deepscaler
  --over-sampling-batch-size 64
  --dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std
  --num-steps-per-rollout 2
)

EVAL_ARGS=(
  --eval-interval 20
  --eval-prompt-data aime ${BASE}/aime.jsonl math500 ${BASE}/math500.jsonl@[0:100]
  --n-samples-per-eval-prompt 16
  --eval-top-p 0.7
)

case "$NAME" in
  *moe*) PERF_ARGS=(--expert-model-parallel-size $((GPUS / 2))) ;;
  *) PERF_ARGS=() ;;
esac
PERF_ARGS+=(
  --tensor-model-parallel-size 2
  --sequence-parallel
  --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
  --use-dynamic-batch-size
  --max-tokens-per-gpu $(( CONTEXT > 8192 ? 9216 : 4096 ))
)

ALGORITHM_ARGS=(
  --advantage-estimator grpo
  --use-kl-loss --kl-loss-coef 0.001 --kl-loss-type low_var_kl
  --entropy-coef 0.00
  --eps-clip 0.2 --eps-clip-high 0.28
  --use-tis
)
OPTIMIZER_ARGS=(--optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98)

WANDB_ARGS=()
if [[ -z "${NO_WANDB:-}" && $NAME == small* ]]; then
  WANDB_ARGS=(--use-wandb --wandb-project moe --wandb-group "$NAME" --wandb-key ${WANDB_KEY})
fi

SGLANG_ARGS=(--rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.7 --sglang-enable-dp-attention)
MISC_ARGS=(
  --attention-dropout 0.0 --hidden-dropout 0.0
  --accumulate-allreduce-grads-in-fp32
  --moe-token-dispatcher-type alltoall --moe-permute-fusion
  --update-weight-buffer-size $((2 * 1024 ** 3))
  --seed "${SEEDS[train]}"
  --my-own-flag 3
  --sglang-log-level $HAS_NVLINK
)

RUNTIME_ENV_JSON=$(cat <<EOF_JSON
{
  "env_vars": {"NCCL_NVLS_ENABLE": "${HAS_NVLINK}", "MASTER_ADDR": "${MASTER_ADDR:-127.0.0.1}"}
}
EOF_JSON
)

launch() {
  local nodes=$1
  shift
  ray job submit --address="http://127.0.0.1:8265" \
    --runtime-env-json="${RUNTIME_ENV_JSON}" \
    -- python3 train.py \
    --actor-num-nodes "$nodes" \
    --actor-num-gpus-per-node $GPUS \
    "${MODEL_ARGS[@]}" ${CKPT_ARGS[@]} "$@" 2>&1 | tee "log_$(date +%F).txt"
}
launch 1 --colocate \
  ${ROLLOUT_ARGS[@]} "${EVAL_ARGS[@]}" ${PERF_ARGS[@]} ${ALGORITHM_ARGS[@]} ${OPTIMIZER_ARGS[@]} \
  "${WANDB_ARGS[@]}" ${SGLANG_ARGS[@]} ${MISC_ARGS[@]} ${EXTRA_ARGS:-}
