"""Measures the time, memory and FLOP/s of a training round, for perf.jsonl."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from slimectl.data.metrics_catalogue import PHASES
from slimectl.planner.devices import DeviceMemory, ProcessMemory, process_memory
from slimectl.protocols import NO_PROGRESS, Progress
from slimectl.system.timeline import timeline
from slimectl.types import Metrics, TrainingSample

if TYPE_CHECKING:
    from slimectl.algorithms.packing import Pack, PrefixTrie
    from slimectl.planner.flops import ImageFlops, ModelFlops, SequenceFlops

Item = TypeVar("Item")
Segment = list[Any]
"""Metric, start, end and seconds without gaps of a part of a round."""
Clock = Callable[[], float]
Packer = Callable[[Sequence[TrainingSample]], "list[list[Pack]]"]
"""Returns the packs of every rank."""
GIB = 1024**3
KINDS = ("allocated", "reserved", "max_allocated", "max_reserved")
END = object()
LANES = {"perf/generate_time": "generation", "perf/reward_time": "grading"}
"""Lanes of the timeline for the times of the sampling side. The others belong to the lane "trainer"."""
SHORTEST_GAP_S = 0.001
MOST_GAPS = 200
"""A gap between two spans of one name is shown if it is at least as long as SHORTEST_GAP_S and a round / MOST_GAPS."""


@dataclass(frozen=True)
class ArithmeticRate:
    """FLOPs of the policy per sequence, the number of ranks that share them, and the peak FLOP/s of a rank if known.

    `images` has the FLOPs of images in a vision tower.
    """

    flops: ModelFlops
    ranks: int = 1
    peak: float | None = None
    images: ImageFlops | None = None


class RoundTimer:
    """Sums up the times of a round by metric. `take` returns the sums and starts the next round.

    In nested blocks, time counts for the innermost block only, so that no second is counted twice. `clock` returns the
    time. With `log_memory`, memory is recorded at the start and end of every phase, in all processes of the active
    model. `pack` packs rows as the trainer does. Without it, every row is a pack of its own. `progress` shows the
    current phase. A timer is used by one thread.
    """

    def __init__(
        self,
        clock: Clock = time.perf_counter,
        *,
        log_memory: bool = False,
        rate: ArithmeticRate | None = None,
        pack: Packer | None = None,
        progress: Progress = NO_PROGRESS,
    ) -> None:
        self.clock, self.log_memory, self.rate, self.pack, self.progress = clock, log_memory, rate, pack, progress
        self._tokens: defaultdict[str, int] = defaultdict(int)
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._flops: defaultdict[str, float] = defaultdict(float)
        self._memory: Metrics = {}
        self._peaks: Metrics = {}
        self._split_count = 0
        """Packs that had been split in the processes of the policy when they were last asked."""
        self._open: list[str] = []
        self._mark = 0.0
        self._segments: defaultdict[str, list[Segment]] = defaultdict(list)

    @contextmanager
    def time(self, name: str, *, of: Any = None) -> Iterator[None]:
        """Add the seconds of the block to the metric `name`. `of` is the model that is active in it."""
        with self._noting_memory(name, of), self._clocked(name):
            yield

    def iterate(self, name: str, items: Iterable[Item]) -> Iterator[Item]:
        """Yield items, and add the time spent waiting for each to the metric `name`."""
        iterator = iter(items)
        with self._noting_memory(name, None):
            while True:
                with self._clocked(name):
                    item: Any = next(iterator, END)
                if item is END:
                    return
                yield item

    @contextmanager
    def _clocked(self, name: str) -> Iterator[None]:
        self._switch()
        self._open.append(name)
        phase = PROGRESS_NAMES.get(name)
        try:
            with nullcontext() if phase is None else self.progress.phase(phase):
                yield
        finally:
            self._switch()
            self._open.pop()

    def _switch(self) -> None:
        """Add the time since the last switch to the innermost open block."""
        now = self.clock()
        if self._open:
            self._seconds[self._open[-1]] += now - self._mark
            if timeline.enabled:
                self._note_segment(self._open[-1], self._mark, now)
        self._mark = now

    def _note_segment(self, metric: str, start: float, end: float) -> None:
        """Add a segment to its lane. After a gap that is too short to be shown, it extends the last one."""
        segments = self._segments[LANES.get(metric, "trainer")]
        if segments and (last := segments[-1])[0] == metric and start - last[2] < SHORTEST_GAP_S:
            last[2], last[3] = end, last[3] + end - start
        elif end > start:
            segments.append([metric, start, end, end - start])

    @contextmanager
    def _noting_memory(self, name: str, model: Any) -> Iterator[None]:
        """Record the memory of a model's processes before and after the block, if the metric is the time of a phase."""
        phase = PHASE_OF.get(name) if self.log_memory else None
        if phase is not None:
            self._note_memory(phase, "start", model)
        yield
        if phase is not None:
            self._note_memory(phase, "end", model)

    def count_training(self, rows: Sequence[TrainingSample]) -> None:
        """Count the FLOPs of a forward and backward pass over rows, and the tokens that the rows share."""
        tries = self._tries(rows)
        self._tokens["shared"] += sum(sum(trie.shared) for trie in tries)
        self._tokens["all"] += sum(sum(trie.lengths) for trie in tries)
        if self.rate is not None:
            self._flops["actor_train"] += _flops(tries, self.rate.flops.training)
            if (images := self.rate.images) is not None:
                self._flops["actor_train"] += sum(map(images.training, _image_sizes(tries, rows, images.token)))

    def count_log_probs(self, rows: Sequence[TrainingSample]) -> None:
        """Count the FLOPs of a forward pass over rows."""
        if self.rate is not None:
            tries = self._tries(rows)
            self._flops["log_probs"] += _flops(tries, self.rate.flops.forward)
            if (images := self.rate.images) is not None:
                self._flops["log_probs"] += sum(map(images.forward, _image_sizes(tries, rows, images.token)))

    def _tries(self, rows: Sequence[TrainingSample]) -> list[PrefixTrie]:
        from slimectl.algorithms.packing import build_tries

        if self.pack is None:
            return build_tries(rows, max_tokens=1, share=False)
        return [trie for packs in self.pack(rows) for pack in packs for trie in pack]

    def note_peaks(self, model: Any) -> None:
        """Record the peak memory of a model's processes since the previous round, as the maximum over processes."""
        processes = on_ranks(model, _memory_and_reset)
        self._note_peaks(processes)
        # A process that was started again counts from 0.
        before, self._split_count = self._split_count, sum(process.pack_splits for process in processes)
        if self._split_count > before:
            self._peaks["perf/pack_splits"] = float(self._split_count - before)

    def take(self, rollout_id: int | None = None) -> Metrics:
        """Return the metrics of a round, and start the next one. The timeline gets its times as spans."""
        place = {} if rollout_id is None else {"round": rollout_id}
        for lane, name, start, end, fields in spans_of(self._segments):
            timeline.record(lane, name, start, end, **place, **fields)
        self._segments.clear()
        metrics = {**self._seconds, **self._memory, **self._peaks, **self._rates()}
        if self.pack is not None and self._tokens["all"]:
            metrics["perf/shared_tokens_ratio"] = self._tokens["shared"] / self._tokens["all"]
        for sums in (self._seconds, self._flops, self._tokens, self._memory, self._peaks):
            sums.clear()
        return metrics

    def _rates(self) -> Metrics:
        metrics: Metrics = {}
        for work, flops in self._flops.items():
            if self.rate is not None and (seconds := self._seconds.get(f"perf/{work}_time")):
                attained = flops / seconds / self.rate.ranks
                metrics[f"perf/{work}_tflops"] = attained / 1e12
                if work == "actor_train" and self.rate.peak:
                    metrics["perf/mfu"] = attained / self.rate.peak
        return metrics

    def _note_peaks(self, processes: Sequence[ProcessMemory]) -> None:
        sizes = {"cpu_memory": [process.rss for process in processes]}
        devices = [process.device for process in processes if process.device is not None]
        sizes["gpu_memory_allocated"] = [device.max_allocated for device in devices]
        sizes["gpu_memory_reserved"] = [device.max_reserved for device in devices]
        for name, values in sizes.items():
            if any(values):
                key = f"perf/{name}_gb"
                self._peaks[key] = max(self._peaks.get(key, 0.0), max(values) / GIB)
        for device in devices:
            key, share = "perf/gpu_memory_used_ratio", device.max_reserved / device.total
            self._peaks[key] = max(self._peaks.get(key, 0.0), share)

    def _note_memory(self, phase: str, moment: str, model: Any) -> None:
        """Record the memory of a model's processes at the start or end of a phase. The first start in a round counts.

        The trainer offloads nothing between the states "offload" and "onload" here, so both have the same numbers.
        """
        processes = on_ranks(model, _memory_and_reset)
        self._note_peaks(processes)
        metrics: Metrics = {}
        for name in ("rss", "vms"):
            metrics[f"memory/cpu/{phase}/{moment}/{name}"] = max(getattr(process, name) for process in processes) / GIB
        for device in [process.device for process in processes if process.device is not None]:
            for key, value in _device_metrics(device, phase, moment):
                metrics[key] = max(metrics.get(key, 0.0), value)
        self._memory |= {key: value for key, value in metrics.items() if moment == "end" or key not in self._memory}


