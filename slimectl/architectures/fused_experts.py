"""Per-expert views of checkpoints that store all experts of a layer in two tensors.

E experts · F width of an expert · H hidden width.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from slimectl.architectures.mapping import Shape
from slimectl.errors import CheckpointError

_FUSED = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)")


@dataclass(frozen=True)
class TensorView:
    """A part of the tensor `source`: `tensor[view.index]` has `shape`."""

    source: str
    index: tuple[int, slice]
    shape: Shape


def views(shapes: Mapping[str, Shape]) -> dict[str, TensorView]:
    """Return views of each expert's matrices in the fused tensors of a checkpoint. Empty if it has none.

    `….experts.gate_up_proj` is [E, 2F, H], gate over up. `….experts.down_proj` is [E, H, F]. The views are named
    `….experts.0.gate_proj.weight` and so on. Raises CheckpointError for a tensor of another shape.
    """
    result: dict[str, TensorView] = {}
    for name, shape in shapes.items():
        match = _FUSED.fullmatch(name)
        if not match:
            continue
        if len(shape) != 3 or (match[2] == "gate_up_proj" and shape[1] % 2):
            raise CheckpointError(
                f"{name} has shape {list(shape)}, expected experts x rows x columns. Convert it again."
            )
        for expert in range(shape[0]):
            result |= dict(_parts(name, match[1], match[2], expert, shape))
    return result


def _parts(source: str, prefix: str, kind: str, expert: int, shape: Shape) -> Iterable[tuple[str, TensorView]]:
    _, rows, columns = shape
    names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
    share = rows // len(names)
    for i, name in enumerate(names):
        rows_of_part = slice(i * share, (i + 1) * share)
        yield f"{prefix}.{expert}.{name}.weight", TensorView(source, (expert, rows_of_part), (share, columns))
