"""How many parameters a model has, and how many of them a rank holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from slimectl.estimates import figures as written
from slimectl.estimates.figures import Figure
from slimectl.layouts import ParallelLayout
from slimectl.weights.adapters import adapter_links, chosen, linear_layers
from slimectl.weights.architecture import Architecture
from slimectl.weights.links import Link

Kind = Literal["embedding", "output", "attention", "mlp", "experts", "norms"]
KINDS: tuple[Kind, ...] = ("embedding", "attention", "mlp", "experts", "norms", "output")


@dataclass(frozen=True)
class Part:
    """Parameters of one kind in one layer; `cut`: tensor parallelism (the experts' own, for experts) divides them."""

    kind: Kind
    layer: int | None
    count: int
    cut: bool
    rows: int = 0
    """Rows that are padded to a multiple of the tensor-parallel size; 0 for none."""
    inner: int = 0
    """Of adapters: numbers that a token has between A and B."""


def parts_of(links: Sequence[Link]) -> list[Part]:
    """The parameters of a family's table that are trained, by kind and layer."""
    found: dict[tuple[Kind, int | None, bool, int], Part] = {}
    for link in links:
        if link.buffer:
            continue
        key = (_kind(link), _layer(link.megatron), link.split is not None, link.shape[0] * link.padded)
        before = found.get(key) or Part(key[0], key[1], 0, key[2], key[3])
        inner = link.shape[0] if ".adapter.A." in link.megatron else 0
        found[key] = replace(before, count=before.count + math.prod(link.shape), inner=before.inner + inner)
    return list(found.values())


def adapter_parts(links: Sequence[Link], rank: int, targets: Sequence[str]) -> list[Part]:
    """The parameters of adapters of this rank. Raises SettingsError for a target that is no layer's."""
    layers = set(chosen(linear_layers(links), targets))
    pairs = [pair for link in links for pair in adapter_links(link, layers, rank)]
    return parts_of([half for pair in pairs for half in pair])


def _layer(name: str) -> int | None:
    return int(name.split(".")[2]) if name.startswith("decoder.layers.") else None


def _kind(link: Link) -> Kind:
    name = link.megatron
    if "word_embeddings" in name:
        return "embedding"
    if name.startswith("output_layer"):
        return "output"
    if link.expert is not None:
        return "experts"
    if ".mlp." in name:
        return "mlp"
    return "attention" if ".self_attention." in name else "norms"


def count(parts: Sequence[Part], *kinds: Kind) -> int:
    return sum(part.count for part in parts if not kinds or part.kind in kinds)


def activated(parts: Sequence[Part], architecture: Architecture) -> int:
    """Parameters that a token passes through: of the experts, only those that it is sent to."""
    experts = count(parts, "experts")
    if not experts:
        return count(parts)
    chosen = int(architecture.transformer["moe_router_topk"])
    return count(parts) - experts + experts * chosen // architecture.experts


@dataclass(frozen=True)
class Held:
    """Parameters on one rank of a pipeline stage."""

    dense: int
    experts: int

    @property
    def all(self) -> int:
        return self.dense + self.experts


def held(parts: Sequence[Part], architecture: Architecture, layout: ParallelLayout, stage: int) -> Held:
    """What a rank of pipeline stage `stage` holds; a tied head is a copy of the embedding on the last stage."""
    dense = experts = 0
    for part in parts:
        if stage not in _stages(part, architecture, layout):
            continue
        if part.kind == "experts":
            experts += part.count // layout.expert // (layout.expert_tensor if part.cut else 1)
        elif part.rows:
            dense += -(-part.rows // layout.tensor) * (part.count // part.rows)
        else:
            dense += part.count // (layout.tensor if part.cut else 1)
    return Held(dense, experts)


def _stages(part: Part, architecture: Architecture, layout: ParallelLayout) -> set[int]:
    last = layout.pipeline - 1
    if part.layer is not None:
        return {stage_of(part.layer, architecture.layers, layout)}
    if part.kind == "embedding":
        return {0, last} if architecture.tied else {0}
    return {last}


def stage_of(layer: int, layers: int, layout: ParallelLayout) -> int:
    """The pipeline stage of a layer; with virtual stages every rank holds several separate runs of layers.

    >>> [stage_of(layer, 8, ParallelLayout(pipeline=2, virtual_pipeline=2)) for layer in range(8)]
    [0, 0, 1, 1, 0, 0, 1, 1]
    """
    run = layers // layout.pipeline // (layout.virtual_pipeline or 1)
    return layer // run % layout.pipeline


def figures(
    parts: Sequence[Part], architecture: Architecture, layout: ParallelLayout, adapters: Sequence[Part] = ()
) -> list[Figure]:
    """Totals, and the most that a rank holds."""
    by_kind = [(kind, count(parts, kind)) for kind in KINDS]
    found = [
        Figure("parameters", count(parts), "parameters", " + ".join(f"{kind} {n:,}" for kind, n in by_kind if n)),
    ]
    if count(parts, "experts"):
        k, experts = architecture.transformer["moe_router_topk"], architecture.experts
        rest = count(parts) - count(parts, "experts")
        formula = f"{rest:,} + experts {count(parts, 'experts'):,} x {k} chosen / {experts}"
        found.append(Figure("activated parameters", activated(parts, architecture), "parameters", formula))
    if adapters:
        words = f"adapters; {count(adapters) / count(parts):.2%} of the model, which stays as it is"
        found.append(Figure("trained parameters", count(adapters), "parameters", words))
    ranks = [held(parts, architecture, layout, stage) for stage in range(layout.pipeline)]
    most = max(ranks, key=lambda rank: rank.all)
    formula = f"pipeline stage {ranks.index(most)} of {layout.pipeline}: matrices / tensor {layout.tensor}"
    if most.experts:
        sizes = f"expert {layout.expert} / expert_tensor {layout.expert_tensor}"
        formula += f" = {written.parameters(most.dense)}, experts / {sizes} = {written.parameters(most.experts)}"
    return [*found, Figure("parameters per rank", most.all, "parameters", formula)]
