"""Profiles rounds of a run: a Chrome trace of every process that trains, and snapshots of its CUDA memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from slimectl.data.atomic_replace import storage_errors
from slimectl.errors import SlimectlError
from slimectl.stages.round_timer import on_ranks
from slimectl.system.stdio import logger

FOLDER = "profile"
SNAPSHOT_EVENTS = 1_000_000
"""Maximum number of allocations in a memory snapshot. The newest are kept."""

_profilers: list[Any] = []
"""The running profiler of this process. torch allows one per process."""


class RoundProfiler:
    """Profiles the rounds `first` to `last` of a run, in this process and in the ranks of its models.

    Traces are written to the folder `profile` of the run. They include evaluations and checkpoints between the rounds,
    but not before the first and after the last.
    """

    def __init__(self, rounds: Sequence[int] | None, folder: Path, **models: Any) -> None:
        self._rounds, self._folder, self._models = rounds, folder.resolve() / FOLDER, models
        self._runs = False

    def before_round(self, number: int) -> None:
        """Start if round `number` is in the interval. A resumed run may start in the middle."""
        if self._rounds is None or self._runs or not self._rounds[0] <= number <= self._rounds[1]:
            return
        self._runs = True
        self._call(start_profile)

    def after_round(self, number: int) -> None:
        """Stop after the last round, and write the traces."""
        if self._rounds is not None and number >= self._rounds[1]:
            self.close()

    def close(self) -> None:
        """Write the traces so far. Safe to call twice."""
        if not self._runs or self._rounds is None:
            return
        self._runs = False
        first, last = self._rounds
        with storage_errors(self._folder):
            self._folder.mkdir(exist_ok=True)
            self._call(write_profile, str(self._folder / f"rounds_{first}-{last}"))
        logger.info(f"profiled rounds {first} to {last}: open {self._folder}/*.json.gz at ui.perfetto.dev")

    def _call(self, function: Any, *arguments: Any) -> None:
        """Call a function in this process and in the ranks of every model."""
        function(*arguments)
        for name, model in self._models.items():
            if not hasattr(model, "on_ranks"):
                continue
            try:
                on_ranks(model, _in_rank, function, name, *arguments)
            except SlimectlError as error:  # dead ranks are reported by the call that found them
                logger.warning(f"run.profile: no trace of the ranks of the {name}: {error}")


def _in_rank(function: Any, model: str, *arguments: str) -> None:
    """Call a function in a rank. The names of its files contain model and rank."""
    import torch.distributed as dist

    function(*(f"{argument}.{model}-rank-{dist.get_rank()}" for argument in arguments))


def start_profile() -> None:
    """Begin to record the operations of this process, and its GPU allocations."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.memory._record_memory_history(max_entries=SNAPSHOT_EVENTS)
    options = None
    # Without it, torch records only the thread that starts the profile, but engines use others.
    with suppress(TypeError):  # older versions of torch lack the option
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
