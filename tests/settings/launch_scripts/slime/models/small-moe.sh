# The shape of a small mixture of experts, in the form of slime's model files.
LAYERS="${LAYERS:-6}"
DENSE=2

frequencies=()
for ((i = 0; i < LAYERS; i++)); do
  if (( i < DENSE )); then
    frequencies+=(0)
  else
    frequencies+=(1)
  fi
done
printf -v MOE_LAYER_FREQ "[%s]" "$(IFS=','; echo "${frequencies[*]}")"

MODEL_ARGS=(
  --num-layers ${LAYERS}      # of which the first two are dense
  --moe-layer-freq $MOE_LAYER_FREQ
  --swiglu
  --rotary-base "${ROTARY_BASE:=1000000}"
)
