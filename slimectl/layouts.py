"""How a Megatron model is cut over ranks, and which cuts are possible; plain integers, no library."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ParallelLayout:
    """Parallel sizes by the names of the settings under [megatron], shortened.

    A world is tensor · context · pipeline · data for the dense parts and expert_tensor · expert · pipeline · (the
    experts' own data-parallel size) for the experts; both cover the same ranks.

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
        """Ranks that one copy of the dense parts takes."""
        return self.tensor * self.pipeline * self.context

    @property
    def expert_ranks(self) -> int:
        """Ranks that one copy of the experts takes."""
        return self.expert_tensor * self.expert * self.pipeline

    def data(self, world: int) -> int:
        """Data-parallel size of the dense parts."""
        return world // self.model_ranks

    def expert_data(self, world: int) -> int:
        """Data-parallel size of the experts."""
        return world // self.expert_ranks


SETTINGS = {
    "tensor": "megatron.tensor_model_parallel_size",
    "pipeline": "megatron.pipeline_model_parallel_size",
    "virtual_pipeline": "megatron.virtual_pipeline_model_parallel_size",
    "context": "megatron.context_parallel_size",
    "expert": "megatron.expert_model_parallel_size",
    "expert_tensor": "megatron.expert_tensor_parallel_size",
}
"""The setting behind each field of ParallelLayout."""

TENSOR_CUTS = {
    "num_attention_heads": "attention heads",
    "num_query_groups": "key-value groups",
    "ffn_hidden_size": "MLP columns",
    "moe_shared_expert_intermediate_size": "columns of the shared expert",
    "linear_num_key_heads": "key heads of linear attention",
    "linear_num_value_heads": "value heads of linear attention",
}
"""What tensor parallelism divides, by field of mcore's TransformerConfig."""


def problems(layout: ParallelLayout, transformer: Mapping[str, Any], world: int) -> Iterator[str]:
    """Why a model cannot be laid out so on `world` ranks, a line each with the setting to change; nothing if it can.

    `transformer` holds fields of mcore's TransformerConfig (weights.Architecture.transformer); a field that is absent
    or None puts no condition.
    """
    for name, setting in SETTINGS.items():
        size = getattr(layout, name)
        if size is not None and size < 1:
            yield f"{setting}: {size}; a size is at least 1"
            return
    for field, what in TENSOR_CUTS.items():
        yield from _cut("tensor", layout.tensor, transformer.get(field), what)
    if transformer.get("linear_attention_freq"):
        yield from _uncut(layout)
    yield from _pipeline(layout, int(transformer["num_layers"]))
    yield from _experts(layout, transformer)
    yield from _world(layout, world)


def _cut(name: str, size: int, count: int | None, what: str) -> Iterator[str]:
    if count and count % size:
        yield f"{SETTINGS[name]}: {size} does not divide {count} {what}; possible are {_divisors(count, name)}"


def _uncut(layout: ParallelLayout) -> Iterator[str]:
    """Layers of linear attention are cut by heads, not by tokens: their state needs whole sequences."""
    if layout.context > 1:
        yield (
            f"{SETTINGS['context']}: {layout.context}, but layers of linear attention need whole sequences; set it to 1"
            f" and raise {SETTINGS['tensor']} instead"
        )


def _divisors(count: int, name: str) -> str:
    """The sizes that divide `count`; powers of two for tensor parallelism and where there are very many."""
    found = [size for size in range(1, count + 1) if count % size == 0]
    if name == "tensor" or len(found) > 12:
        found = [size for size in found if size & (size - 1) == 0]
    return ", ".join(map(str, found))


def _pipeline(layout: ParallelLayout, layers: int) -> Iterator[str]:
    pipeline, virtual = layout.pipeline, layout.virtual_pipeline
    yield from _cut("pipeline", pipeline, layers, "layers")
    if virtual is None:
        return
    if pipeline == 1:
        yield (
            f"{SETTINGS['virtual_pipeline']}: {virtual} needs pipeline stages to interleave; raise"
            f" {SETTINGS['pipeline']} above 1 or drop it"
        )
    elif layers % pipeline == 0:
        yield from _cut("virtual_pipeline", virtual, layers // pipeline, "layers of a pipeline stage")


def _experts(layout: ParallelLayout, transformer: Mapping[str, Any]) -> Iterator[str]:
    experts = transformer.get("num_moe_experts")
    if not experts:
        for name in ("expert", "expert_tensor"):
            if getattr(layout, name) > 1:
                yield f"{SETTINGS[name]}: {getattr(layout, name)}, but the model has no experts; leave it at 1"
        return
    yield from _cut("expert", layout.expert, experts, "experts")
    ffn = transformer.get("moe_ffn_hidden_size") or transformer.get("ffn_hidden_size")
    yield from _cut("expert_tensor", layout.expert_tensor, ffn, "columns of an expert")


def _world(layout: ParallelLayout, world: int) -> Iterator[str]:
    if world % layout.model_ranks:
        yield (
            f"{SETTINGS['tensor']} x pipeline x context: one copy of the model takes {layout.model_ranks} ranks, which"
            f" do not divide the {world} there are; lower one of them or change the number of ranks"
        )
    elif world % layout.expert_ranks:
        yield (
            f"{SETTINGS['expert']} x expert_tensor x pipeline: one copy of the experts takes {layout.expert_ranks}"
            f" ranks, which do not divide the {world} there are; lower one of them or change the number of ranks"
        )
