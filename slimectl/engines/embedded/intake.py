"""How new weights come in: as a whole, or part by part until they are one version."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

from slimectl.engines.embedded.weights import Weights
from slimectl.errors import CheckpointError

NamedTensors = Iterable[tuple[str, Tensor]]


class Intake:
    """Which weights an engine has. Half of one version beside half of another are no weights.

    `whole` says that nothing is missing; `usable` that requests may queue: the weights are whole, or were when the
    update under way began. `version` changes when the last tensor has come.
    """

    def __init__(self, weights: Weights) -> None:
        self.version = ""
        self.usable = False
        self._weights = weights
        self._missing = set(weights.places)
        self._next: str | None = None
        self._session = False
        self._begun = False  # whether the session has brought anything

    @property
    def whole(self) -> bool:
        return not self._missing

    def load(self, tensors: NamedTensors, *, version: str) -> None:
        """All of them, streamed. Raises CheckpointError on a missing, extra or misshapen one; then there are none."""
        everything = set(self._weights.places)

        def arriving() -> Iterator[tuple[str, Tensor]]:
            for item in tensors:  # what cannot even be opened leaves the old ones whole
                self.usable, self._missing = False, everything
                yield item

        missing = everything - self._weights.write(arriving())
        if missing:
            raise CheckpointError(_told(missing))
        self._missing, self._next = set(), version
        self._completed()

    def update(self, tensors: list[tuple[str, Tensor]], *, version: str | None) -> None:
        """Some of them; checked before any is written. Outside a session the rest stays as it is."""
        for name, tensor in tensors:
            self._weights.place(name, tensor)
        if self._session and not self._begun:
            self._begun, self._missing = True, set(self._weights.places)
        self._next = version or self._next
        self._missing -= self._weights.write(tensors)
        if not self._session and self.whole:
            self._completed()

    def begin(self) -> None:
        """Open a session: a whole set will come, in parts. Raises CheckpointError if one is open."""
        if self._session:
            raise CheckpointError("a weight-update session is already open; end it before another begins")
        self._session, self._begun = True, False

    def end(self) -> None:
        """Close the session. Raises CheckpointError if it brought some tensors and not all."""
        if not self._session:
            raise CheckpointError("no weight-update session is open; begin one first")
        self._session = False
        if not self._begun:
            return
        if not self.whole:
            self.usable = False
            raise CheckpointError(_told(self._missing))
        self._completed()

    def _completed(self) -> None:
        self.version, self._next = self._next or self.version, None
        self.usable = True


def _told(missing: set[str]) -> str:
    return f"weights: no tensor for {min(missing)} ({len(missing)} missing); give the whole model"
