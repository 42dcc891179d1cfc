"""Low-rank adapters of linear layers by their Hugging Face names, and as parameters of Megatron.

K rank · I inputs · O outputs of a Hugging Face layer.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence

from slimectl.errors import SettingsError
from slimectl.weights.joins import Rows
from slimectl.weights.links import Link, Split

_LINEAR = re.compile(r"decoder\.layers\.\d+\..*\b(linear_\w+|in_proj|out_proj)\.weight")


def halves(layer: str) -> tuple[str, str]:
    """The names of A [K, I] and B [O, K] of a layer, as peft has them."""
    return f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    return name.endswith((".lora_A.weight", ".lora_B.weight"))


def chosen(layers: Iterable[str], targets: Sequence[str]) -> list[str]:
    """The layers whose last name is among `targets`. Raises SettingsError for a target that is no layer's.

    >>> chosen(["layers.0.q_proj", "layers.0.k_proj", "layers.1.q_proj"], ["q_proj"])
    ['layers.0.q_proj', 'layers.1.q_proj']
    """
    layers = list(layers)
    known = {_last(layer) for layer in layers}
    for target in targets:
        if target not in known:
            raise SettingsError(f"train.lora_targets: no linear layer is called {target}; there are {sorted(known)}")
    return [layer for layer in layers if _last(layer) in targets]


def linear_layers(links: Sequence[Link]) -> list[str]:
    """The Hugging Face layers that are matrices of a Megatron model's decoder; routers are not among them."""
    return [name.removesuffix(".weight") for link in links if _LINEAR.fullmatch(link.megatron) for name in link.hf]


def adapter_links(link: Link, layers: Collection[str], rank: int) -> list[tuple[Link, Link]]:
    """A and B of those Hugging Face layers of the matrix `link` that are among `layers`.

    Where tensor parallelism cuts the matrix's rows it cuts those of B, where it cuts columns those of A; the other is
    every rank's. Each layer has its own pair though Megatron fuses layers: peft's files know no fusion.

    >>> link = Link("decoder.layers.0.mlp.linear_fc2.weight", ("down.weight",), ((2, 6),), split=Split(1))
    >>> [(half.megatron, half.shape, half.split) for half in adapter_links(link, {"down"}, rank=4)[0]]
    [('decoder.layers.0.mlp.linear_fc2.adapter.A.down', (4, 6), Split(axis=1, blocks=())), \
('decoder.layers.0.mlp.linear_fc2.adapter.B.down', (2, 4), None)]
    """
    found = []
    module = f"{link.megatron.removesuffix('.weight')}.adapter"
    by_columns = link.split if link.split is not None and link.split.axis == 1 else None
    for name, shape, by_rows in zip(link.hf, link.shapes, _by_rows(link), strict=True):
        layer = name.removesuffix(".weight")
        if layer in layers:
            (outputs, inputs), (a, b) = shape, halves(layer)
            found.append((
                Link(f"{module}.A.{_last(layer)}", (a,), ((rank, inputs),), split=by_columns),
                Link(f"{module}.B.{_last(layer)}", (b,), ((outputs, rank),), split=by_rows),
            ))  # fmt: skip
    return found


def _by_rows(link: Link) -> list[Split | None]:
    """How tensor parallelism cuts the rows of each Hugging Face layer of a matrix."""
    if link.split is None or link.split.axis != 0:
        return [None] * len(link.hf)
    if not isinstance(link.join, Rows):
        # One layer is cut as the matrix is; of groups every rank holds a run, and so a run of each layer's rows.
        return [link.split if len(link.hf) == 1 else Split(0)] * len(link.hf)
    blocks, cuts = iter(link.split.blocks), list[Split | None]()
    for shape in link.shapes:
        inside = [next(blocks)]
        while sum(inside) < shape[0]:
            inside.append(next(blocks))
        cuts.append(Split(0, tuple(inside)))
    return cuts


def _last(layer: str) -> str:
    return layer.rpartition(".")[2]
