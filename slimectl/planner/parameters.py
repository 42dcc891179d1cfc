"""Parameter counts of a model, and of one rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from slimectl.architectures.config import Architecture
from slimectl.architectures.lora import adapter_links, chosen, linear_layers
from slimectl.architectures.mapping import ParamMapping
from slimectl.architectures.parallel import ParallelLayout
from slimectl.planner import workload as formatting
from slimectl.planner.vision import VisionTower
from slimectl.planner.workload import Figure

Kind = Literal["embedding", "output", "attention", "mlp", "experts", "norms", "vision"]
KINDS: tuple[Kind, ...] = ("embedding", "attention", "mlp", "experts", "norms", "output", "vision")


@dataclass(frozen=True)
class ParameterPart:
    """Parameters of one kind in one layer. `cut` means sharded by tensor (experts: expert tensor) parallelism."""

    kind: Kind
    layer: int | None
    count: int
    cut: bool
    rows: int = 0
    """Rows that are padded to a multiple of the tensor-parallel size, or 0."""
    inner: int = 0
    """For adapters: elements per token between A and B."""
    tower: VisionTower | None = None
    """Shape of the vision tower, if the part is one."""
    frozen: bool = False


def parts_of(links: Sequence[ParamMapping]) -> list[ParameterPart]:
    """Sum the parameters of a family's links by kind and layer, without buffers."""
    counts: dict[tuple[Kind, int | None, bool, int], list[int]] = {}
    for link in links:
        if link.buffer:
            continue
        shape = link.shape
        key = (_kind(link), _layer(link.megatron), link.split is not None, shape[0] * link.padded)
        sums = counts.setdefault(key, [0, 0])
        sums[0] += math.prod(shape)
        sums[1] += shape[0] if ".adapter.A." in link.megatron else 0
    return [
        ParameterPart(kind, layer, count, cut, rows, inner)
        for (kind, layer, cut, rows), (count, inner) in counts.items()
    ]


def tower_part(tower: VisionTower, *, frozen: bool) -> ParameterPart:
    """Return the whole vision tower as a part."""
    return ParameterPart("vision", None, tower.parameters, cut=False, tower=tower, frozen=frozen)


def adapter_parts(links: Sequence[ParamMapping], rank: int, targets: Sequence[str]) -> list[ParameterPart]:
    """Parameters of adapters of rank `rank`. Raises SettingsError for a target that matches no layer."""
    layers = set(chosen(linear_layers(links), targets))
    pairs = [pair for link in links for pair in adapter_links(link, layers, rank)]
    return parts_of([half for pair in pairs for half in pair])


def _layer(name: str) -> int | None:
    return int(name.split(".")[2]) if name.startswith("decoder.layers.") else None


def _kind(link: ParamMapping) -> Kind:
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


def count(parts: Sequence[ParameterPart], *kinds: Kind) -> int:
    return sum(part.count for part in parts if not kinds or part.kind in kinds)


def activated(parts: Sequence[ParameterPart], architecture: Architecture) -> int:
    """Parameters of the decoder that a token uses: of the experts, only the top k."""
    experts, decoder = count(parts, "experts"), count(parts) - count(parts, "vision")
    if not experts:
        return decoder
    topk = int(architecture.transformer["moe_router_topk"])
    return decoder - experts + experts * topk // architecture.experts


@dataclass(frozen=True)
class LocalParams:
    """Parameters on one rank of a pipeline stage."""

    dense: int
    experts: int

    @property
    def all(self) -> int:
        return self.dense + self.experts


