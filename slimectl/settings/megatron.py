"""Settings of the Megatron-core trainer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from slimectl.settings.base import Section

PositiveInt = Annotated[int, Field(ge=1)]


class MegatronSettings(Section):
    """The megatron policy: parallel sizes, recomputation, and any other option of Megatron-core."""

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
    """Keep master weights and optimizer state in host memory."""

    recompute_granularity: Literal["selective", "full"] | None = None
    """What the backward pass computes again: whole layers, or recompute_modules; nothing if not given."""

    recompute_modules: list[Literal["core_attn", "mlp", "moe"]] = ["core_attn"]
    """Modules that are computed again with recompute_granularity = "selective"."""

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


def megatron_contradictions(megatron: MegatronSettings, policy: str, ranks: int) -> Iterator[str]:
    """Conflicts of [megatron] that are independent of the model, one line each."""
    sizes = megatron.parallel_sizes
    if policy != "megatron":
        for name, value in sizes.items():
            yield f'megatron.{name}: {value} has no effect on train.policy = "{policy}"; set train.policy = "megatron"'
        for name, value in megatron:
            if name.startswith("custom_") and value:
                yield f'megatron.{name} has no effect on train.policy = "{policy}"; set train.policy = "megatron"'
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
