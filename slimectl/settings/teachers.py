"""Teachers of on-policy distillation: their table in the settings, and what a run reads of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Annotated, Literal

from pydantic import Field

from slimectl.settings.base import Section, Texts
from slimectl.system.redaction import REFERENCES

TEMPLATE_FIELD = re.compile(r"\{(prompt|label|response|demonstration|metadata(?:\.\w+)+)\}")
"""A field of a teacher's template. Other braces are text, as in \\boxed{}."""

FIELDS = ("prompt", "label", "response", "demonstration", "metadata")


def template_conflicts(template: str) -> Iterator[str]:
    """Yield a line for a misspelled field, and one if the template shows nothing that the policy did not read."""
    for name in re.findall(r"\{(\w+)\}", TEMPLATE_FIELD.sub("", template)):
        if near := get_close_matches(name, FIELDS, n=1):
            field = "metadata.KEY" if near == ["metadata"] else near[0]
            yield f"algorithm.opd_teacher_template: {{{name}}}: unknown field. Did you mean {{{field}}}?"
            return
    if not set(TEMPLATE_FIELD.findall(template)) - {"prompt"}:
        yield (
            "algorithm.opd_teacher_template: shows nothing more than the prompt. Add {label}, {response}, "
            "{demonstration} or {metadata.KEY}."
        )


class TeacherTable(Section):
    """One of several teachers, and the prompts that it teaches."""

    load: str = ""
    """Directory of the teacher."""

    url: Texts = []
    """Its servers instead."""

    api: Literal["sglang", "vllm"] = "sglang"
    """API of the servers."""

    domains: Texts = []
    """Domains of the prompts (rollout.domain_key). Empty: all prompts that no other teacher lists."""

    weight: Annotated[float, Field(ge=0)] = 1.0
    """Factor of the divergence from this teacher."""


@dataclass(frozen=True)
class Teacher:
    """A model that the policy is distilled from: a directory, or servers. Without either, samples carry its scores."""

    name: str
    """Name in scoring passes."""

    load_setting: str
    url_setting: str
    """Settings of its directory and its servers, for messages."""

    load: str | None
    urls: tuple[str, ...]
    api: str
    """API of the servers."""

    domains: tuple[str, ...] = ()
    """Domains of its prompts. Empty: all that no other teacher lists."""

    weight: float = 1.0
    """Factor of the divergence."""


@dataclass(frozen=True)
class TeacherOptions:
    """What a policy is distilled from, and by which divergence."""

    teachers: tuple[Teacher, ...]
    kl_coef: float
    """Weight of the divergence from a teacher."""

    divergence: str = "token"
    """"token": the divergence is subtracted from the advantage of each token. Another one is a term of the loss."""

    top_k: int | None = None
    """Number of the teacher's likeliest tokens in a divergence of the loss. None is the full vocabulary."""

    self_teacher: Literal["current", "start"] | None = None
    """Weights of a policy that is its own teacher."""

    template: str | None = None
    """What the teacher reads in place of the prompt."""

    success: float = 1.0
    """Reward from which the template shows a sibling's response."""

    by_text: bool = False
    """Whether the tokens of a teacher with another vocabulary are aligned by their text."""

    @property
    def in_trainer(self) -> bool:
        """Whether the trainer computes the teacher's distributions in each step, instead of a scoring pass."""
        return self.divergence != "token" and self.top_k is None

    @property
    def load(self) -> str | None:
        """Directory of the only teacher, or None if there are several or it is not in this process."""
        return self.teachers[0].load if len(self.teachers) == 1 else None

    @property
    def field(self) -> Literal["teacher_log_probs", "teacher_top_log_probs"]:
        """Field of a sample with the teacher's scores."""
        return "teacher_log_probs" if self.divergence == "token" else "teacher_top_log_probs"

    def teacher_of(self, domain: str | None) -> Teacher | None:
        """Return the teacher of a prompt's domain, or None if no teacher has it."""
        listed = [teacher for teacher in self.teachers if domain in teacher.domains]
        return next(iter([*listed, *(teacher for teacher in self.teachers if not teacher.domains)]), None)

    def conflicts(self, *, temperature: float) -> Iterator[str]:
        """Yield each conflict between the settings of teachers as one line with the keys and the remedy."""
        yield from self._source_conflicts(temperature)
        yield from self._domain_conflicts()
        several = len(self.teachers) > 1 or self.self_teacher is not None or self.template is not None
        if self.in_trainer and (several or self.by_text or not self.load):
            yield (
                f"algorithm.opd_divergence: {self.divergence} over the full vocabulary needs one teacher in the "
                f"trainer that reads the policy's prompts. Set algorithm.opd_teacher_load to its directory, or set "
                f"algorithm.opd_top_k."
            )
        if self.self_teacher == "current" and self.template is None:
            yield (
                "algorithm.opd_self_teacher: current teaches nothing on the policy's own prompts. Set "
                "algorithm.opd_teacher_template."
            )
        if self.by_text and self.divergence != "token":
            yield (
                f"algorithm.opd_align: text and algorithm.opd_divergence: {self.divergence} cannot be combined: there "
                f"is no distribution over the policy's tokens. Set opd_divergence = token."
            )
        if self.by_text and (self.template is not None or not all(teacher.load for teacher in self.teachers)):
            yield (
                "algorithm.opd_align: text needs the teacher's directory, and no algorithm.opd_teacher_template. Set "
                "algorithm.opd_teacher_load."
            )

    def _source_conflicts(self, temperature: float) -> Iterator[str]:
        for teacher in self.teachers:
            load, url = teacher.load_setting, teacher.url_setting
            if teacher.load and teacher.urls:
                yield f"{load} and {url} cannot be combined. Set only one."
            if teacher.urls and temperature != 1.0:
                yield (
                    f"{url} and rollout.temperature: {temperature:g} cannot be combined: servers return probabilities "
                    f"at temperature 1. Set it to 1, or use {load}."
                )
            if (teacher.load or teacher.urls) and self.self_teacher is not None:
                yield (
                    f"algorithm.opd_self_teacher and {load if teacher.load else url} cannot be combined. Set only one."
                )
            for address in teacher.urls:
                if not address.startswith(("http://", "https://", *REFERENCES)):
                    yield f"{url}: {address!r} is not an address. Use http://HOST:PORT"

    def _domain_conflicts(self) -> Iterator[str]:
        if len(self.teachers) > 1 and any(not (teacher.load or teacher.urls) for teacher in self.teachers):
            yield "algorithm.opd_teachers: every teacher needs load or url. Set one of them."
        owners: dict[str, str] = {}
        for teacher in self.teachers:
            for domain in teacher.domains or (("",) if len(self.teachers) > 1 else ()):
                if domain in owners:
                    which = f"domain {domain!r}" if domain else "all other domains"
                    names = f"{owners[domain]} and {teacher.name}"
                    yield f"algorithm.opd_teachers: {names} both have {which}. Set only one."
                owners.setdefault(domain, teacher.name)
