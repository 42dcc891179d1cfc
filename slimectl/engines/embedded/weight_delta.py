"""Applies a delta to a model's weights in place, writing only changed numbers and their panels.

C changed numbers of a tensor · N numbers of a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from slimectl.engines.embedded.weight_loader import WeightStore
from slimectl.engines.embedded.weights import TensorSlot
from slimectl.errors import CheckpointError
from slimectl.system.deltas import change_numbers

CODES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""safetensors codes of an engine's dtypes."""


class Delta(Protocol):
    """Changes from one weight version to another, tensor by tensor."""

    @property
    def start(self) -> str:
        """The weight version that the delta applies to."""
        ...

    @property
    def forms(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """safetensors code and shape of every tensor of the checkpoint."""
        ...

    def gaps(self, name: str, width: int) -> tuple[Any, Any]:
        """Return how many unchanged numbers precede each changed one [C], and the xor [C] of its old and new bits.

        Raises CheckpointError if they are damaged.
        """
        ...

    def matches(self, name: str, data: Any) -> bool:
        """Whether `data` has the bytes of the tensor after the changes."""
        ...


def check_delta(weights: WeightStore, delta: Delta) -> dict[str, TensorSlot]:
    """Return the targets of the delta's tensors. Raises CheckpointError if the delta does not fit these weights."""
    slots: dict[str, TensorSlot] = {}
    names = set()
    for name, (code, shape) in delta.forms.items():
        slot = weights.place(name, torch.empty(shape, device="meta"))
        if slot is None:
            continue
        names.add(weights.published_name(name))
        if CODES.get(weights.storage.dtype) != code or weights.storage.device.type != "cpu":
            raise CheckpointError(
                f"weights: {name} is {weights.storage.dtype} on {weights.storage.device} here, and {code} in the delta"
            )
        if slot.view is None and slot.linear is None:
            raise CheckpointError(
                f"weights: transformers converts {name} when it loads it, so a delta cannot change it. Set "
                f"sync.transport to tensor, distributed or disk."
            )
        slots[name] = slot
    missing = weights.places.keys() - names
    if missing:
        raise CheckpointError(f"weights: no tensor for {min(missing)} in the delta")
    return slots


def write_delta(slots: Mapping[str, TensorSlot], delta: Delta) -> None:
    """Write the changed numbers. Raises CheckpointError, after partial changes, if a checksum does not match."""
    for name, slot in slots.items():
        _change_tensor(slot, delta, name)
    for linear in {slot.linear for slot in slots.values() if slot.linear is not None}:
        linear.refresh()


def _change_tensor(slot: TensorSlot, delta: Delta, name: str) -> None:
    """Change a tensor, and its copies if the model repeats it for every head."""
    tensor = slot.read() if slot.view is None else slot.view
    gaps_C, bits_C = delta.gaps(name, tensor.element_size())
    indices_C = None
    for part in tensor if tensor.dim() > len(slot.shape) else [tensor]:
        numbers_N = part.view(-1).view(torch.uint8).numpy().view(bits_C.dtype)
        indices_C = change_numbers(numbers_N, gaps_C, bits_C)
        if not delta.matches(name, numbers_N):
            raise CheckpointError(f"weights: {name} does not match the delta's checksum after the change")
    if slot.view is None and slot.linear is not None:
        slot.linear.change(slot.first, tensor, torch.from_numpy(indices_C))
