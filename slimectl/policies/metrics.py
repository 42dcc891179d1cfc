"""Merges the metrics of packs and ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor


def merge_metrics(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge metrics of packs or ranks: sums by name, in order, or extremes where a name ends in _max or _min."""
    merged: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            if name not in merged:
                merged[name] = value
            elif name.endswith(("_max", "_min")):
                merged[name] = _extreme(name, merged[name], value)
            else:
                merged[name] = merged[name] + value
    return merged


def _extreme(name: str, *values: Any) -> Any:
    """Return the larger or the smaller value, depending on the name. Tensors are compared on their device."""
    largest = name.endswith("_max")
    if all(isinstance(value, Tensor) for value in values):
        return (torch.maximum if largest else torch.minimum)(*values)
    return (max if largest else min)(values)


def read_metrics(sums: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the numbers in scalar tensors of one device, waiting for a GPU only once."""
    if not sums:
        return {}
    return dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True))
