"""SGLang's payload of tensors for a process of this machine: one flat buffer, pickled.

SGLang's own payloads name classes of SGLang, which the trainer's Python may not have. It reads the fields of a tensor's
metadata by name only and its unpickler accepts plain namespaces (checked in 0.5.18, 0.5.20 and 0.5.21), so these are
used.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from slimectl.engines.http.weight_client import NamedTensor, aligned

DEVICE_INDEX = 6
"""Index of the device in the arguments of torch's reduction of a CUDA tensor."""


def flatten(tensors: Sequence[NamedTensor]) -> tuple[Tensor, list[SimpleNamespace]]:
    """Concatenate the bytes of all tensors into one [N] uint8 tensor on their device; also returns their ranges."""
    parts, places, end = [], [], 0
    for name, tensor in aligned(tensors):
        part = tensor.detach().contiguous().view(-1).view(torch.uint8)
        start, end = end, end + part.numel()
        places.append(
            SimpleNamespace(
                name=name, shape=tensor.shape, dtype=tensor.dtype, start_idx=start, end_idx=end, numel=part.numel()
            )
        )
        parts.append(part)
    return torch.cat(parts), places


def pickled(flat: Tensor, places: list[SimpleNamespace]) -> bytes:
    """Pickle a flat buffer as SGLang's load_format "flattened_bucket".

    On a CPU the bytes themselves: handles of torch's shared memory either need the receiver to know this process's
    authentication key, and kill SGLang's scheduler when it does not, or leave a daemon behind. On a GPU a handle of
    CUDA IPC, good as long as `flat` lives.
    """
    return pickle.dumps({"flattened_tensor": _Handle(flat) if flat.is_cuda else flat, "metadata": places})


class _Handle:
    """CUDA tensor that is pickled as torch.multiprocessing would, but with its device's UUID instead of the index.

    The two processes may number the devices differently; SGLang looks the UUID up.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        from torch.multiprocessing.reductions import reduce_tensor

        rebuild, arguments = reduce_tensor(self.tensor)
        uuid = str(torch.cuda.get_device_properties(arguments[DEVICE_INDEX]).uuid)
        return rebuild, (*arguments[:DEVICE_INDEX], uuid, *arguments[DEVICE_INDEX + 1 :])
