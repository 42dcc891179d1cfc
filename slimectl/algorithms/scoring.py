"""Scoring passes: log-probabilities of responses that an algorithm reads from another model, or on another prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from slimectl.settings.needs import AlgorithmSection
from slimectl.types import Sample


def _own_tokens(samples: Sequence[Sample]) -> list[list[int] | None]:
    """Return the tokens of every sample: its response on its own prompt."""
    return [sample.tokens for sample in samples]


@dataclass(frozen=True)
class ScoringPass:
    """A model scores the responses of a round before its updates. Its log-probabilities go into a field of the samples.

    `tokens` gets the samples of a round. For each it returns a prompt that ends with the sample's response, or None for
    a sample that is not scored.
    """

    model: Literal["policy", "reference", "teacher"]
    field: Literal["ref_log_probs", "teacher_log_probs", "teacher_top_log_probs"]
    tokens: Callable[[Sequence[Sample]], Sequence[list[int] | None]] = _own_tokens
    top_k: int | None = None
    """Number of the likeliest tokens that are wanted in place of every token. None wants the token itself."""


REFERENCE = ScoringPass("reference", "ref_log_probs")
TEACHER = ScoringPass("teacher", "teacher_log_probs")


def reference_and_teacher(algorithm: AlgorithmSection) -> list[ScoringPass]:
    """Return the passes of an algorithm on rollouts: the reference's, and what its divergence needs of the teacher.

    A teacher whose full distributions are compared has no pass. It runs beside the policy in every step, because the
    distributions of a round would not fit into memory.
    """
    options = algorithm.teacher_options
    if options is None or options.divergence == "token":
        return [REFERENCE, TEACHER]
    if options.top_k is None:
        return [REFERENCE]
    return [REFERENCE, ScoringPass("teacher", "teacher_top_log_probs", top_k=options.top_k)]
