"""The running sequences' caches: transformers' own cache objects, whose rows are the engine's slots.

B rows · T tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import (
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

SEQUENCES = ("keys", "values", "indexer_keys")
"""Attributes of a layer that have a vector for every token, in the dimension before the last."""

STATES = ("conv_states", "recurrent_states")
"""Attributes of a layer that have the same size for every sequence."""

KNOWN_LAYERS = {
    DynamicLayer, DynamicSlidingWindowLayer, DynamicIndexedLayer, LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
}  # fmt: skip
"""Layers that have nothing but SEQUENCES and STATES. A subclass may have more."""


def has_known_layers(cache: Any) -> bool:
    """Whether rows of this cache can be selected and joined with rows of another one."""
    return type(cache) is DynamicCache and all(type(layer) in KNOWN_LAYERS for layer in cache.layers)


@dataclass(slots=True, eq=False)
class Cohort:
    """Sequences that are decoded in one pass.

    Row `i` starts with `padding[i]` padded tokens, so that all rows end at `width` tokens. A cache of an unknown class
    has one row. A model without a cache computes the `tokens` of its row again at every step.
    """

    cache: Any
    width: int
    padding: list[int]
    slots: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    _mask_BT: Tensor | None = None

    def mask(self, device: torch.device) -> Tensor | None:
        """Return the mask [B, T] of the tokens so far and the next one, or None without padding."""
        if not any(self.padding):
            return None
        if self._mask_BT is None or self._mask_BT.shape[1] <= self.width:
            start_B1 = torch.tensor(self.padding, device=device)[:, None]
            self._mask_BT = torch.arange(2 * self.width + 2, device=device) >= start_B1
        return self._mask_BT[:, : self.width + 1]

    def clone(self) -> Cohort:
        """Return a copy with its own storage."""
        return self.select(range(len(self.padding)))

    def select(self, rows: Sequence[int]) -> Cohort:
        """Return a copy of some rows without the tokens that are padding in all of them."""
        padding = [self.padding[row] for row in rows]
        if not has_known_layers(self.cache):
            return Cohort(copy.deepcopy(self.cache), self.width, padding, tokens=list(self.tokens))
        common = min(padding)
        cache, width = copy.copy(self.cache), self.width - common
        index = torch.tensor(rows)
        cache.layers = [_selected(layer, index, width) for layer in cache.layers]
        return Cohort(cache, width, [count - common for count in padding])


def joined(cohorts: Sequence[Cohort]) -> Cohort:
    """Return one cohort with the rows of all, padded to the longest. The caches must have known layers."""
    width = max(cohort.width for cohort in cohorts)
    cache = copy.copy(cohorts[0].cache)
    layers = zip(*(cohort.cache.layers for cohort in cohorts), strict=True)
    cache.layers = [_joined(parts, width) for parts in layers]
    padding = [count + width - cohort.width for cohort in cohorts for count in cohort.padding]
    if not _grows(cache):  # there is nothing to mask
        padding = [0] * len(padding)
    return Cohort(cache, width, padding, [slot for cohort in cohorts for slot in cohort.slots])


def _selected(layer: Any, rows: Tensor, width: int) -> Any:
    """Return a copy of some rows of a layer, with the last `width` tokens."""
    selected = copy.copy(layer)
    for name, tensor in _tensors(layer):
        part = tensor[..., -_kept(layer, width) :, :] if name in SEQUENCES else tensor
        setattr(selected, name, part.index_select(0, rows.to(tensor.device)))
    _set_length(selected, width)
    return selected


def _joined(parts: Sequence[Any], width: int) -> Any:
    """Return a layer with the rows of all `parts`, with `width` tokens."""
    result = copy.copy(parts[0])
    for name, tensor in _tensors(parts[0]):
        tensors = [getattr(part, name) for part in parts]
        if name in SEQUENCES:
            length = _kept(parts[0], width)
            tensors = [F.pad(tensor, (0, 0, length - tensor.shape[-2], 0)) for tensor in tensors]
        setattr(result, name, torch.cat(tensors))
    _set_length(result, width)
    return result


def _grows(cache: Any) -> bool:
    """Whether any layer has vectors of every token. Otherwise there is nothing to pad."""
    return any(name in SEQUENCES for layer in cache.layers for name, _ in _tensors(layer))


def _has_index(cohort: Cohort) -> bool:
    """Whether layers choose tokens by an index, which does not see the padding (transformers 5.12)."""
    return any(isinstance(layer, DynamicIndexedLayer) for layer in cohort.cache.layers)


def _tensors(layer: Any) -> Iterator[tuple[str, Tensor]]:
    for name in (*SEQUENCES, *STATES):
        tensor = getattr(layer, name, None)
        if tensor is not None:
            yield name, tensor


def _kept(layer: Any, width: int) -> int:
    """Return how many of `width` tokens a layer keeps."""
    return min(width, layer.sliding_window - 1) if isinstance(layer, DynamicSlidingWindowLayer) else width


def _set_length(layer: Any, width: int) -> None:
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length = width


class CohortCache:
    """The cohorts of the running sequences. Slots 0, 1, 2 … are the running sequences.

    Cohorts are joined at `reserve`. Sequences of different lengths share a cohort if `pads` returns True. It is called
    when there are such sequences.
    """

    def __init__(self, *, pads: Callable[[], bool]) -> None:
        self._pads = pads
        self.cohorts: list[Cohort] = []
        """The cohorts to decode. Sequences that joined since `reserve` are not in them."""
        self._rows: list[tuple[Cohort, int]] = []  # by slot

    def reserve(self, *, slots: int, tokens: int, used: int, max_slots: int, max_tokens: int) -> None:
        """Keep the first `used` slots, and join their cohorts."""
        del self._rows[used:]
        rows: dict[Cohort, list[int]] = {}
        slots_of: dict[Cohort, list[int]] = {}
        for slot, (cohort, row) in enumerate(self._rows):
            rows.setdefault(cohort, []).append(row)
            slots_of.setdefault(cohort, []).append(slot)
        parts = []
        for cohort, indices in rows.items():
            part = cohort if indices == list(range(len(cohort.padding))) else cohort.select(indices)
            part.slots = slots_of[cohort]
            parts.append(part)
        growing = [part for part in parts if has_known_layers(part.cache) and _grows(part.cache)]
        pads = len({part.width for part in growing}) < 2 or (not any(map(_has_index, growing)) and self._pads())
        groups: dict[object, list[Cohort]] = {}
        for part in parts:
            key: object = part
            if has_known_layers(part.cache):
                key = None if pads or not _grows(part.cache) else part.width
            groups.setdefault(key, []).append(part)
        self.cohorts = [group[0] if len(group) == 1 else joined(group) for group in groups.values()]
        for cohort in self.cohorts:
            for row, slot in enumerate(cohort.slots):
                self._rows[slot] = cohort, row

    def put(self, first: int, count: int, prompt: Cohort, *, at: int) -> None:
        """Start `count` sequences in the slots from `first` on, each with a copy of a prompt of one row."""
        if has_known_layers(prompt.cache):
            copies = [prompt.select([0] * count)]
        else:
            copies = [prompt.select([0]) for _ in range(count)]
        self._rows += [(part, row) for part in copies for row in range(len(part.padding))]

    def put_state(self, first: int, count: int, state: None) -> None:
        """Do nothing: the prompt's cache has its states."""

    def move(self, source: int, target: int, *, tokens: int) -> None:
        """Let `target` be the slot of the sequence in `source`. Its rows are copied at the next `reserve`."""
        self._rows[target] = self._rows[source]
