"""The weights of a transformers module under the names of published checkpoints, written in place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from slimectl.architectures.config_checks import OTHER_MODEL
from slimectl.checkpoints.module_tensors import ModuleTensors, TensorGroup
from slimectl.checkpoints.name_conversions import module_tensors
from slimectl.engines.embedded.linear import Storage
from slimectl.engines.embedded.weights import FileTensor, NamedTensors, TensorSlot
from slimectl.errors import CheckpointError


class ModuleWeights:
    """A WeightStore (embedded/model_interface.py) around a transformers module."""

    def __init__(self, hf: Any, tensors: ModuleTensors, storage: Storage) -> None:
        self.storage = storage
        self._model_type: str = hf.config.model_type
        self._map = tensors
        self._stored = {name: tensor.data for name, tensor in module_tensors(hf).items()}
        self._found: dict[str, tuple[str, TensorGroup | None]] = {}
        self.places: dict[str, TensorSlot] = {}
        """Slots by published name. A tensor that transformers converts has one without a view."""
        for group in tensors.groups:
            for name, shape in group.published.items():
                slot = group.slots.get(name)
                view = None if slot is None else self._stored[slot.parameter][slot.index]
                self.places[name] = TensorSlot(shape, view)

    def published_name(self, name: str) -> str:
        return self._find(name)[0]

    def place(self, name: str, tensor: Tensor | FileTensor) -> TensorSlot | None:
        target, group = self._find(name)
        if group is None:
            if self._map.carries(name):
                return None
            raise CheckpointError(f"weights: {name} is not part of this {self._model_type} model. {OTHER_MODEL}")
        slot = self.places.get(target)
        if slot is None:  # a name of the module: a tied tensor's other name, or several published tensors in one
            slot = TensorSlot(tuple(self._stored[target].shape), self._stored[target])
        if tuple(tensor.shape) != slot.shape:
            raise CheckpointError(f"weights: {name} has shape {list(tensor.shape)}, expected {list(slot.shape)}")
        return slot

    @torch.no_grad()
    def write(self, tensors: NamedTensors) -> set[str]:
        """Write tensors one by one, and those that are converted with others as soon as all of these have arrived.

        Tensors of such a group that do not arrive in this call keep their values.
        """
        names: set[str] = set()
        incomplete: dict[tuple[str, ...], dict[str, Tensor]] = {}
        for name, tensor in tensors:
            slot = self.place(name, tensor)
            target, group = self._find(name)
            if slot is None or group is None:
                continue
            if slot.view is not None:
                slot.write(tensor)
                names |= {target} if target in group.published else group.published.keys()
                continue
            names.add(target)
            parts = incomplete.setdefault(group.parameters, {})
            parts[target] = _copied(tensor)
            if len(parts) == len(group.published):
                self._convert(incomplete.pop(group.parameters))
        for parameters, parts in incomplete.items():
            group = next(each for each in self._map.groups if each.parameters == parameters)
            self._convert(dict(self._published(group)) | parts)
        return names

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for group in self._map.groups:
            yield from self._published(group)

    def _find(self, name: str) -> tuple[str, TensorGroup | None]:
        if name not in self._found:
            self._found[name] = self._map.find(name)
        return self._found[name]

    def _published(self, group: TensorGroup) -> list[tuple[str, Tensor]]:
        return self._map.to_published(group, {name: self._stored[name] for name in group.parameters})

    def _convert(self, parts: Mapping[str, Tensor]) -> None:
        for parameter, value in self._map.converted(parts, "weights").items():
            self._stored[parameter].copy_(value)


def _copied(tensor: Tensor | FileTensor) -> Tensor:
    memory = torch.empty(tensor.shape, dtype=tensor.dtype)
    if isinstance(tensor, FileTensor):
        tensor.copy_to(memory)
    else:
        memory.copy_(tensor)
    return memory