def local_params(
    parts: Sequence[ParameterPart], architecture: Architecture, layout: ParallelLayout, stage: int
) -> LocalParams:
    """Parameters on a rank of pipeline stage `stage`. A tied head is a copy of the embedding on the last stage."""
    dense = experts = 0
    for part in parts:
        if not _on_stage(part, architecture, layout, stage):
            continue
        if part.kind == "experts":
            experts += part.count // layout.expert // (layout.expert_tensor if part.cut else 1)
        elif part.rows:
            dense += -(-part.rows // layout.tensor) * (part.count // part.rows)
        else:
            dense += part.count // (layout.tensor if part.cut else 1)
    return LocalParams(dense, experts)


def _on_stage(part: ParameterPart, architecture: Architecture, layout: ParallelLayout, stage: int) -> bool:
    last = layout.pipeline - 1
    if part.layer is not None:
        return stage_of(part.layer, architecture.layers, layout) == stage
    if part.kind == "embedding":
        return stage == 0 or (architecture.tied and stage == last)
    return stage == last


def stage_of(layer: int, layers: int, layout: ParallelLayout) -> int:
    """Pipeline stage of a layer. With virtual stages every rank has several separate runs of layers.

    >>> [stage_of(layer, 8, ParallelLayout(pipeline=2, virtual_pipeline=2)) for layer in range(8)]
    [0, 0, 1, 1, 0, 0, 1, 1]
    """
    run = layers // layout.pipeline // (layout.virtual_pipeline or 1)
    return layer // run % layout.pipeline


def figures(
    parts: Sequence[ParameterPart],
    architecture: Architecture,
    layout: ParallelLayout,
    adapters: Sequence[ParameterPart] = (),
) -> list[Figure]:
    """Total counts, and the largest count on a rank."""
    by_kind = [(kind, count(parts, kind)) for kind in KINDS]
    result = [
        Figure("parameters", count(parts), "parameters", " + ".join(f"{kind} {n:,}" for kind, n in by_kind if n)),
    ]
    if count(parts, "experts"):
        k, experts = architecture.transformer["moe_router_topk"], architecture.experts
        dense = count(parts) - count(parts, "experts")
        formula = f"{dense:,} + experts {count(parts, 'experts'):,} x {k} chosen / {experts}"
        result.append(Figure("activated parameters", activated(parts, architecture), "parameters", formula))
    if adapters:
        adapters_formula = f"adapters, {count(adapters) / count(parts):.2%} of the frozen model"
        result.append(Figure("trained parameters", count(adapters), "parameters", adapters_formula))
    elif frozen := count(parts) - count(_unfrozen(parts)):
        formula = f"{count(parts):,} - {frozen:,} of the frozen vision tower"
        result.append(Figure("trained parameters", count(parts) - frozen, "parameters", formula))
    ranks = [local_params(parts, architecture, layout, stage) for stage in range(layout.pipeline)]
    largest = max(ranks, key=lambda rank: rank.all)
    formula = f"pipeline stage {ranks.index(largest)} of {layout.pipeline}: matrices / tensor {layout.tensor}"
    if largest.experts:
        sizes = f"expert {layout.expert} / expert_tensor {layout.expert_tensor}"
        formula += (
            f" = {formatting.parameters(largest.dense)}, experts / {sizes} = {formatting.parameters(largest.experts)}"
        )
    return [*result, Figure("parameters per rank", largest.all, "parameters", formula)]


@dataclass(frozen=True)
class ResidentModel:
    """A model on the ranks: `parts` are all of its parameters, `trained` the trainable ones."""

    name: Literal["policy", "critic", "reference", "teacher"]
    architecture: Architecture
    parts: Sequence[ParameterPart]
    trained: Sequence[ParameterPart] = ()

    @property
    def tower(self) -> VisionTower | None:
        return next((part.tower for part in self.parts if part.tower is not None), None)

    @property
    def trains_tower(self) -> bool:
        return count(self.trained, "vision") > 0

    @property
    def head(self) -> Literal["learns", "stays", "values"]:
        """Kind of the head: a trained matrix (learns), a frozen one (stays), or a value head."""
        if self.name == "critic":
            return "values"
        kind = "embedding" if self.architecture.tied else "output"
        return "learns" if any(part.kind == kind for part in self.trained) else "stays"

    @property
    def experts_learn(self) -> bool:
        """Whether routed experts are trained, rather than their adapters."""
        return count(self.trained, "experts") == count(self.parts, "experts")


def policy_of(
    architecture: Architecture, parts: Sequence[ParameterPart], adapters: Sequence[ParameterPart] = ()
) -> ResidentModel:
    """Build the policy. If there are adapters, only they are trained."""
    return ResidentModel("policy", architecture, [*parts, *adapters], adapters or _unfrozen(parts))


def _unfrozen(parts: Sequence[ParameterPart]) -> list[ParameterPart]:
    return [part for part in parts if not part.frozen]


def critic_of(
    architecture: Architecture, parts: Sequence[ParameterPart], adapters: Sequence[ParameterPart] = ()
) -> ResidentModel:
    """Build a critic on the same backbone. An untied LM head is in memory but not trained."""
    head = ParameterPart("output", None, int(architecture.transformer["hidden_size"]), cut=False)
    backbone = [part for part in _unfrozen(parts) if part.kind != "output"]
    return ResidentModel("critic", architecture, [*parts, *adapters, head], [*(adapters or backbone), head])
