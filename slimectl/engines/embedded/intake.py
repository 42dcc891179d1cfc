"""Loads new weights: as a whole, or in parts until they are one version."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

from slimectl.engines.embedded.weights import Weights
from slimectl.errors import CheckpointError

NamedTensors = Iterable[tuple[str, Tensor]]


class Intake:
    """Tracks whether an engine's weights are complete. Parts of two versions are not a complete set.

    `whole` means that no tensor is missing; `usable` that requests may queue: the weights are whole, or were when the
    current update began. `version` changes with the last tensor.
    """

    def __init__(self, weights: Weights) -> None:
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
        """Load all tensors, streamed. Raises CheckpointError, without weights, on a missing, extra or misshapen one."""
        all_names = set(self._weights.places)

        def mark_incomplete() -> Iterator[tuple[str, Tensor]]:
            for item in tensors:  # a source that cannot be opened leaves the old weights whole
                self.usable, self._missing = False, all_names
                yield item

        missing = all_names - self._weights.write(mark_incomplete())
        if missing:
            raise CheckpointError(_missing_message(missing))
        self._missing, self._next = set(), version
        self._complete()

    def update(self, tensors: list[tuple[str, Tensor]], *, version: str | None) -> None:
        """Load some tensors, checked before any is written. Outside a session the others stay unchanged."""
        for name, tensor in tensors:
            self._weights.place(name, tensor)
        if self._session_open and not self._received_any:
            self._received_any, self._missing = True, set(self._weights.places)
        self._next = version or self._next
        self._missing -= self._weights.write(tensors)
        if not self._session_open and self.whole:
            self._complete()

    def begin(self) -> None:
        """Open a session: a whole set will be loaded in parts. Raises CheckpointError if one is open."""
        if self._session_open:
            raise CheckpointError("a weight-update session is already open; end it before another begins")
        self._session_open, self._received_any = True, False

    def end(self) -> None:
        """Close the session. Raises CheckpointError if it received some tensors and not all."""
        if not self._session_open:
            raise CheckpointError("no weight-update session is open; begin one first")
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
    return f"weights: no tensor for {min(missing)} ({len(missing)} missing); give the whole model"
