"""Scoring passes: log-probabilities of responses that an algorithm reads from another model, or on another prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from slimectl.algorithms.privileged_prompts import PrivilegedPrompts
from slimectl.settings import Settings
from slimectl.settings.teachers import Teacher, TeacherOptions
from slimectl.types import Chat, Sample, domain_of


def _own_tokens(samples: Sequence[Sample]) -> list[list[int] | None]:
    """Return the tokens of every sample: its response on its own prompt."""
    return [sample.tokens for sample in samples]


@dataclass(frozen=True)
class ScoringPass:
    """A model scores the responses of a round before its updates. Its log-probabilities go into a field of the samples.

    `tokens` gets the samples of a round. For each it returns a prompt that ends with the sample's response, or None for
    a sample that is not scored. `prompts` returns prompts as text or chats instead, in place of the samples' own.
    """

    model: str
    """"policy", or the name of a frozen model: "reference", "teacher", "teacher/NAME"."""
    field: Literal["ref_log_probs", "teacher_log_probs", "teacher_top_log_probs"]
    tokens: Callable[[Sequence[Sample]], Sequence[list[int] | None]] = _own_tokens
    prompts: Callable[[Sequence[Sample]], Sequence[str | Chat | None]] | None = None
    top_k: int | None = None
    """Number of the likeliest tokens that are wanted in place of every token. None wants the token itself."""


REFERENCE = ScoringPass("reference", "ref_log_probs")


def reference_and_teacher(settings: Settings) -> list[ScoringPass]:
    """Return the passes of an algorithm on rollouts: the reference's, and what its divergence needs of the teachers.

    A teacher whose full distributions are compared has no pass. It runs with the policy in every step, because the
    distributions of a round would not fit into memory.
    """
    options = settings.algorithm.teacher_options
    if options is None or options.in_trainer:
        return [REFERENCE]
    prompts = None
    if options.template is not None:
        prompts = PrivilegedPrompts(options.template, options.success, settings.score.reward_key)
    passes = []
    for teacher in options.teachers:
        model = "policy" if options.self_teacher == "current" else teacher.name
        tokens = _TaughtTokens(options, teacher, settings.rollout.domain_key)
        passes.append(ScoringPass(model, options.field, tokens, prompts, options.top_k))
    return [REFERENCE, *passes]


@dataclass(frozen=True)
class _TaughtTokens:
    """Returns the tokens of the samples that a teacher teaches, by the domains of their prompts."""

    options: TeacherOptions
    teacher: Teacher
    domain_key: str

    def __call__(self, samples: Sequence[Sample]) -> list[list[int] | None]:
        return [
            sample.tokens
            if self.options.teacher_of(domain_of(sample.extra, sample.metadata, self.domain_key)) is self.teacher
            else None
            for sample in samples
        ]
