"""Keys and offsets of each parameter in Megatron's torch_dist checkpoints (mcore's sharded_state_dict).

Equal layers are stacked: `decoder.layers.mlp.linear_fc2.weight` is [layers, H, F], and the experts'
`decoder.layers.mlp.experts.experts.linear_fc2.weight` is [layers, experts, H, F]. If layers differ (in having experts
or linear attention), each has separate keys, `decoder.layers.3.…`, and only experts are stacked. Norms before a
projection have the names of TransformerEngine's fused modules.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from slimectl.architectures.config import Architecture
from slimectl.architectures.mapping import ParamMapping, Shape
from slimectl.errors import CheckpointError

BLOCK_NAMES = {
    "in_proj.weight": ("query", "key", "value", "z", "beta", "alpha"),
    "conv1d.weight": ("query", "key", "value"),
}
"""Parameters of the gated delta net whose blocks (TensorParallelSplit.blocks) have separate keys, by name suffix."""


@dataclass(frozen=True)
class KeyStyle:
    """Key style of mcore: layers `stacked` or separate, norms of `fused` modules (TransformerEngine) or local ones.

    The values are the same, but a model loads only its own keys.
    """

    stacked: bool
    fused: bool = False


@dataclass(frozen=True)
class ShardKey:
    """A region of a checkpoint's tensor and the rows of a Megatron parameter that it stores.

    The tensor `key` has the shape (*counts, *shape), where `counts` are the numbers of stacked layers and experts, and
    `offsets` the position among them. `rows` is the half-open range of the parameter's rows, usually all of them.
    """

    key: str
    offsets: tuple[int, ...]
    counts: tuple[int, ...]
    shape: Shape
    rows: tuple[int, int]


def key_style(architecture: Architecture, *, fused: bool = False) -> KeyStyle:
    """Return mcore's default key style for this model."""
    differ = any(isinstance(architecture.transformer.get(f"{x}_freq"), list) for x in ("moe_layer", "linear_attention"))
    return KeyStyle(stacked=not differ, fused=fused)


def shard_key(link: ParamMapping, architecture: Architecture, style: KeyStyle | None = None) -> tuple[ShardKey, ...]:
    """Return the regions of a parameter: more than one only if its blocks have separate keys.

    `decoder.layers.3.mlp.linear_fc2.weight` [H, F] of four equal layers is stored at offset 3 of
    `decoder.layers.mlp.linear_fc2.weight` [4, H, F].
    """
    style = style or key_style(architecture)
    key, offsets, counts = _key(link.megatron, architecture, style)
    names = next((names for end, names in BLOCK_NAMES.items() if key.endswith(f".self_attention.{end}")), None)
    if names is None or link.split is None:
        return (ShardKey(key, offsets, counts, link.shape, (0, link.shape[0])),)
    regions, first = [], 0
    for name, rows in zip(names, link.split.blocks, strict=True):
        regions.append(ShardKey(f"{key}.{name}", offsets, counts, (rows, *link.shape[1:]), (first, first + rows)))
        first += rows
    return tuple(regions)


def tensors(
    links: Iterable[ParamMapping], architecture: Architecture, style: KeyStyle | None = None
) -> dict[str, list[tuple[ParamMapping, ShardKey]]]:
    """Return the keys that a checkpoint of the model must have, each with its parameters in order of the links."""
    regions_by_key: dict[str, list[tuple[ParamMapping, ShardKey]]] = {}
    for link in links:
        for region in shard_key(link, architecture, style):
            regions_by_key.setdefault(region.key, []).append((link, region))
    return regions_by_key


def detect_key_style(keys: Collection[str], links: Iterable[ParamMapping], architecture: Architecture) -> KeyStyle:
    """Detect the key style of a checkpoint with these keys. Raises CheckpointError with a missing key."""
    links, missing = list(links), {}
    for style in _styles(architecture):
        missing[style] = [key for key in tensors(links, architecture, style) if key not in keys]
        if not missing[style]:
            return style
    missing_keys = min(missing.values(), key=len)
    more = f" and {len(missing_keys) - 1} more" if len(missing_keys) > 1 else ""
    raise CheckpointError(f"no tensor {missing_keys[0]}{more}. The checkpoint belongs to another model.")


def _styles(architecture: Architecture) -> Iterator[KeyStyle]:
    for stacked in (True, False) if key_style(architecture).stacked else (False,):
        for fused in (False, True):
            yield KeyStyle(stacked, fused)


def _key(name: str, architecture: Architecture, style: KeyStyle) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
    if not match:
        return name, (), ()
    layer, part = int(match[1]), match[2]
    prefix, offsets, counts = f"decoder.layers.{layer}.", [], []
    if style.stacked:
        prefix, offsets, counts = "decoder.layers.", [layer], [architecture.layers]
    expert = re.fullmatch(r"mlp\.experts\.local_experts\.(\d+)\.(.+)", part)
    if expert:
        part = f"mlp.experts.experts.{expert[2]}"
        offsets.append(int(expert[1]))
        counts.append(architecture.experts)
    else:
        part = _norm(part, layer, architecture, style)
    return prefix + part, tuple(offsets), tuple(counts)


def _norm(part: str, layer: int, architecture: Architecture, style: KeyStyle) -> str:
    """Return the name of a norm that is fused into the next projection. mcore's local modules use the same names."""
    projection_of_norm: dict[str, str] = {}
    if not architecture.mla:
        linear = architecture.linear_attention(layer)
        projection_of_norm["input_layernorm"] = "self_attention.in_proj" if linear else "self_attention.linear_qkv"
    elif style.fused:
        projection_of_norm = {
            f"self_attention.{x}_layernorm": f"self_attention.linear_{x}_up_proj" for x in ("q", "kv")
        }
    if not architecture.moe(layer) if style.fused else not architecture.mla:
        projection_of_norm["pre_mlp_layernorm"] = "mlp.linear_fc1"
    module, _, parameter = part.rpartition(".")
    return f"{projection_of_norm[module]}.layer_norm_{parameter}" if module in projection_of_norm else part
