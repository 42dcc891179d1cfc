"""Profiles rounds of a run: a Chrome trace of every process that trains, and snapshots of its CUDA memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from slimectl.data.atomic_replace import storage_errors
from slimectl.errors import SlimectlError
from slimectl.stages.round_timer import on_ranks
from slimectl.stdio import logger

FOLDER = "profile"
SNAPSHOT_EVENTS = 1_000_000
"""Allocations that a snapshot of memory has at most, the newest ones."""

_profilers: list[Any] = []
"""The profiler of this process while it runs: torch has one a process."""


class RoundProfiler:
    """Profiles the rounds `first` to `last` of a run, in this process and in the ranks of its models.

    Traces are written to the folder `profile` of the run. Evaluations and checkpoints between the rounds are part of
    them. Those before the first and after the last are not.
    """

    def __init__(self, rounds: Sequence[int] | None, folder: Path, **models: Any) -> None:
        self._rounds, self._folder, self._models = rounds, folder.resolve() / FOLDER, models
        self._runs = False

    def before_round(self, number: int) -> None:
        """Start where round `number` is in the interval, which a resumed run may enter late."""
        if self._rounds is None or self._runs or not self._rounds[0] <= number <= self._rounds[1]:
            return
        self._runs = True
        self._call(start_profile)

    def after_round(self, number: int) -> None:
        """Stop after the last round, and write the traces."""
        if self._rounds is not None and number >= self._rounds[1]:
            self.close()

    def close(self) -> None:
        """Write the traces of what was profiled so far. Safe to call twice."""
        if not self._runs or self._rounds is None:
            return
        self._runs = False
        first, last = self._rounds
        with storage_errors(self._folder):
            self._folder.mkdir(exist_ok=True)
            self._call(write_profile, str(self._folder / f"rounds_{first}-{last}"))
        logger.info(f"profiled rounds {first} to {last}: open {self._folder}/*.json.gz at ui.perfetto.dev")

    def _call(self, function: Any, *arguments: Any) -> None:
        """Call a function in this process and in the ranks of every model that has any."""
        function(*arguments)
        for name, model in self._models.items():
            if not hasattr(model, "on_ranks"):
                continue
            try:
                on_ranks(model, _in_rank, function, name, *arguments)
            except SlimectlError as error:  # ranks that died are reported by the call that met it
                logger.warning(f"run.profile: no trace of the ranks of the {name}: {error}")


def _in_rank(function: Any, model: str, *arguments: str) -> None:
    """Call a function in a rank. Of what it writes the name tells model and rank."""
    import torch.distributed as dist

    function(*(f"{argument}.{model}-rank-{dist.get_rank()}" for argument in arguments))


def start_profile() -> None:
    """Begin to record what this process computes, and what it allocates on a GPU."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.memory._record_memory_history(max_entries=SNAPSHOT_EVENTS)
    options = None
    # Without it torch records the thread that starts the profile alone, and engines work in others.
    with suppress(TypeError):  # an older torch has no such option
        options = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    profiler = profile(activities=activities, experimental_config=options)
    profiler.start()
    _profilers.append(profiler)


def write_profile(path: str) -> None:
    """Stop recording. Write PATH.json.gz, and with a GPU PATH.memory.pickle for pytorch.org/memory_viz."""
    import torch

    profiler = _profilers.pop()
    profiler.stop()
    profiler.export_chrome_trace(f"{path}.json.gz")
    if torch.cuda.is_available():
        torch.cuda.memory._dump_snapshot(f"{path}.memory.pickle")
        torch.cuda.memory._record_memory_history(enabled=None)
