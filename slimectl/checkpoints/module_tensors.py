"""Maps the tensors of a Hugging Face checkpoint to the parameters of a transformers module, and back.

transformers renames, fuses and transposes tensors when it loads a model, and reverts that when it saves one. Here its
own conversions run for one group of tensors at a time, so that a model is never in memory twice.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import Any, NamedTuple

from torch import Tensor, nn

from slimectl.architectures.config import raw_config, read_config
from slimectl.architectures.config_checks import OTHER_MODEL
from slimectl.architectures.mapping import Shape
from slimectl.architectures.registry import known_family
from slimectl.checkpoints.name_conversions import NameConversions, module_tensors
from slimectl.checkpoints.validate import ValidatedModel
from slimectl.errors import CheckpointError, first_line


@dataclass(frozen=True)
class Slot:
    """Destination of a tensor: `full[index]` of a parameter or buffer, either the whole or an expert's rows."""

    parameter: str
    index: tuple[int, slice] | EllipsisType = ...


@dataclass(frozen=True)
class TensorGroup:
    """Parameters and published tensors that convert together. Most groups have one of each."""

    parameters: tuple[str, ...]
    """First names in the module."""
    published: Mapping[str, Shape]
    slots: Mapping[str, Slot]
    """Slots of published tensors that are views of a parameter. Empty if they are computed from the whole group."""


class PlacedTensor(NamedTuple):
    """A tensor for a slot of the module.

    `name` is its published name, or "" if the published tensors of the whole group replace it.
    """

    name: str
    slot: Slot
    tensor: Tensor
    group: TensorGroup


