"""Settings of training."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from slimectl.errors import SettingsError
from slimectl.registry import POLICIES
from slimectl.settings.base import ListOfTexts, PositiveInt, Section, Texts, registered_in

NonNegative = Annotated[float, Field(ge=0)]
Granularity = Literal["selective", "full"]
RecomputeModule = Literal["core_attn", "mlp", "moe"]


class TrainSettings(Section):
    """Scored samples in, new weights out."""

    section_name: ClassVar[str] = "train"

    backend: Annotated[str, *registered_in(POLICIES)] = "fsdp"
    """Which trainer: fsdp is the Hugging Face module, in one process or sharded; megatron is Megatron-core (see
    [megatron])."""

    lr: NonNegative = 1e-6
    """Learning rate at its peak."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "constant"
    """How the learning rate falls from lr to min_lr after the warm-up. inverse-square-root has
    lr * sqrt(warm-up steps / step). WSD (warm-up, stable, decay) keeps lr until the last lr_wsd_decay_iters steps."""

    lr_warmup_iters: Annotated[int, Field(ge=0)] = 0
    """Steps of linear warm-up: step k of n, from 0, has k / n of lr, so that the first one changes no weight."""

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
    """AdamW's decoupled weight decay."""

    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW's decay of the first moment."""

    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.98
    """AdamW's decay of the second moment."""

    adam_eps: Annotated[float, Field(gt=0)] = 1e-8
    """AdamW's epsilon."""

    optimizer_state_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of AdamW's two moments; bfloat16 halves their memory, and is rounded stochastically, so that small
    changes are not lost."""

    clip_grad: NonNegative = 1.0
    """Largest global gradient norm; 0 does not clip."""

    global_batch_size: Annotated[int, Field(ge=1)] | None = None
    """Rollouts per optimizer step; all of a round in one step where not given."""

    num_steps_per_rollout: Annotated[int, Field(ge=1)] | None = None
    """Optimizer steps per round, instead of global_batch_size."""

    max_tokens_per_gpu: Annotated[int, Field(ge=1)] = 8192
    """Tokens that one forward pass takes; more samples make more micro-batches, never another result."""

    use_dynamic_batch_size: bool = True
    """Fill micro-batches up to max_tokens_per_gpu, first fit; off, each has micro_batch_size samples, however long."""

    micro_batch_size: Annotated[int, Field(ge=1)] = 1
    """Samples of a micro-batch where use_dynamic_batch_size is off."""

    balance_data: bool = True
    """Deal micro-batches so that all ranks have as much to compute (Karmarkar and Karp's differencing); off, in
    turns."""

    balance_by_flops: bool = False
    """What is balanced: estimated FLOPs, in which long answers weigh more by their attention, and not tokens."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute precision; master weights and optimizer are always float32."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where it runs; auto takes the GPU if there is one."""

    freeze_params_name_list: Texts = []
    """Regular expressions; parameters whose Hugging Face name matches one stay as they are."""

    only_train_params_name_list: Texts = []
    """Regular expressions; only parameters whose Hugging Face name matches one are trained."""

    freeze_vision_tower: bool = True
    """Leave the vision tower of a model that reads images as it is; false trains it with the decoder (fsdp)."""

    custom_advantage_function_path: str | None = None
    """Your own estimator, by path, in place of the algorithm's: (args, rollout_data); it writes
    rollout_data["advantages"]."""

    custom_loss_function_path: str | None = None
    """Your own loss, by path, in place of a policy gradient's: (args, batch, logits or log_probs,
    sum_of_sample_mean); it returns (loss, metrics)."""

    custom_tis_function_path: str | None = None
    """Your own correction for the engine's other probabilities, by path, in place of algorithm.use_tis."""

    custom_pg_loss_reducer_function_path: str | None = None
    """Your own reduction of the policy loss, by path: it returns a function from a tensor of token losses to their
    sum."""

    custom_convert_samples_to_train_data_path: str | None = None
    """Function of (args, samples), by path: a dict of lists with what of a round is trained on."""

    lora_rank: Annotated[int, Field(ge=1)] | None = None
    """Train adapters of this rank and leave the model as it is; merged in checkpoints, and where sync.lora says so."""

    lora_alpha: Annotated[float, Field(gt=0)] | None = None
    """Their scale, times the rank; twice the rank where not given."""

    lora_targets: Texts = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    """The linear layers that get one, by the last part of their name."""

    lora_load: str | None = None
    """A peft adapter's directory to begin from."""

    offload: Literal["optimizer", "parameters"] | None = None
    """What is in host memory: optimizer has master weights, sums of gradients and moments there, and the update;
    parameters (fsdp) has all weights too, and brings a layer to the GPU when it is computed."""

    use_rollout_routing_replay: bool = False
    """Route tokens to the experts that the engine chose when it sampled them (R3, arXiv:2510.11370): samples carry
    them, and the policy replays them in every pass and in recomputation. For mixtures of experts."""

    recompute_granularity: Granularity | None = None
    """What the backward pass computes again instead of keeping it: nothing, recompute_modules (selective), or whole
    layers (full: least memory, about a third more time)."""

    recompute_modules: Annotated[list[RecomputeModule], ListOfTexts] = ["core_attn"]
    """Modules that selective recomputes: core_attn (attention without its projections), mlp (those of dense layers),
    moe (mixtures of experts with their routers)."""

    gradient_checkpointing: bool = False
    """The same as recompute_granularity = "full"."""

    share_prompt_prefix: bool | None = None
    """Compute once what several samples of a step begin with: the prompt of a group, the turns before a fork. Loss and
    gradient stay the same; max_tokens_per_gpu counts the tokens that are computed. Where not given, wherever a model's
    tokens are computed alike for all samples; true is refused elsewhere."""

    @property
    def needs_total_steps(self) -> str:
        """The setting whose effect depends on the number of steps of the run, or "" if none does."""
        if self.lr_decay_iters:
            return ""
        if self.lr_decay_style in ("linear", "cosine", "WSD"):
            return f"train.lr_decay_style: {self.lr_decay_style}"
        return f"train.lr_warmup_fraction: {self.lr_warmup_fraction}" if self.lr_warmup_fraction else ""

    def warmup_steps(self, decay_steps: int | None) -> int:
        """Return the steps of warm-up of a schedule that ends at `decay_steps`. Raises SettingsError without an end."""
        if not self.lr_warmup_fraction:
            return self.lr_warmup_iters
        if decay_steps is None:
            raise SettingsError(
                f"train.lr_warmup_fraction: {self.lr_warmup_fraction} is a share of the steps, and their number is not"
                " known. Set train.lr_decay_iters or run.num_rollout, or the warm-up itself: train.lr_warmup_iters."
            )
        return math.ceil(round(self.lr_warmup_fraction * decay_steps, 6))

    @property
    def shares_prefixes(self) -> bool:
        """Whether samples share the tokens that they begin with, where that is possible."""
        return self.share_prompt_prefix is not False


