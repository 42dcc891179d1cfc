"""Prompts that tell a teacher more than the policy knew: a label, a demonstration, feedback."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slimectl.errors import RecordError
from slimectl.settings.teachers import TEMPLATE_FIELD
from slimectl.types import Chat, Sample, column, text_of_label


@dataclass(frozen=True)
class PrivilegedPrompts:
    """Writes the prompts that a teacher reads in place of the policy's.

    `{prompt}` of the template is the text of the prompt, of a chat the last user message, which the result replaces.
    `{label}` is a reference solution (OPSD, Zhao et al. 2026, arXiv:2601.18734; SDFT, Shenfeld et al. 2026,
    arXiv:2601.19897). `{demonstration}` is a sibling's successful response and `{metadata.KEY}` a feedback text, or a
    column of the row (SDPO, Hübotter et al. 2026, arXiv:2601.20802). `{response}` is the sample's own response. A
    sibling is successful from the reward `success` on.
    """

    template: str
    success: float = 1.0
    reward_key: str | None = None
    """Key of the reward in a dict, as in score.reward_key."""

    def __call__(self, samples: Sequence[Sample]) -> list[str | Chat | None]:
        """Return a prompt for each sample of a round, or None for a sample that lacks a field of the template.

        Raises RecordError if all samples lack a field other than the demonstration.
        """
        names = [name for name in dict.fromkeys(TEMPLATE_FIELD.findall(self.template)) if name != "prompt"]
        values = [self._fields(sample, names) for sample in samples]
        if "{demonstration}" in self.template:
            for fields, response in zip(values, self._demonstrations(samples), strict=True):
                fields["demonstration"] = response
        for name in names:
            if samples and name != "demonstration" and all(fields[name] is None for fields in values):
                raise RecordError(
                    f"sample {samples[0].index}: no {name}, which algorithm.opd_teacher_template shows, nor has any "
                    f"other sample of the round. Add it to the prompts, or change the template"
                )
        return [
            None if None in fields.values() else self._prompt(sample, fields)
            for sample, fields in zip(samples, values, strict=True)
        ]

    def _demonstrations(self, samples: Sequence[Sample]) -> list[str | None]:
        """Return the first successful response of another attempt at each sample's prompt, or None if there is none."""
        successes: dict[int, list[Sample]] = {}
        for sample in samples:
            reward = sample.reward
            if isinstance(reward, dict):
                reward = reward.get(self.reward_key or "score")
            if isinstance(reward, int | float) and reward >= self.success:
                successes.setdefault(sample.group_index, []).append(sample)
        shown = [
            next((s for s in successes.get(sample.group_index, []) if s.trajectory_id != sample.trajectory_id), None)
            for sample in samples
        ]
        return [None if sample is None else sample.response for sample in shown]

    def _fields(self, sample: Sample, names: Sequence[str]) -> dict[str, str | None]:
        fields: dict[str, str | None] = {}
        for name in names:
            if name == "label":
                fields[name] = None if sample.label is None else text_of_label(sample.label)
            elif name == "response":
                fields[name] = sample.response
            elif name != "demonstration":
                value = column({**sample.extra, **sample.metadata}, name.removeprefix("metadata."))
                fields[name] = None if value is None else text_of_label(value)
        return fields

    def _prompt(self, sample: Sample, fields: Mapping[str, str | None]) -> str | Chat:
        def filled(text: str) -> str:
            return TEMPLATE_FIELD.sub(lambda field: str({"prompt": text, **fields}[field[1]]), self.template)

        if isinstance(sample.prompt, str):
            return filled(sample.prompt)
        chat = list(sample.prompt)
        place = next((i for i in reversed(range(len(chat))) if chat[i].get("role") == "user"), None)
        content = None if place is None else chat[place].get("content")
        if place is None or not isinstance(content, str):
            raise RecordError(
                f"sample {sample.index}: algorithm.opd_teacher_template needs a chat with a user message of plain text"
            )
        chat[place] = {**chat[place], "content": filled(content)}
        return chat
