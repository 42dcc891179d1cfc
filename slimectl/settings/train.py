"""Settings of training."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from slimectl.errors import SettingsError
from slimectl.plugins.registry import POLICIES
from slimectl.settings.base import ListOfTexts, PositiveInt, Section, Texts, registered_in

NonNegative = Annotated[float, Field(ge=0)]
Granularity = Literal["selective", "full"]
RecomputeModule = Literal["core_attn", "mlp", "moe"]


class TrainSettings(Section):
    """Scored samples in, new weights out."""

    section_name: ClassVar[str] = "train"

    backend: Annotated[str, *registered_in(POLICIES)] = "fsdp"
    """Training backend: fsdp (the Hugging Face module, in one process or sharded) or megatron (Megatron-core, see
    [megatron])."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """Optimizer: adamw, or muon (fsdp), which orthogonalizes the momentum of hidden matrices (Moonlight,
    arXiv:2502.16982). lr and weight_decay mean the same for both. Embeddings, heads, routers, norms and biases still
    use AdamW."""

    lr: NonNegative = 1e-6
    """Peak learning rate."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "constant"
    """How the learning rate falls from lr to min_lr after the warm-up. inverse-square-root has
    lr * sqrt(warm-up steps / step). WSD (warm-up, stable, decay) keeps lr until the last lr_wsd_decay_iters steps."""

    lr_warmup_iters: Annotated[int, Field(ge=0)] = 0
    """Steps of linear warm-up. Step k of n, counted from 0, has k / n of lr, so the first step changes no weight."""

    lr_warmup_fraction: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Warm-up as a share of lr_decay_iters, rounded up to whole steps. Replaces lr_warmup_iters."""

    lr_decay_iters: Annotated[int, Field(ge=1)] | None = None
    """Step at which min_lr is reached. Default: the last step of the run."""

    lr_wsd_decay_iters: PositiveInt | None = None
    """Steps of WSD's decay. Default: a tenth of lr_decay_iters, rounded up."""

    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """Shape of WSD's decay. With x from 0 to 1: 2 * 0.5^x - 1, 1 - x, half a cosine, or 1 - sqrt(x)."""

    min_lr: NonNegative = 0.0
    """Learning rate at the end of the decay."""

    weight_decay: NonNegative = 0.0
    """Decoupled weight decay."""

    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW's decay rate of the first moment."""

    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.98
    """AdamW's decay rate of the second moment."""

    adam_eps: Annotated[float, Field(gt=0)] = 1e-8
    """AdamW's epsilon."""

    muon_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Muon's decay rate of the momentum."""

    muon_use_nesterov: bool = True
    """Look ahead by the gradient (Nesterov's momentum) before Muon orthogonalizes."""

    muon_num_ns_steps: Annotated[int, Field(ge=1, le=20)] = 5
    """Newton-Schulz iterations that orthogonalize a matrix, in train.dtype."""

    optimizer_state_dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    """Precision of the optimizer's moments. bfloat16 halves their memory. It is rounded stochastically, so that small
    changes are not lost. int8 (fsdp) needs about a quarter, in blocks of 256 numbers (8-bit Adam, arXiv:2110.02861).
    Tensors of fewer than 4096 numbers then keep float32."""

    reset_optimizer_states: bool = False
    """Set the optimizer's moments to zero at the start of every round. The learning-rate schedule continues."""

    no_save_optim: bool = False
    """Save checkpoints without the optimizer's moments, which are two thirds of them with adamw. A run that resumes
    from one starts with new moments, at the same step of the schedule."""

    no_load_optim: bool = False
    """Resume, or start with --load, without the moments of the checkpoint. Weights and step are loaded."""

    clip_grad: NonNegative = 1.0
    """Maximum global gradient norm. 0 turns clipping off."""

    global_batch_size: Annotated[int, Field(ge=1)] | None = None
    """Rollouts per optimizer step. Default: all rollouts of a round."""

    num_steps_per_rollout: Annotated[int, Field(ge=1)] | None = None
    """Optimizer steps per round. Use it instead of global_batch_size."""

    ppo_epochs: Annotated[int, Field(ge=1)] = 1
    """Passes over the samples of a round (PPO, arXiv:1707.06347). From the second on, rollouts are shuffled into new
    steps."""

    max_tokens_per_gpu: Annotated[int, Field(ge=1)] | Literal["auto"] = 8192
    """Maximum tokens of a forward pass. More samples make more micro-batches. The result changes only by rounding.
    auto measures the largest number that fits on the GPU when a run starts. On a CPU it is 8192, or what `plan` expects
    to fit. A pack that does not fit is divided."""

    use_dynamic_batch_size: bool = True
    """Fill micro-batches up to max_tokens_per_gpu, first fit. If false, each has micro_batch_size samples."""

    micro_batch_size: Annotated[int, Field(ge=1)] = 1
    """Samples per micro-batch if use_dynamic_batch_size is false."""

    balance_data: bool = True
    """Distribute micro-batches so that all ranks have equal work (Karmarkar-Karp differencing). If false, use
    round-robin."""

    balance_by_flops: bool = False
    """Balance estimated FLOPs instead of tokens. The attention of long responses then counts more."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute precision. Master weights are always float32."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the trainer. auto uses the GPU if there is one."""

    deterministic: bool = False
    """Compute with deterministic kernels, so that the same samples on the same GPUs give the same weights, bit for bit.
    Slower on a GPU, without effect on a CPU. For the engine set sglang.args.enable_deterministic_inference."""

    freeze_params_name_list: Texts = []
    """Regular expressions of Hugging Face parameter names to freeze."""

    only_train_params_name_list: Texts = []
    """Regular expressions of Hugging Face parameter names to train. All others are frozen."""

    freeze_vision_tower: bool = True
    """Freeze the vision tower of a model that reads images. With false it is trained with the decoder (fsdp)."""

    custom_advantage_function_path: str | None = None
    """Path of your own advantage estimator (args, rollout_data). It writes rollout_data["advantages"]."""

    custom_loss_function_path: str | None = None
    """Path of your own loss (args, batch, logits or log_probs, sum_of_sample_mean). It returns (loss, metrics)."""

    custom_tis_function_path: str | None = None
    """Path of your own correction for the engine's log-probabilities, instead of algorithm.use_tis."""

    custom_pg_loss_reducer_function_path: str | None = None
    """Path of your own reduction of the policy loss. It returns a function from a tensor of token losses to their
    sum."""

    custom_convert_samples_to_train_data_path: str | None = None
    """Path of a function (args, samples) that returns the training data of a round as a dict of lists."""

    lora_rank: Annotated[int, Field(ge=1)] | None = None
    """Train LoRA adapters of this rank and freeze the model. Checkpoints contain the merged weights. sync.lora decides
    what engines get."""

    lora_alpha: Annotated[float, Field(gt=0)] | None = None
    """LoRA alpha. Default: twice the rank."""

    lora_targets: Texts = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    """Linear layers to adapt, by the last part of their name."""

    lora_load: str | None = None
    """Directory of a PEFT adapter to start from."""

    offload: Literal["optimizer", "parameters"] | None = None
    """What to keep in host memory. optimizer: master weights, gradient sums and moments, with the update done there.
    parameters (fsdp): also all weights. Each layer is then copied to the GPU when it is computed."""

    use_rollout_routing_replay: bool = False
    """Route tokens to the experts that the engine chose when it sampled them (R3, arXiv:2510.11370). Samples carry the
    routing, and the policy replays it in every pass and in recomputation. For mixtures of experts."""

    recompute_granularity: Granularity | None = None
    """What the backward pass recomputes instead of keeping: nothing, recompute_modules (selective), or whole layers
    (full, which needs least memory and about a third more time)."""

    recompute_modules: Annotated[list[RecomputeModule], ListOfTexts] = ["core_attn"]
    """Modules that `selective` recomputes: core_attn (attention without its projections), mlp (of dense layers), moe
    (mixtures of experts with their routers)."""

    gradient_checkpointing: bool = False
    """Same as recompute_granularity = "full"."""

    share_prompt_prefix: bool | None = None
    """Compute tokens that several samples of a step start with only once: the prompt of a group, the turns before a
    fork. Loss and gradient stay the same. max_tokens_per_gpu counts the tokens that are computed. Default: wherever the
    model allows it. true is refused elsewhere."""

    @property
    def needs_total_steps(self) -> str:
        """The setting that depends on the number of steps of the run, or "" if there is none."""
        if self.lr_decay_iters:
            return ""
        if self.lr_decay_style in ("linear", "cosine", "WSD"):
            return f"train.lr_decay_style: {self.lr_decay_style}"
        return f"train.lr_warmup_fraction: {self.lr_warmup_fraction}" if self.lr_warmup_fraction else ""

    def warmup_steps(self, decay_steps: int | None) -> int:
        """Return the warm-up steps of a schedule that ends at `decay_steps`. Raises SettingsError if it has no end."""
        if not self.lr_warmup_fraction:
            return self.lr_warmup_iters
        if decay_steps is None:
            raise SettingsError(
                f"train.lr_warmup_fraction: {self.lr_warmup_fraction} is a share of the steps, but their number is"
                " unknown. Set train.lr_decay_iters, run.num_rollout, or instead train.lr_warmup_iters."
            )
        return math.ceil(round(self.lr_warmup_fraction * decay_steps, 6))

    @property
    def pack_tokens(self) -> int:
        """Tokens of a forward pass, before anything is measured."""
        return 8192 if self.max_tokens_per_gpu == "auto" else self.max_tokens_per_gpu

    @property
    def shares_prefixes(self) -> bool:
        """Whether common first tokens of samples are computed once, where that is possible."""
        return self.share_prompt_prefix is not False