class MegatronSettings(Section):
    """The megatron backend: parallel sizes, recomputation, and any other option of Megatron-core."""

    tensor_model_parallel_size: PositiveInt = 1
    """Ranks that share every matrix; above 1 activations between matrices are split too (sequence parallelism)."""

    pipeline_model_parallel_size: PositiveInt = 1
    """Ranks that share the layers, each holding a consecutive part."""

    virtual_pipeline_model_parallel_size: Annotated[int, Field(ge=2)] | None = None
    """Parts of the layers that each pipeline rank holds (interleaved schedule: smaller bubble, more messages)."""

    context_parallel_size: PositiveInt = 1
    """Ranks that share the tokens of every sequence."""

    expert_model_parallel_size: PositiveInt = 1
    """Ranks that share the experts of a mixture-of-experts model."""

    expert_tensor_parallel_size: PositiveInt = 1
    """Ranks that share the matrices of every expert."""

    use_distributed_optimizer: bool = True
    """Split master weights and optimizer state over the data-parallel ranks."""

    optimizer_cpu_offload: bool = False
    """The same as train.offload = "optimizer"."""

    save_format: Literal["hf", "torch_dist"] = "hf"
    """Layout of the policy in checkpoints: Hugging Face's in float32, from which fsdp goes on too, or Megatron's own
    (torch_dist): weights in train.dtype and the optimizer, by the ranks that hold them. A separate critic is hf."""

    recompute_granularity: Granularity | None = None
    """train.recompute_granularity under Megatron's section; that one where not given."""

    recompute_modules: Annotated[list[RecomputeModule], ListOfTexts] = ["core_attn"]
    """train.recompute_modules where megatron.recompute_granularity is selective."""

    use_routing_replay: bool = False
    """Train mixture-of-experts models on the routing of the pass that took the old log-probabilities."""

    custom_model_provider_path: str | None = None
    """Your own function, by path, that makes a rank's part of the model; `build()` makes ours."""

    custom_init_path: str | None = None
    """Function, by path, that every rank calls when its groups exist, before the model is made."""

    custom_before_log_prob_hook_path: str | None = None
    """Function of (args, model, store_prefix), by path, before every pass for log-probabilities."""

    custom_before_train_step_hook_path: str | None = None
    """Function of (args, rollout_id, step_id, model, optimizer, scheduler), by path, before every optimizer step."""

    args: dict[str, Any] = {}
    """Any field of Megatron-core's TransformerConfig, OptimizerConfig or DistributedDataParallelConfig, by its name."""

    @property
    def parallel_sizes(self) -> dict[str, int]:
        """The sizes that are not 1, by setting name."""
        sizes = {name: value for name, value in self if name.endswith("_parallel_size") and value is not None}
        return {name: value for name, value in sizes.items() if value != 1}


