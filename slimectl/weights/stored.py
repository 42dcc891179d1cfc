"""Where Megatron's torch_dist checkpoints keep each parameter: keys and offsets of mcore's sharded_state_dict.

A model of equal layers stacks them: `decoder.layers.mlp.linear_fc2.weight` is [layers, H, F], and its experts
`decoder.layers.mlp.experts.experts.linear_fc2.weight` [layers, experts, H, F]. Where layers differ (some dense, some
with experts; some of linear attention) each has keys of its own, `decoder.layers.3.…`, and only experts are stacked.
Norms before a projection take the name that TransformerEngine's fused modules give them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from slimectl.errors import CheckpointError
from slimectl.weights.architecture import Architecture
from slimectl.weights.joins import Shape
from slimectl.weights.links import Link

BLOCK_NAMES = {
    "in_proj.weight": ("query", "key", "value", "z", "beta", "alpha"),
    "conv1d.weight": ("query", "key", "value"),
}
"""Parameters whose blocks (Split.blocks) have a key each: the gated delta net's, by the end of their name."""


@dataclass(frozen=True)
class Naming:
    """Which of mcore's ways to name: layers `stacked` or one by one, norms as in its `fused` modules (those of
    TransformerEngine) or as in its local ones. The numbers are the same; a model loads only its own keys."""

    stacked: bool
    fused: bool = False


@dataclass(frozen=True)
class Stored:
    """A region of a checkpoint's tensor and the rows of a Megatron parameter that lie there.

    The tensor `key` has the shape (*counts, *shape): `counts` are the stacked layers and experts, `offsets` the
    position among them. `rows` are the parameter's first row and one past the last, all rows in most cases.
    """

    key: str
    offsets: tuple[int, ...]
    counts: tuple[int, ...]
    shape: Shape
    rows: tuple[int, int]


def naming(architecture: Architecture, *, fused: bool = False) -> Naming:
    """How mcore names this model's parameters when nothing else is asked of it."""
    differ = any(isinstance(architecture.transformer.get(f"{x}_freq"), list) for x in ("moe_layer", "linear_attention"))
    return Naming(stacked=not differ, fused=fused)


def stored(link: Link, architecture: Architecture, how: Naming | None = None) -> tuple[Stored, ...]:
    """Where a parameter lies; more than one region only where its blocks have keys of their own.

    `decoder.layers.3.mlp.linear_fc2.weight` [H, F] of four equal layers lies in `decoder.layers.mlp.linear_fc2.weight`
    [4, H, F] at offset 3.
    """
    how = how or naming(architecture)
    key, offsets, counts = _key(link.megatron, architecture, how)
    names = next((names for end, names in BLOCK_NAMES.items() if key.endswith(f".self_attention.{end}")), None)
    if names is None or link.split is None:
        return (Stored(key, offsets, counts, link.shape, (0, link.shape[0])),)
    regions, first = [], 0
    for name, rows in zip(names, link.split.blocks, strict=True):
        regions.append(Stored(f"{key}.{name}", offsets, counts, (rows, *link.shape[1:]), (first, first + rows)))
        first += rows
    return tuple(regions)


def tensors(
    links: Iterable[Link], architecture: Architecture, how: Naming | None = None
) -> dict[str, list[tuple[Link, Stored]]]:
    """Every key that a checkpoint of the model must have, with the parameters that fill it; in order of the links."""
    found: dict[str, list[tuple[Link, Stored]]] = {}
    for link in links:
        for region in stored(link, architecture, how):
            found.setdefault(region.key, []).append((link, region))
    return found


def naming_of(keys: Collection[str], links: Iterable[Link], architecture: Architecture) -> Naming:
    """How a checkpoint with these keys was named. Raises CheckpointError with what it lacks."""
    links, missing = list(links), {}
    for how in _ways(architecture):
        missing[how] = [key for key in tensors(links, architecture, how) if key not in keys]
        if not missing[how]:
            return how
    lacking = min(missing.values(), key=len)
    more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
    raise CheckpointError(f"no tensor {lacking[0]}{more}; the checkpoint was made for another model")


def _ways(architecture: Architecture) -> Iterator[Naming]:
    for stacked in (True, False) if naming(architecture).stacked else (False,):
        for fused in (False, True):
            yield Naming(stacked, fused)


def _key(name: str, architecture: Architecture, how: Naming) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    found = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
    if not found:
        return name, (), ()
    layer, part = int(found[1]), found[2]
    prefix, offsets, counts = f"decoder.layers.{layer}.", [], []
    if how.stacked:
        prefix, offsets, counts = "decoder.layers.", [layer], [architecture.layers]
    expert = re.fullmatch(r"mlp\.experts\.local_experts\.(\d+)\.(.+)", part)
    if expert:
        part = f"mlp.experts.experts.{expert[2]}"
        offsets.append(int(expert[1]))
        counts.append(architecture.experts)
    else:
        part = _norm(part, layer, architecture, how)
    return prefix + part, tuple(offsets), tuple(counts)


def _norm(part: str, layer: int, architecture: Architecture, how: Naming) -> str:
    """The name of a norm that the projection after it takes in (or that mcore's local modules name as if it did)."""
    into: dict[str, str] = {}
    if not architecture.mla:
        linear = architecture.linear_attention(layer)
        into["input_layernorm"] = "self_attention.in_proj" if linear else "self_attention.linear_qkv"
    elif how.fused:
        into = {f"self_attention.{x}_layernorm": f"self_attention.linear_{x}_up_proj" for x in ("q", "kv")}
    if not architecture.moe(layer) if how.fused else not architecture.mla:
        into["pre_mlp_layernorm"] = "mlp.linear_fc1"
    module, _, parameter = part.rpartition(".")
    return f"{into[module]}.layer_norm_{parameter}" if module in into else part
