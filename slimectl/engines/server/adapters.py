"""LoRA adapters pushed by a trainer: checks them, and merges them into the base model on disk.

K rank · I inputs · O outputs of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from slimectl.architectures.lora import halves, is_adapter, layer_of, merged
from slimectl.chats.requests import RequestBody
from slimectl.engines.embedded.engine import EmbeddedEngine
from slimectl.engines.embedded.weights import FileTensor
from slimectl.engines.server.request_keys import ADAPTER
from slimectl.errors import CheckpointError

MOST_LAYERS, HIGHEST_RANK = 2**20, 2**16
REMEDY = 'push whole weights with sync.lora = "merged"'


class AdapterBase(Protocol):
    """The base model of an adapter, implemented by checkpoints.base_model.BaseModel."""

    @property
    def folder(self) -> Path: ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def get(self, name: str) -> Tensor: ...

    @property
    def fingerprint(self) -> str: ...


@dataclass(frozen=True, slots=True)
class MergedAdapter:
    """The weights of an engine: a base model with adapters merged into `layers`."""

    base: AdapterBase
    layers: frozenset[str] = frozenset()


@dataclass
class AdapterUpdate:
    """An adapter of `layers` layers, with the float32 parts received so far."""

    base: AdapterBase
    rank: int
    scale: float
    layers: int
    version: str | None = None
    parts: dict[str, Tensor] = field(default_factory=dict)

    def add(self, tensors: Iterable[tuple[str, Tensor | FileTensor]], version: str | None) -> None:
        """Add all tensors of a message, or none.

        Raises CheckpointError for a tensor that is not part of the adapter.
        """
        message = list(tensors)
        for name, tensor in message:
            self._check(name, tuple(tensor.shape), tensor.dtype)
        for name, tensor in message:
            part = torch.empty(tensor.shape, dtype=torch.float32)
            if isinstance(tensor, FileTensor):
                tensor.copy_to(part)
            else:
                part.copy_(tensor)
            self.parts[name] = part
        self.version = version or self.version

    def _check(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        weight_shape = self.base.shapes.get(f"{layer_of(name)}.weight", ())
        if not is_adapter(name) or len(weight_shape) != 2:
            raise CheckpointError(f"weights: {name[:200]} is not an adapter of a layer of {self.base.folder}")
        outputs, inputs = weight_shape
        expected = (self.rank, inputs) if name == halves(layer_of(name))[0] else (outputs, self.rank)
        if shape != expected or not dtype.is_floating_point:
            kind = str(dtype).removeprefix("torch.")
            raise CheckpointError(
                f"weights: {name} has shape {list(shape)} in {kind}, expected {list(expected)} in float32 for rank "
                f"{self.rank}"
            )

    def check_complete(self) -> None:
        """Raise CheckpointError if parts are missing."""
        layers = {layer_of(name) for name in self.parts}
        complete_layers = [layer for layer in layers if self.parts.keys() >= set(halves(layer))]
        if not len(complete_layers) == len(layers) == self.layers:
            raise CheckpointError(
                f"weights: {len(complete_layers)} of the adapter's {self.layers} layers are complete. Push it again."
            )

    def apply(self, engine: EmbeddedEngine, merged: MergedAdapter | None) -> MergedAdapter:
        """Load the base model with this adapter merged. `merged` is the state of the engine's current weights."""
        layers = {layer_of(name) for name in self.parts}
        version = self.version or engine.weight_version
        if merged is not None and engine.has_weights and merged.base.folder == self.base.folder:
            # In the order of the base model, so that layers are read, merged and packed one after another.
            weights = {f"{layer}.weight" for layer in layers | merged.layers}
            engine.replace_weights(self._merged(name for name in self.base.shapes if name in weights), version=version)
        else:
            engine.load_weights(self._merged(self.base.shapes), version=version)
        return MergedAdapter(self.base, frozenset(layers))

    def _merged(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            weight = self.base.get(name)
            a, b = halves(name.removesuffix(".weight"))
            if a in self.parts:
                weight = merged(weight, self.parts[a], self.parts[b], self.scale)
            yield name, weight


def announced(fields: RequestBody, folder: Path, open_base: Callable[[Path], AdapterBase]) -> AdapterUpdate | None:
    """Read the field `adapter` of a request and open its base model. Return None without the field.

    The base model is in the trainer's folder if this machine has it, else in the server's own `folder`. Raises
    CheckpointError if its fingerprint is not the trainer's.
    """
    if "adapter" not in fields:
        return None
    adapter = fields.inner("adapter")
    adapter.check(ADAPTER)
    base_folder = Path(adapter.text("base", longest=4096) or folder)
    base = open_base(base_folder if base_folder.is_dir() else folder)
    if base.fingerprint != adapter.needed("fingerprint"):
        raise CheckpointError(
            f"weights: {base.folder} is not the model that the adapter was trained on. To avoid this, {REMEDY}."
        )
    rank = adapter.whole("rank", 0, low=1, high=HIGHEST_RANK)
    alpha = adapter.number("alpha", 0.0, low=0.0, high=float("inf"))
    layers = adapter.whole("layers", 0, low=1, high=MOST_LAYERS)
    if not (rank and alpha and layers):
        raise adapter.refuse("rank", "rank, alpha and layers are all required")
    return AdapterUpdate(base, rank, alpha / rank, layers)
