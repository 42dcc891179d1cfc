"""Weights by published name as the engine sees them, and the loader that tracks whether they are complete."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from slimectl.engines.embedded.linear import Storage
from slimectl.engines.embedded.weights import FileTensor, NamedTensors, TensorSlot
from slimectl.errors import CheckpointError
from slimectl.system.liveness import note_progress


class WeightStore(Protocol):
    """Weights by the names of published checkpoints, written in place."""

    @property
    def places(self) -> Mapping[str, TensorSlot]:
        """The target of every tensor."""
        ...

    @property
    def storage(self) -> Storage: ...

    def published_name(self, name: str) -> str:
        """Return a tensor's name in published checkpoints. Other writers may use another one."""
        ...

    def place(self, name: str, tensor: Tensor | FileTensor) -> TensorSlot | None:
        """Return the target of a tensor, or None if this model does not store it.

        Raises CheckpointError if the tensor is not part of the model or has the wrong shape.
        """
        ...

    def write(self, tensors: NamedTensors) -> set[str]:
        """Copy tensors to the storage in any order, and return the written names. Raises like `place`."""
        ...

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor as stored) for every tensor."""
        ...


class WeightLoader:
    """Loads weights and tracks whether they are complete. Parts of two versions are not complete.

    `whole` means that no tensor is missing. `usable` means that requests may queue: the weights are whole, or were when
    the current update began. `version` changes when the last tensor arrives.
    """

    def __init__(self, weights: WeightStore) -> None:
        self.version = ""
        self.usable = False
        self._weights = weights
        self._missing = set(weights.places)
        self._next: str | None = None
        self._session_open = False
        self._received_any = False  # whether the session has received a tensor

    @property
    def whole(self) -> bool:
        return not self._missing

    def load(self, tensors: NamedTensors, *, version: str) -> None:
        """Load all tensors as they arrive.

        Raises CheckpointError for a missing, extra or misshapen tensor, which leaves the engine without weights.
        """
        all_names = set(self._weights.places)

        def mark_incomplete() -> Iterator[tuple[str, Tensor | FileTensor]]:
            for item in tensors:  # if the source cannot be opened, the old weights stay whole
                self.usable, self._missing = False, all_names
                note_progress()
                yield item

        missing = all_names - self._weights.write(mark_incomplete())
        if missing:
            raise CheckpointError(_missing_message(missing))
        self._missing, self._next = set(), version
        self._complete()

    def update(self, tensors: Sequence[tuple[str, Tensor | FileTensor]], *, version: str | None) -> None:
        """Load some tensors. All are checked before any is written. Outside a session, the others stay unchanged."""
        for name, tensor in tensors:
            self._weights.place(name, tensor)
        if self._session_open and not self._received_any:
            self._received_any, self._missing = True, set(self._weights.places)
        self._next = version or self._next
        self._missing -= self._weights.write(tensors)
        if not self._session_open and self.whole:
            self._complete()

    def replace(self, tensors: NamedTensors, *, version: str) -> None:
        """Replace some tensors as they arrive. Together with the unchanged ones, they form `version`.

        Raises CheckpointError. Any error leaves the engine without weights, because they may be a mix of two versions.
        """
        previous, self._missing = self._missing, set(self._weights.places)
        self._weights.write(tensors)
        self._missing, self._next = previous, version
        self._complete()

    def change(self, write: Callable[[], None], *, start: str, version: str) -> None:
        """Update the weights from `start` to `version` with `write`.

        Raises CheckpointError if they are not at `start`. An error in `write` leaves the engine without weights.
        """
        if not self.whole or self._session_open or self.version != start:
            raise CheckpointError(
                f"weights: the delta applies to version {start}, but the engine has {self.version or 'none'}"
            )
        self.usable, self._missing = False, set(self._weights.places)
        write()
        self._missing, self._next = set(), version
        self._complete()

    def begin(self) -> None:
        """Open a session, in which all weights are loaded in parts. Raises CheckpointError if one is already open."""
        if self._session_open:
            raise CheckpointError("a weight-update session is already open. End it before you begin another one.")
        self._session_open, self._received_any = True, False

    def end(self) -> None:
        """Close the session. Raises CheckpointError if it received only some of the tensors."""
        if not self._session_open:
            raise CheckpointError("no weight-update session is open. Begin one first.")
        self._session_open = False
        if not self._received_any:
            return
        if not self.whole:
            self.usable = False
            raise CheckpointError(_missing_message(self._missing))
        self._complete()

    def _complete(self) -> None:
        self.version, self._next = self._next or self.version, None
        self.usable = True


def _missing_message(missing: set[str]) -> str:
    return f"weights: no tensor for {min(missing)} ({len(missing)} missing). Send the whole model."
