"""A data source that samples recorded responses again (rollout.data_source_path)."""

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
"""Metadata left by an earlier attempt."""


class RecordedSamples:
    """Source of the samples in `rollout.data`. Each is a separate group, with its tokens before the response.

    Each keeps its index and its group, so that with the same settings, seed and weights the embedded engine gives the
    same response. A group has one sample, so `rollout.n_samples_per_prompt` is 1.
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
        """Accept nothing: every sample is attempted once."""

    def save(self, rollout_id: int) -> None:
        """Return no state, because a file is read from its beginning."""

    def load(self, rollout_id: int, state: Any) -> None:
        """Do nothing, because a file is read from its beginning."""

    def _read(self) -> Iterator[Group]:
        for location, record in self._table.scan():
            if isinstance(record, Prompt):
                raise RecordError(f"{location}: is a prompt. Give samples.")
            try:
                sample = sample_from_json(record)
                resolve_sample(sample, location)
            except (RecordError, ValueError) as error:
                raise RecordError(f"{location}: {error}") from None
            yield [blank(sample)]


def blank(sample: Sample) -> Sample:
    """Return a sample as it was before its response."""
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