def offload_conflicts(train: TrainSettings, megatron: MegatronSettings) -> Iterator[str]:
    """Conflicts between the settings of host memory, one line each."""
    if train.backend == "megatron" and train.offload == "parameters":
        yield (
            'train.offload: parameters, but Megatron-core keeps its weights on the GPU; set "optimizer", or'
            ' train.backend = "fsdp"'
        )
    offloads = train.offload == "optimizer" or megatron.optimizer_cpu_offload
    if train.backend == "megatron" and offloads and train.optimizer_state_dtype != "float32":
        yield (
            f"train.optimizer_state_dtype: {train.optimizer_state_dtype} and train.offload exclude each other with"
            " Megatron-core, whose offloaded optimizer has float32 moments; drop one"
        )


def megatron_conflicts(megatron: MegatronSettings, backend: str, ranks: int) -> Iterator[str]:
    """Conflicts of [megatron] that are independent of the model, one line each."""
    if backend != "megatron":
        return
    model_ranks = (
        megatron.tensor_model_parallel_size * megatron.pipeline_model_parallel_size * megatron.context_parallel_size
    )
    if ranks % model_ranks:
        yield (
            f"cluster.actor_num_gpus_per_node x actor_num_nodes: {ranks} ranks are not a multiple of the {model_ranks} "
            "that one copy of the model takes (tensor x pipeline x context of [megatron]); change either"
        )
    expert_ranks = (
        megatron.expert_tensor_parallel_size
        * megatron.expert_model_parallel_size
        * megatron.pipeline_model_parallel_size
    )
    if not ranks % model_ranks and ranks % expert_ranks:
        yield (
            f"megatron.expert_model_parallel_size: {expert_ranks} ranks for the experts (expert_tensor x expert x "
            f"pipeline) do not divide the {ranks} of [cluster]; change either"
        )