class MegatronSettings(Section):
    """The megatron backend: parallel sizes, recomputation, and any other option of Megatron-core."""

    tensor_model_parallel_size: PositiveInt = 1
    """Tensor parallelism: ranks that share every matrix. Above 1, activations between matrices are split too (sequence
    parallelism)."""

    pipeline_model_parallel_size: PositiveInt = 1
    """Pipeline parallelism: ranks that share the layers. Each holds consecutive layers."""

    virtual_pipeline_model_parallel_size: Annotated[int, Field(ge=2)] | None = None
    """Model chunks per pipeline rank (interleaved schedule: smaller bubble, more messages)."""

    context_parallel_size: PositiveInt = 1
    """Context parallelism: ranks that share the tokens of every sequence."""

    expert_model_parallel_size: PositiveInt = 1
    """Expert parallelism: ranks that share the experts of a mixture-of-experts model."""

    expert_tensor_parallel_size: PositiveInt = 1
    """Ranks that share the matrices of every expert."""

    use_distributed_optimizer: bool = True
    """Shard master weights and optimizer state over the data-parallel ranks."""

    optimizer_cpu_offload: bool = False
    """Same as train.offload = "optimizer"."""

    save_format: Literal["hf", "torch_dist"] = "hf"
    """Checkpoint layout of the policy. hf: Hugging Face in float32, from which fsdp can resume too. torch_dist:
    Megatron's own, with weights in train.dtype and a sharded optimizer. A separate critic is always hf."""

    recompute_granularity: Granularity | None = None
    """Overrides train.recompute_granularity. Default: that setting."""

    recompute_modules: Annotated[list[RecomputeModule], ListOfTexts] = ["core_attn"]
    """Overrides train.recompute_modules if megatron.recompute_granularity is selective."""

    use_routing_replay: bool = False
    """Train mixture-of-experts models with the routing of the pass that computed the old log-probabilities."""

    custom_model_provider_path: str | None = None
    """Path of your own function that builds a rank's part of the model. `build()` builds the default."""

    custom_init_path: str | None = None
    """Path of a function that every rank calls after its process groups are created, before the model is built."""

    custom_before_log_prob_hook_path: str | None = None
    """Path of a function (args, model, store_prefix) that is called before every log-probability pass."""

    custom_before_train_step_hook_path: str | None = None
    """Path of a function (args, rollout_id, step_id, model, optimizer, scheduler) that is called before every optimizer
    step."""

    args: dict[str, Any] = {}
    """Any field of Megatron-core's TransformerConfig, OptimizerConfig or DistributedDataParallelConfig, by name."""


