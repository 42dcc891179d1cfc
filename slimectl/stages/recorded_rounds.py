"""Rounds of recorded samples: whole rollouts, or whole groups for pairwise algorithms, over one or more passes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, groupby

from slimectl.errors import RecordError
from slimectl.settings import Settings
from slimectl.settings.needs import AlgorithmSection, Need
from slimectl.types import Metrics, Prompt, RolloutBatch, Sample, SamplerState

Numbered = tuple[int, Sample]
"""The occurrence of a row over all passes, counted from 0, and a sample of that row."""


@dataclass(frozen=True)
class SampleFiles:
    """Files of samples, demonstrations or preferences to train on, and who hears of their lines."""

    paths: Sequence[str]
    on_bad_line: Callable[[RecordError], None] | None = None
    """Called with the error of a line that is skipped. None: the error is raised."""
    on_line: Callable[[str], None] = lambda location: None
    """Called with the location of each good line."""


def recorded_rounds(
    samples: Iterable[Numbered], settings: Settings, *, too_long: deque[Prompt], before: int = 0
) -> Iterator[RolloutBatch]:
    """Yield rounds of samples in the order of a file, each with the position after it, where a resumed run starts.

    `too_long` receives the prompts that are too long while `samples` is read. A round counts those before its end.
    `before` is the number of earlier rounds.
    """
    numbers: deque[int] = deque()

    def unnumbered() -> Iterator[Sample]:
        for number, sample in samples:
            numbers.append(number)
            yield sample

    batches = sample_batches(unnumbered(), settings.algorithm, settings.rollouts_per_round)
    for round_number, batch in enumerate(batches, start=before + 1):
        position = [numbers.popleft() for _ in batch][-1] + 1
        metrics: Metrics = {}
        # Samples read past the round, to find the end of its last group, are read again after a resume.
        while too_long and too_long[0].index < position:
            too_long.popleft()
            metrics["rollout/prompts_too_long"] = metrics.get("rollout/prompts_too_long", 0.0) + 1.0
        yield RolloutBatch(batch, metrics=metrics, state=SamplerState(position, round_number))


def sample_batches(samples: Iterable[Sample], algorithm: AlgorithmSection, size: int) -> Iterator[list[Sample]]:
    """Yield lists of `size` whole rollouts, or for pairwise algorithms of `size` whole groups."""
    return (_batch_groups if Need.PAIRS in algorithm.needs else _batch_rollouts)(samples, size)


def _batch_rollouts(samples: Iterable[Sample], size: int) -> Iterator[list[Sample]]:
    """Yield lists of `size` whole rollouts. The samples of a fan-out are adjacent and share their rollout_id."""
    batch: list[Sample] = []
    rollouts = 0
    for sample in samples:
        continues = sample.rollout_id is not None and bool(batch) and _rollout(sample) == _rollout(batch[-1])
        if rollouts == size and not continues:
            yield batch
            batch, rollouts = [], 0
        batch.append(sample)
        rollouts += not continues
        if rollouts == size and sample.rollout_id is None:
            yield batch
            batch, rollouts = [], 0
    if batch:
        yield batch


def _rollout(sample: Sample) -> tuple[int, int | None]:
    return sample.group_index, sample.rollout_id


def _batch_groups(samples: Iterable[Sample], size: int) -> Iterator[list[Sample]]:
    """Yield lists of `size` whole groups, whose samples are adjacent."""
    batch: list[list[Sample]] = []
    for _, group in groupby(samples, key=lambda sample: sample.group_index):
        batch.append(list(group))
        if len(batch) == size:
            yield [sample for members in batch for sample in members]
            batch = []
    if batch:
        yield [sample for members in batch for sample in members]


def repeated(read: Callable[[], Iterable[Sample]], *, epochs: int | None, start: int = 0) -> Iterator[Numbered]:
    """Yield the samples that `read` returns, `epochs` times (None: endlessly), from occurrence `start` on.

    Every pass after the first shifts the samples' indices past the indices of the earlier passes.
    """
    number, size, shift = 0, 0, 0
    for epoch in count() if epochs is None else range(epochs):
        if epoch and number + size <= start:
            number += size
            continue
        for sample in read():
            if epoch == 0:
                size += 1
                shift = max(shift, sample.index + 1, sample.group_index + 1, (sample.rollout_id or 0) + 1)
            if number >= start:
                yield number, _shifted(sample, epoch * shift)
            number += 1
        if not size:
            return


def _shifted(sample: Sample, by: int) -> Sample:
    rollout_id = None if sample.rollout_id is None else sample.rollout_id + by
    return replace(sample, index=sample.index + by, group_index=sample.group_index + by, rollout_id=rollout_id)
