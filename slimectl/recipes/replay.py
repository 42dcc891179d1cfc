"""A data source that samples recorded answers once more (rollout.data_source_path)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from slimectl.data.prompt_images import resolve_sample
from slimectl.data.records import sample_from_json
from slimectl.data.sources import open_table
from slimectl.errors import RecordError
from slimectl.hooks.signatures import Group
from slimectl.types import VERSION_SPANS, Prompt, Sample, Status

RESULTS = (VERSION_SPANS, "explanation", "error", "agent")
"""Metadata that an earlier attempt left."""


class RecordedSamples:
    """Source of the samples in `rollout.data`, each a group of its own with its tokens before the answer.

    Each keeps its index and its group, so that the settings, seed and weights of its first time draw the same answer
    from the embedded engine. A group has one sample: `rollout.n_samples_per_prompt` is 1.
    """

    keeps_numbers = True

    def __init__(self, settings: Any) -> None:
        self._table = open_table(list(settings.rollout.data), replay=True)
        self._groups = self._read()

    def __len__(self) -> int:
        return len(self._table)

    def get_samples(self, n: int) -> list[Group]:
        return [group for _, group in zip(range(n), self._groups, strict=False)]

    def add_samples(self, groups: list[Group]) -> None:
        """Take nothing back: every sample is one attempt."""

    def save(self, rollout_id: int) -> None:
        """Return no state: a file is read from its beginning."""

    def load(self, rollout_id: int, state: Any) -> None:
        """Do nothing: a file is read from its beginning."""

    def _read(self) -> Iterator[Group]:
        for location, record in self._table.scan():
            if isinstance(record, Prompt):
                raise RecordError(f"{location}: is a prompt; give samples")
            try:
                sample = sample_from_json(record)
                resolve_sample(sample, location)
            except (RecordError, ValueError) as error:
                raise RecordError(f"{location}: {error}") from None
            yield [blank(sample)]


def blank(sample: Sample) -> Sample:
    """Return a sample as it was before its answer."""
    return Sample(
        group_index=sample.group_index,
        index=sample.index,
        prompt=sample.prompt,
        tokens=sample.tokens[: sample.prompt_length],
        label=sample.label,
        metadata={name: value for name, value in sample.metadata.items() if name not in RESULTS},
        multimodal_inputs=sample.multimodal_inputs,
        generate_function_path=sample.generate_function_path,
        status=Status.PENDING,
        extra=sample.extra,
    )