def optimizer_conflicts(train: TrainSettings) -> Iterator[str]:
    """Yield conflicts of the optimizer with the backend, one line each."""
    if train.backend != "megatron":
        return
    if train.optimizer == "muon":
        yield (
            'train.optimizer: muon needs train.backend = "fsdp", because Megatron-core 0.16.1 cannot shard the state of'
            ' its Muon. Set train.optimizer = "adamw", or use fsdp.'
        )
    if train.optimizer_state_dtype == "int8":
        yield 'train.optimizer_state_dtype: int8 needs train.backend = "fsdp". Set "bfloat16", or use fsdp.'


def save_conflicts(train: TrainSettings, megatron: MegatronSettings, *, in_background: bool) -> Iterator[str]:
    """Yield settings of checkpoints that the backend does not have, one line each."""
    if in_background and train.backend not in ("fsdp", "megatron"):
        yield f"run.async_save: train.backend {train.backend} saves only while training waits. Set it to false."
    if train.backend != "megatron" or megatron.save_format != "torch_dist":
        return
    used = {
        "run.async_save": in_background,
        "train.no_save_optim": train.no_save_optim,
        "train.no_load_optim": train.no_load_optim,
    }
    for name in (name for name, is_set in used.items() if is_set):
        yield f'{name}: needs megatron.save_format = "hf", because torch_dist saves all of the optimizer at once.'