def spans_of(segments: Mapping[str, Sequence[Segment]]) -> Iterator[tuple[str, str, float, float, dict[str, float]]]:
    """Yield (lane, name, start, end, fields) of a round's segments, joined over gaps that are too short to be shown.

    The field `busy` has the seconds of a joined span without its gaps, so that their sum is the metric.
    """
    moments = [moment for parts in segments.values() for part in parts for moment in part[1:3]]
    shortest_s = (max(moments) - min(moments)) / MOST_GAPS if moments else 0.0
    for lane, parts in segments.items():
        joined: list[Segment] = []
        for metric, start, end, busy in parts:
            if joined and joined[-1][0] == metric and start - joined[-1][2] < shortest_s:
                joined[-1] = [metric, joined[-1][1], end, joined[-1][3] + busy]
            else:
                joined.append([metric, start, end, busy])
        for metric, start, end, busy in joined:
            name = metric.removeprefix("perf/").removesuffix("_time")
            yield lane, name, start, end, {} if end - start - busy < 1e-6 else {"busy": round(busy, 6)}


def _device_metrics(device: DeviceMemory, phase: str, moment: str) -> Iterator[tuple[str, float]]:
    prefix = f"memory/{phase}/{moment}"
    for kind in KINDS:
        # Maxima are measured over the phase, so at its start they equal the current values.
        size = getattr(device, kind.removeprefix("max_") if moment == "start" else kind)
        for state in ("offload", "onload"):
            yield f"{prefix}/{state}/{kind}/{device.index}", size / GIB
    if moment == "end":
        yield f"{prefix}/onload/max_allocated_frac/{device.index}", device.max_allocated / device.total
        yield f"{prefix}/onload/max_reserved_frac/{device.index}", device.max_reserved / device.total


