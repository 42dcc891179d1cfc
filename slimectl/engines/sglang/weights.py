"""Splits a whole set of weights into buckets of bounded size, and checks each tensor against the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from slimectl.errors import CheckpointError
from slimectl.ports import NamedTensors

if TYPE_CHECKING:
    from torch import Tensor, dtype

Forms = Mapping[str, "tuple[tuple[int, ...], dtype]"]


def buckets(tensors: NamedTensors, forms: Forms, *, bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield buckets of about `bucket_bytes`; `forms` has the names and shapes of the model.

    Raises CheckpointError on an extra or misshapen tensor before it is yielded, and at the end on a missing one.
    """
    missing = set(forms)
    bucket: list[tuple[str, Tensor]] = []
    bucket_size = 0
    for name, tensor in tensors:
        if name not in forms:
            raise CheckpointError(f"weights: {name} is not part of this model")
        shape = tuple(forms[name][0])
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"weights: {name} has shape {list(tensor.shape)}, expected {list(shape)}")
        missing.discard(name)
        bucket.append((name, tensor))
        bucket_size += tensor.numel() * tensor.element_size()
        if bucket_size >= bucket_bytes:
            yield bucket
            bucket, bucket_size = [], 0
    if missing:
        raise CheckpointError(f"weights: {min(missing)} is missing ({len(missing)} in all)")
    if bucket:
        yield bucket
