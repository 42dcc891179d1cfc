"""Parallel layouts of Megatron models and their validation, without dependencies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ParallelLayout:
    """Parallel sizes, with short names for the settings under [megatron].

    The world size is tensor · context · pipeline · data for the dense parts, and expert_tensor · expert · pipeline ·
    (the experts' data-parallel size) for the experts. Both cover the same ranks.

    >>> layout = ParallelLayout(tensor=2, pipeline=2, expert=2)
    >>> layout.data(8), layout.expert_data(8)
    (2, 2)
    """

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int | None = None
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1

    @property
    def model_ranks(self) -> int:
        """Return the number of ranks of one copy of the dense parts."""
        return self.tensor * self.pipeline * self.context

    @property
    def expert_ranks(self) -> int:
        """Return the number of ranks of one copy of the experts."""
        return self.expert_tensor * self.expert * self.pipeline

    def data(self, world: int) -> int:
        """Return the data-parallel size of the dense parts."""
        return world // self.model_ranks

    def expert_data(self, world: int) -> int:
        """Return the data-parallel size of the experts."""
        return world // self.expert_ranks


SETTINGS = {
    "tensor": "megatron.tensor_model_parallel_size",
    "pipeline": "megatron.pipeline_model_parallel_size",
    "virtual_pipeline": "megatron.virtual_pipeline_model_parallel_size",
    "context": "megatron.context_parallel_size",
    "expert": "megatron.expert_model_parallel_size",
    "expert_tensor": "megatron.expert_tensor_parallel_size",
}
"""Setting of each field of ParallelLayout."""

TENSOR_CUTS = {
    "num_attention_heads": "attention heads",
    "num_query_groups": "key-value groups",
    "ffn_hidden_size": "MLP columns",
    "moe_shared_expert_intermediate_size": "columns of the shared expert",
    "linear_num_key_heads": "key heads of linear attention",
    "linear_num_value_heads": "value heads of linear attention",
}
"""Dimensions that tensor parallelism divides, by field of mcore's TransformerConfig."""


def problems(layout: ParallelLayout, transformer: Mapping[str, Any], world: int) -> Iterator[str]:
    """Yield the reasons why the layout is invalid on `world` ranks, each with the setting to change.

    `transformer` holds fields of mcore's TransformerConfig (Architecture.transformer). A field that is absent or None
    is not checked.
    """
    for name, setting in SETTINGS.items():
        size = getattr(layout, name)
        if size is not None and size < 1:
            yield f"{setting}: {size} is not at least 1"
            return
    for field, dimension in TENSOR_CUTS.items():
        yield from _check_divides("tensor", layout.tensor, transformer.get(field), dimension)
    if transformer.get("linear_attention_freq"):
        yield from _check_linear_attention(layout, transformer)
    yield from _check_pipeline(layout, int(transformer["num_layers"]))
    yield from _check_experts(layout, transformer)
    yield from _check_world(layout, world)


def dense_stage(layout: ParallelLayout, transformer: Mapping[str, Any]) -> int | None:
    """Return the first pipeline stage without experts in a mixture of experts, or None if all stages have some.

    >>> dense_stage(ParallelLayout(pipeline=2), {"moe_layer_freq": [0, 0, 1, 1]})
    0
    >>> dense_stage(ParallelLayout(pipeline=2, virtual_pipeline=2), {"moe_layer_freq": [0, 0, 1, 1]})
    """
    pattern = transformer.get("moe_layer_freq")
    if not isinstance(pattern, list):
        return None
    size = max(1, len(pattern) // (layout.pipeline * (layout.virtual_pipeline or 1)))
    stages_with_experts = {i // size % layout.pipeline for i, has_experts in enumerate(pattern) if has_experts}
    return next((stage for stage in range(layout.pipeline) if stage not in stages_with_experts), None)


def prefix_obstacle(transformer: Mapping[str, Any], args: Mapping[str, Any]) -> str:
    """Return why rows cannot share their common first tokens, or "" if they can.

    Sharing must not change loss and gradient. `args` are fields of mcore's configurations that override `transformer`.
    """
    if transformer.get("linear_attention_freq"):
        return "linear attention has one state for each sequence"
    fields = {**transformer, **args}
    return next((f"{name} {reason}" for name, reason in COUNTS_TOKENS.items() if fields.get(name)), "")


COUNTS_TOKENS = {
    "moe_aux_loss_coeff": "weighs every token of every sample",
    "moe_z_loss_coeff": "weighs every token of every sample",
    "moe_router_bias_update_rate": "counts every token of every sample",
    "moe_expert_capacity_factor": "drops tokens by their number",
    "moe_input_jitter_eps": "draws noise for every token",
    "moe_router_force_load_balancing": "draws experts for every token",
    "hidden_dropout": "draws noise for every token",
}
"""Fields of mcore's configuration that make the computation of a shared token differ between rows."""


def _check_divides(name: str, size: int, count: int | None, dimension: str) -> Iterator[str]:
    if count and count % size:
        yield f"{SETTINGS[name]}: {size} does not divide {count} {dimension}. Possible: {_divisors(count, name)}"


def _check_linear_attention(layout: ParallelLayout, transformer: Mapping[str, Any]) -> Iterator[str]:
    """Check that heads divide over context-parallel ranks, because linear attention needs whole sequences."""
    heads = int(transformer.get("linear_num_key_heads") or 0) // layout.tensor
    if layout.context > 1 and heads % layout.context:
        yield (
            f"{SETTINGS['context']}: {layout.context} does not divide {heads} key heads of linear attention on a"
            f" tensor-parallel rank, whose layers need whole sequences. Possible: {_divisors(heads, 'context')}"
        )


def _divisors(count: int, name: str) -> str:
    """List the sizes that divide `count`. If there are over 12, or for tensor parallelism, list only powers of two."""
    sizes = [size for size in range(1, count + 1) if count % size == 0]
    if name == "tensor" or len(sizes) > 12:
        sizes = [size for size in sizes if size & (size - 1) == 0]
    return ", ".join(map(str, sizes))


def _check_pipeline(layout: ParallelLayout, layers: int) -> Iterator[str]:
    pipeline, virtual = layout.pipeline, layout.virtual_pipeline
    yield from _check_divides("pipeline", pipeline, layers, "layers")
    if virtual is None:
        return
    if pipeline == 1:
        yield (
            f"{SETTINGS['virtual_pipeline']}: {virtual} needs pipeline stages to interleave. Raise"
            f" {SETTINGS['pipeline']} above 1, or remove it."
        )
    elif layers % pipeline == 0:
        yield from _check_divides("virtual_pipeline", virtual, layers // pipeline, "layers of a pipeline stage")


def _check_experts(layout: ParallelLayout, transformer: Mapping[str, Any]) -> Iterator[str]:
    experts = transformer.get("num_moe_experts")
    if not experts:
        for name in ("expert", "expert_tensor"):
            if getattr(layout, name) > 1:
                yield f"{SETTINGS[name]}: {getattr(layout, name)}, but the model has no experts. Leave it at 1."
        return
    yield from _check_divides("expert", layout.expert, experts, "experts")
    ffn = transformer.get("moe_ffn_hidden_size") or transformer.get("ffn_hidden_size")
    yield from _check_divides("expert_tensor", layout.expert_tensor, ffn, "columns of an expert")


def _check_world(layout: ParallelLayout, world: int) -> Iterator[str]:
    if world % layout.model_ranks:
        yield (
            f"{SETTINGS['tensor']} x pipeline x context: one copy of the model needs {layout.model_ranks} ranks, which"
            f" does not divide the {world} available. Lower one of them, or change the number of ranks."
        )
    elif world % layout.expert_ranks:
        yield (
            f"{SETTINGS['expert']} x expert_tensor x pipeline: one copy of the experts needs {layout.expert_ranks}"
            f" ranks, which does not divide the {world} available. Lower one of them, or change the number of ranks."
        )