def _memory_and_reset() -> ProcessMemory:
    return process_memory(reset_peak=True)


def _flops(tries: Iterable[PrefixTrie], cost: SequenceFlops) -> float:
    """Return the FLOPs of tries, where each row costs the FLOPs beyond its shared tokens."""
    return sum(
        cost(length) - cost(shared) for trie in tries for length, shared in zip(trie.lengths, trie.shared, strict=True)
    )


def _image_sizes(tries: Iterable[PrefixTrie], rows: Sequence[TrainingSample], token: int) -> Iterator[int]:
    """Yield the tokens of every image that tries compute. An image that rows share counts once.

    An image is a run of its token in the prompt. Adjacent images without another token between them count as one.
    """
    for trie in tries:
        for i, shared in zip(trie.rows, trie.shared, strict=True):
            size = 0
            prompt = rows[i].tokens[: rows[i].prompt_length] if rows[i].images else []
            for place, of_prompt in enumerate([*prompt, None]):
                if of_prompt == token:
                    size += 1
                    continue
                if size and place - size >= shared:
                    yield size
                size = 0


def on_ranks(model: Any, function: Callable[..., Item], *arguments: Any) -> list[Item]:
    """Call a function in every process of a model (or in this one if it has no others). Return the results by rank."""
    call = getattr(model, "on_ranks", None)
    return [function(*arguments)] if call is None else call(function, *arguments)


PROGRESS_NAMES = {
    "perf/wait_time": "generating",
    "perf/generate_time": "generating",
    "perf/reward_time": "grading",
    "perf/ref_log_probs_time": "reference",
    "perf/teacher_log_probs_time": "teacher",
    "perf/log_probs_time": "log-probabilities",
    "perf/values_time": "values",
    "perf/actor_train_time": "training",
    "perf/critic_train_time": "training critic",
    "perf/engine_offload_time": "offloading",
    "perf/engine_onload_time": "onloading",
    "perf/update_weights_time": "pushing weights",
    "perf/save_model_time": "saving",
}
"""Phase that the progress bar shows while the time of a metric is measured."""

EVALUATING = "evaluating"
"""Phase of an evaluation. The phase of a dataset in it adds the name of the dataset."""

PHASE_OF = {name: phase for phase, names in PHASES.items() for name in names}
"""Phase of each time metric."""