def offload_conflicts(train: TrainSettings, megatron: MegatronSettings) -> Iterator[str]:
    """Yield conflicts between the offload settings, one line each."""
    if train.backend == "megatron" and train.offload == "parameters":
        yield (
            'train.offload: parameters, but Megatron-core keeps its weights on the GPU. Set "optimizer", or'
            ' train.backend = "fsdp".'
        )
    offloads = train.offload == "optimizer" or megatron.optimizer_cpu_offload
    if train.backend == "megatron" and offloads and train.optimizer_state_dtype != "float32":
        yield (
            f"train.optimizer_state_dtype: {train.optimizer_state_dtype} and train.offload cannot be combined with"
            " Megatron-core, whose offloaded optimizer always has float32 moments. Drop one."
        )


def megatron_conflicts(megatron: MegatronSettings, backend: str, ranks: int) -> Iterator[str]:
    """Yield conflicts of [megatron] that do not depend on the model, one line each."""
    if backend != "megatron":
        return
    model_ranks = (
        megatron.tensor_model_parallel_size * megatron.pipeline_model_parallel_size * megatron.context_parallel_size
    )
    if ranks % model_ranks:
        yield (
            f"cluster.actor_num_gpus_per_node x actor_num_nodes: {ranks} ranks are not a multiple of the {model_ranks} "
            "that one copy of the model takes (tensor x pipeline x context of [megatron]). Change either."
        )
    expert_ranks = (
        megatron.expert_tensor_parallel_size
        * megatron.expert_model_parallel_size
        * megatron.pipeline_model_parallel_size
    )
    if not ranks % model_ranks and ranks % expert_ranks:
        yield (
            f"megatron.expert_model_parallel_size: {expert_ranks} ranks for the experts (expert_tensor x expert x "
            f"pipeline) do not divide the {ranks} of [cluster]. Change either."
        )
