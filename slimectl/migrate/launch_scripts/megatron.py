"""Megatron's own flags in launch scripts: parallel sizes, arguments of training, and the shape of the model."""

from __future__ import annotations

from slimectl.migrate.launch_scripts.conversion import Conversion, Row, canonical, namesakes, take, typed
from slimectl.migrate.launch_scripts.flags import Flag
from slimectl.migrate.launch_scripts.values import Always, choice, on, texts

CONFIG = "config.json gives the shape of the model"
ATTENTION = "slimectl has its own attention kernels"
FREE = "the trainer chooses these kernels; results are the same"
OVERLAP = "gradients are reduced once a step, after all micro-batches"


def hand_over(conversion: Conversion, flag: Flag, name: str) -> None:
    """Convert a field of Megatron's configuration classes, which usually has the same name as its flag."""
    row = FIELDS.get(name, Row(name, f"megatron.args.{name}", convert=typed))
    take(conversion, flag, row)


ARGUMENTS = (
    *namesakes("megatron", "tensor-model-parallel-size pipeline-model-parallel-size expert-model-parallel-size "
               "virtual-pipeline-model-parallel-size context-parallel-size expert-tensor-parallel-size "
               "recompute-granularity"),
    Row("num-layers-per-virtual-pipeline-stage", text="set megatron.virtual_pipeline_model_parallel_size"),
    Row("sequence-parallel", text="always on if megatron.tensor_model_parallel_size is above 1"),
    *namesakes("megatron", "use-distributed-optimizer optimizer-cpu-offload", on),
    Row("recompute-modules", "megatron.recompute_modules", convert=texts),
    Row("recompute-activations", "megatron.recompute_granularity", convert=Always("selective")),
    *namesakes("megatron.args", "recompute-method recompute-num-layers distribute-saved-activations "
               "account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split fp8-recipe "
               "pipeline-model-parallel-layout moe-aux-loss-coeff moe-z-loss-coeff moe-router-load-balancing-type "
               "moe-router-bias-update-rate moe-router-dtype moe-input-jitter-eps moe-expert-capacity-factor "
               "moe-pad-expert-input-to-capacity moe-token-drop-policy moe-shared-expert-overlap moe-permute-fusion "
               "moe-router-fusion fp32-residual-connection optimizer-offload-fraction overlap-cpu-optimizer-d2h-h2d "
               "use-torch-optimizer-for-cpu-offload num-distributed-optimizer-instances "
               "defer-embedding-wgrad-compute wgrad-deferral-limit check-for-large-grads "
               "moe-router-force-load-balancing apply-wd-to-qk-layernorm config-logger-dir softmax-scale", typed),
    Row("decoder-first-pipeline-num-layers", "megatron.args.num_layers_in_first_pipeline_stage", convert=typed),
    Row("decoder-last-pipeline-num-layers", "megatron.args.num_layers_in_last_pipeline_stage", convert=typed),
    Row("microbatch-group-size-per-virtual-pipeline-stage", "megatron.args.microbatch_group_size_per_vp_stage",
        convert=typed),
    Row("overlap-p2p-communication-warmup-flush", text="pipeline stages exchange shapes first"),
    Row("ddp-bucket-size", "megatron.args.bucket_size", convert=typed),
    Row("hidden-dropout", "megatron.args.hidden_dropout", "Megatron's default is 0.1", typed),
    Row("attention-dropout", text="attention has no dropout here", default=0.1),
    Row("deterministic-mode", "train.deterministic", convert=on),
    Row("use-precision-aware-optimizer", text="train.optimizer_state_dtype sets the dtype of both moments"),
    Row("exp-avg-dtype", "train.optimizer_state_dtype", "fp32 is the default", choice(fp32="float32", bf16="bfloat16")),
    Row("exp-avg-sq-dtype main-grads-dtype main-params-dtype", text="train.optimizer_state_dtype sets both moments"),
    Row("overlap-grad-reduce overlap-param-gather overlap-param-gather-with-optimizer-step align-param-gather "
        "delay-wgrad-compute overlap-moe-expert-parallel-comm", text=OVERLAP),
    Row("accumulate-allreduce-grads-in-fp32 attention-softmax-in-fp32 no-check-for-nan-in-loss-and-grad "
        "grad-reduce-in-bf16", text="gradients and softmax are always in float32"),
    Row("attention-backend use-flash-attn use-flash-attention-v2 transformer-impl apply-query-key-layer-scaling",
        text=ATTENTION),
    Row("moe-token-dispatcher-type moe-enable-deepep moe-deepep-num-sms moe-grouped-gemm moe-use-legacy-grouped-gemm "
        "no-gradient-accumulation-fusion no-masked-softmax-fusion no-rope-fusion no-bias-dropout-fusion "
        "no-bias-swiglu-fusion cross-entropy-loss-fusion cross-entropy-fusion-impl use-cpu-initialization "
        "enable-experimental tp-comm-overlap manual-gc manual-gc-interval no-persist-layer-norm "
        "distributed-optimizer-overlap", text=FREE),
    Row("fp8-format fp8", "megatron.args.fp8", "with transformer_impl; for dense models", typed),
    Row("fp8-param-gather", text="parameters are gathered in train.dtype"),
    Row("fp4-format fp4-recipe fp4-param-gather", text="slimectl does not train in 4 bits"),
    Row("use-mcore-models use-megatron-fsdp use-dist-ckpt ckpt-format dist-ckpt-format auto-detect-ckpt-format "
        "ckpt-fully-parallel-save dist-ckpt-strictness no-ckpt-fully-parallel-save ckpt-convert-format",
        text="megatron.save_format is the layout of checkpoints"),
    Row("train-iters exit-interval log-interval log-throughput log-timers-to-tensorboard timing-log-level "
        "tensorboard-log-interval train-samples eval-iters lr-decay-samples save-retain-interval",
        text="run.num_rollout counts rounds; every step is logged"),
    Row("data-cache-path num-workers no-create-attention-mask-in-dataloader variable-seq-lengths split",
        text="rollout.data reads the prompts; packed sequences vary in length"),
    Row("tokenizer-type tokenizer-model", text="the tokenizer comes from model.path"),
)  # fmt: skip
SHAPE = (
    Row("num-layers hidden-size ffn-hidden-size num-attention-heads num-query-groups group-query-attention "
        "kv-channels max-position-embeddings seq-length vocab-size norm-epsilon normalization layernorm-epsilon "
        "position-embedding-type use-rotary-position-embeddings rotary-base rotary-percent "
        "rotary-seq-len-interpolation-factor rotary-scaling-factor use-rope-scaling rope-scaling-factor no-rope-freq "
        "swiglu squared-relu openai-gelu init-method-std untie-embeddings-and-output-weights disable-bias-linear "
        "add-qkv-bias add-bias-linear qk-layernorm apply-layernorm-1p attention-output-gate use-gated-attention "
        "window-size window-attn-skip-freq softmax-type glu-linear-offset activation-func-clamp-value", text=CONFIG),
    Row("num-experts moe-layer-freq moe-ffn-hidden-size moe-router-topk moe-router-score-function "
        "moe-router-pre-softmax moe-router-enable-expert-bias moe-router-num-groups moe-router-group-topk "
        "moe-router-topk-scaling-factor moe-shared-expert-intermediate-size moe-shared-expert-gate "
        "moe-router-topk-limited-devices moe-apply-probs-on-input", text=CONFIG),
    Row("multi-latent-attention q-lora-rank kv-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim mscale "
        "mscale-all-dim rope-type beta-fast beta-slow original-max-position-embeddings qk-clip linear-attention-freq "
        "linear-num-value-heads linear-num-key-heads linear-key-head-dim linear-value-head-dim "
        "linear-conv-kernel-dim experimental-attention-variant", text=CONFIG),
    Row("spec", text="config.json names the layers; megatron.custom_model_provider_path can build others"),
)  # fmt: skip
FIELDS = {canonical(name): row for row in (*ARGUMENTS, *SHAPE) for name in row.names.split()} | dict.fromkeys(
    ("apply_rope_fusion", "masked_softmax_fusion", "persist_layer_norm", "perform_initialization"), Row("", text=FREE)
)
"""Rows by the names of the fields of Megatron's configuration classes."""
