"""A reference that becomes the policy every so many rounds, and is found again when a run goes on."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from slimectl.data.rundir import write_folder
from slimectl.settings import Settings

if TYPE_CHECKING:
    from slimectl.ports import Policy


class MovingReference:
    """Keeps `reference` at what the policy was after the last round that algorithm.ref_update_interval divides.

    Each stand is kept under the run's folder until no checkpoint needs it.
    """

    def __init__(self, settings: Settings, reference: Policy | None, run: Path) -> None:
        interval = getattr(settings.algorithm, "ref_update_interval", None)
        self._interval: int | None = interval if reference is not None else None
        self._reference, self._folder = reference, run / "reference"

    def resume(self, rollout_id: int) -> None:
        """Be where the run was after round `rollout_id`. Raises CheckpointError if that stand is gone."""
        if self._interval and (stand := rollout_id // self._interval * self._interval):
            self._load(stand)

    def follow(self, rollout_id: int, policy: Policy, needed: list[int]) -> None:
        """Take the policy's weights where round `rollout_id` ends an interval; `needed` are the checkpoints' rounds."""
        if not self._interval or rollout_id % self._interval:
            return
        self._folder.mkdir(exist_ok=True)
        write_folder(self._place(rollout_id), policy.save)
        self._load(rollout_id)
        oldest = min([*needed, rollout_id])
        for child in self._folder.iterdir():
            if child.name.isdecimal() and int(child.name) + self._interval <= oldest:
                shutil.rmtree(child)

    def _load(self, stand: int) -> None:
        assert self._reference is not None
        self._reference.load(self._place(stand))

    def _place(self, stand: int) -> Path:
        return self._folder / f"{stand:06d}"