class ModuleTensors:
    """The tensors of a transformers model under the names of its module and under those that `save_pretrained` writes.

    The module may be on the meta device. Tied parameters count once, under their first name in the module.
    """

    def __init__(self, hf: Any, *, stored: Collection[str] = (), optional: Collection[str] = ()) -> None:
        """`stored`: names in the checkpoint, for model types of which some checkpoints have names with a prefix.

        `optional`: parameters that a checkpoint may lack, such as adapters.
        """
        self._conversions, self._optional = NameConversions(hf, stored), optional
        tensors = module_tensors(hf)
        self._shapes: dict[str, Shape] = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self.first = _first_names(tensors)
        """First name of each parameter or persistent buffer, by all of its names in the module."""
        self.groups = _groups(self._conversions, hf, tensors, optional)
        """In the order of the module."""
        self.slots = {name: Slot(first) for name, first in self.first.items()}
        """Slots by the names of the module and, for views of a parameter, by published names."""
        self._groups: dict[str, TensorGroup] = {}
        self._published: dict[str, tuple[str, TensorGroup]] = {}
        for group in self.groups:
            self.slots |= group.slots
            self._groups |= dict.fromkeys(group.parameters, group)
            self._published |= {self._conversions.canonical(name): (name, group) for name in group.published}
        self._carried = _carried_patterns(hf)
        self.carried: list[str] = []
        """Names of tensors in the loaded checkpoint that the module does not use."""

    def pieces(self, parameter: str) -> Mapping[str, Shape]:
        """Return names and shapes of a parameter's parts: its published tensors, or itself if they are computed."""
        group = self._groups[parameter]
        return group.published if group.slots else {parameter: self._shapes[parameter]}

    def placed(self, tensors: Iterable[tuple[str, Tensor]], path: Path) -> Iterator[PlacedTensor]:
        """Place every tensor of a checkpoint as soon as its group is complete.

        Raises CheckpointError for tensors that the module lacks, and for missing or misshapen tensors.
        """
        self.carried = []
        pending: dict[tuple[str, ...], dict[str, Tensor]] = {}
        loaded: set[str] = set()
        for name, tensor in tensors:
            target, group = self.find(name)
            if group is None:
                if self.carries(name):
                    self.carried.append(name)
                    continue
                raise CheckpointError(f"{path}: the model has no {name}. {_remedy(path, name)}")
            loaded.add(target)
            if target not in group.published or group.slots:
                yield self._placed(name, target, tensor, group, path)
                continue
            parts = pending.setdefault(group.parameters, {})
            parts[target] = tensor
            if len(parts) == len(group.published):
                converted = self.converted(pending.pop(group.parameters), path)
                yield from (self._placed(each, each, converted[each], group, path) for each in group.parameters)
        self._check_complete(loaded, path)

    def to_module(self, tensors: Iterable[tuple[str, Tensor]], path: Path) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter and persistent buffer of the module once, by its first name.

        Raises CheckpointError like `placed`.
        """
        fused: dict[str, Tensor] = {}
        missing: dict[str, int] = {}
        done: set[str] = set()
        for _, slot, tensor, group in self.placed(tensors, path):
            if slot.index is not ...:
                if slot.parameter not in fused:
                    fused[slot.parameter] = tensor.new_empty(self._shapes[slot.parameter])
                    missing[slot.parameter] = len(group.published)
                fused[slot.parameter][slot.index] = tensor
                missing[slot.parameter] -= 1
                if missing[slot.parameter]:
                    continue
                tensor = fused.pop(slot.parameter)
            if slot.parameter not in done:
                done.add(slot.parameter)
                yield slot.parameter, tensor

    def to_published(self, group: TensorGroup, tensors: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
        """Return the published tensors of a group from its whole parameters, by their first names."""
        if group.slots:
            return [(name, tensors[slot.parameter][slot.index]) for name, slot in group.slots.items()]
        return list(self._conversions.to_published(tensors).items())

    def find(self, name: str) -> tuple[str, TensorGroup | None]:
        """Return the published name, or else the module's name, of a checkpoint's tensor, and its group or None."""
        published, group = self._published.get(self._conversions.canonical(name), (name, None))
        if group is not None:
            return published, group
        for renamed in (self._conversions.module_name(name), name):
            if renamed in self.first:
                return renamed, self._groups[self.first[renamed]]
        return name, None

    def carries(self, name: str) -> bool:
        """Whether checkpoints of this model may contain a tensor that the module does not use."""
        return any(pattern.search(name) for pattern in self._carried)

    def _placed(self, name: str, target: str, tensor: Tensor, group: TensorGroup, path: Path) -> PlacedTensor:
        """Return the tensor with its slot. `target` is a published name of the group, or a name in the module."""
        is_view = target in group.slots
        shape = group.published[target] if is_view else self._shapes[target]
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{path}: {name} has shape {list(tensor.shape)}, config.json asks for {list(shape)}."
                " Copy config and weights from the same checkpoint."
            )
        slot = group.slots[target] if is_view else self.slots[target]
        if not is_view:  # the other name of a tied parameter, or one tensor where published checkpoints have several
            target = self._conversions.published_name(target) if len(group.slots) == 1 else ""
        return PlacedTensor(target, slot, tensor, group)

    def converted(self, parts: Mapping[str, Tensor], path: Path | str) -> dict[str, Tensor]:
        """Return the parameters of a group from all of its published tensors. Raises CheckpointError."""
        try:
            return self._conversions.to_module(parts)
        except Exception as error:
            raise CheckpointError(
                f"{path}: transformers cannot convert {min(parts)} ({first_line(error):.200}). Copy config and weights"
                " from the same checkpoint."
            ) from error

    def _check_complete(self, loaded: set[str], path: Path) -> None:
        """Raise CheckpointError unless every group is loaded. `loaded`: published names, and names of the module.

        The other name of a tied parameter alone is not enough, because other programs read the first one.
        """
        whole = {name for name in loaded if self.first.get(name) == name} | set(self._optional)
        for group in self.groups:
            missing = [name for name in group.published if name not in loaded]
            if missing and not whole.issuperset(group.parameters):
                raise CheckpointError(
                    f"{path}: no tensor for {missing[0]}. The checkpoint is incomplete. Copy it again."
                )


def _groups(
    conversions: NameConversions, hf: Any, tensors: Mapping[str, Tensor], optional: Collection[str]
) -> list[TensorGroup]:
    members: dict[str, list[str]] = {}
    converters: dict[str, Any] = {}
    saved_names = _saved_names(hf, tensors)
    for name, saved in saved_names.items():
        key, converter = (saved, None) if name in optional else conversions.inverted_converter(saved)
        members.setdefault(key, []).append(name)
        if converter is not None:
            converters[key] = converter
    groups = []
    for key, names in members.items():
        if key not in converters:
            published = {conversions.published_name(key): tuple(tensors[names[0]].shape)}
            groups.append(TensorGroup((names[0],), published, {name: Slot(names[0]) for name in published}))
            continue
        empty = conversions.to_published({saved_names[name]: tensors[name].to("meta") for name in names})
        published = {name: tuple(tensor.shape) for name, tensor in empty.items()}
        slots = _expert_slots(names[0], tensors[names[0]], converters[key], published) if len(names) == 1 else {}
        groups.append(TensorGroup(tuple(names), published, slots))
    return groups


def _expert_slots(parameter: str, fused: Tensor, converter: Any, published: Mapping[str, Shape]) -> dict[str, Slot]:
    """Return the slots of published tensors that are single experts' matrices in one parameter [E, rows, columns]."""
    operations = [(type(operation).__name__, vars(operation)) for operation in converter.operations]
    split = ("SplitModulelist", {"dim": 0})
    if operations not in ([split], [("Chunk", {"dim": 1}), split]):
        return {}
    experts, rows = fused.shape[:2]
    share = rows * experts // len(published)
    return {
        name: Slot(parameter, (i % experts, slice(i // experts * share, (i // experts + 1) * share)))
        for i, name in enumerate(published)
    }


def tied_names(hf: nn.Module) -> dict[str, str]:
    """Return the first name of every tied parameter or buffer, by its other names."""
    return {name: first for name, first in _first_names(module_tensors(hf)).items() if name != first}


def _first_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in tensors.items()}


def _saved_names(hf: Any, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return for each first name the name under which transformers saves the parameter: the source of a tie."""
    tied = getattr(hf, "all_tied_weights_keys", None) or {}
    saved: dict[str, str] = {}
    for name, first in _first_names(tensors).items():
        if first not in saved or (saved[first] in tied and name not in tied):
            saved[first] = name
    return saved


def _carried_patterns(hf: Any) -> list[re.Pattern[str]]:
    """Return patterns for tensors that a model's checkpoints contain but its module does not use."""
    patterns = [r"rotary_emb\.inv_freq$", *(getattr(hf, "_keys_to_ignore_on_load_unexpected", None) or ())]
    config = hf.config.get_text_config().to_dict()
    if (family := known_family(config.get("model_type"))) is not None:
        patterns += family.of(config).carried
    return [re.compile(pattern) for pattern in patterns]


def _remedy(path: Path, name: str) -> str:
    """Return what to do about a tensor that the module lacks. Its family may have it in another layout."""
    has_family = known_family(raw_config(path).get("model_type")) is not None
    if has_family and any(name in link.hf for link in ValidatedModel(read_config(path)).links):
        return "fsdp does not read this layout. Train it with the megatron backend"
    return OTHER_MODEL
