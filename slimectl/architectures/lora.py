"""LoRA adapters of linear layers: Hugging Face names, Megatron parameters and merging.

K rank · I inputs · O outputs of a Hugging Face layer.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from slimectl.architectures.mapping import ConcatRows, ParamMapping, TensorParallelSplit
from slimectl.errors import SettingsError

if TYPE_CHECKING:
    from torch import Tensor

_LINEAR = re.compile(r"decoder\.layers\.\d+\..*\b(linear_\w+|in_proj|out_proj)\.weight")


def halves(layer: str) -> tuple[str, str]:
    """Return the names of A [K, I] and B [O, K] of a layer, in peft's convention."""
    return f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"


def is_adapter(name: str) -> bool:
    """Return whether a parameter belongs to an adapter."""
    return name.endswith((".lora_A.weight", ".lora_B.weight"))


def layer_of(name: str) -> str:
    """Return the layer name of an adapter parameter."""
    return name.removesuffix(".weight").rpartition(".")[0]


def merged(weight_OI: Tensor, a_KI: Tensor, b_OK: Tensor, scale: float) -> Tensor:
    """Return W + scale B A in float32, for A and B in float32.

    Trainers and engines both use this function, so on the same kind of processor the sums have the same bits.
    """
    return (b_OK @ a_KI).mul_(scale).add_(weight_OI)


def chosen(layers: Iterable[str], targets: Sequence[str]) -> list[str]:
    """Select the layers whose last name is in `targets`. Raises SettingsError for a target that matches no layer.

    >>> chosen(["layers.0.q_proj", "layers.0.k_proj", "layers.1.q_proj"], ["q_proj"])
    ['layers.0.q_proj', 'layers.1.q_proj']
    """
    layers = list(layers)
    layer_names = {_last_name(layer) for layer in layers}
    for target in targets:
        if target not in layer_names:
            raise SettingsError(
                f"train.lora_targets: no linear layer is named {target}. Available: {sorted(layer_names)}"
            )
    return [layer for layer in layers if _last_name(layer) in targets]


def linear_layers(links: Sequence[ParamMapping]) -> list[str]:
    """List the Hugging Face layers that are matrices of a Megatron model's decoder, except routers.

    Experts in one tensor are not layers, and matrices without gradient are left out.
    """
    matrices = [link for link in links if _LINEAR.fullmatch(link.megatron) and not link.frozen]
    names = [name for link in matrices for name in link.hf]
    return [name.removesuffix(".weight") for name in names if name.endswith(".weight")]


def adapter_links(link: ParamMapping, layers: Collection[str], rank: int) -> list[tuple[ParamMapping, ParamMapping]]:
    """Build the links of A and B for the Hugging Face layers of the matrix `link` that are in `layers`.

    If tensor parallelism splits the rows of the matrix, it splits the rows of B. If it splits the columns, it splits
    the columns of A. The other one is replicated. Each layer has its own pair, even if Megatron fuses layers, because
    peft's files are not fused.

    >>> split = TensorParallelSplit(1)
    >>> link = ParamMapping("decoder.layers.0.mlp.linear_fc2.weight", ("down.weight",), ((2, 6),), split=split)
    >>> [(half.megatron, half.shape, half.split) for half in adapter_links(link, {"down"}, rank=4)[0]]
    [('decoder.layers.0.mlp.linear_fc2.adapter.A.down', (4, 6), TensorParallelSplit(axis=1, blocks=())), \
('decoder.layers.0.mlp.linear_fc2.adapter.B.down', (2, 4), None)]
    """
    pairs = []
    module = f"{link.megatron.removesuffix('.weight')}.adapter"
    by_columns = link.split if link.split is not None and link.split.axis == 1 else None
    for name, shape, by_rows in zip(link.hf, link.shapes, _row_splits(link), strict=True):
        layer = name.removesuffix(".weight")
        if layer in layers:
            (outputs, inputs), (a, b) = shape, halves(layer)
            pairs.append((
                ParamMapping(f"{module}.A.{_last_name(layer)}", (a,), ((rank, inputs),), split=by_columns),
                ParamMapping(f"{module}.B.{_last_name(layer)}", (b,), ((outputs, rank),), split=by_rows),
            ))  # fmt: skip
    return pairs


def _row_splits(link: ParamMapping) -> list[TensorParallelSplit | None]:
    """Return the tensor-parallel split of the rows of each Hugging Face layer of a matrix."""
    if link.split is None or link.split.axis != 0:
        return [None] * len(link.hf)
    if not isinstance(link.join, ConcatRows):
        # A single layer is split like the matrix. Each rank holds consecutive groups, so consecutive rows of each
        # layer.
        return [link.split if len(link.hf) == 1 else TensorParallelSplit(0)] * len(link.hf)
    blocks, splits = iter(link.split.blocks), list[TensorParallelSplit | None]()
    for shape in link.shapes:
        layer_blocks = [next(blocks)]
        while sum(layer_blocks) < shape[0]:
            layer_blocks.append(next(blocks))
        splits.append(TensorParallelSplit(0, tuple(layer_blocks)))
    return splits


def _last_name(layer: str) -> str:
    return layer.rpartition(".")[2]
