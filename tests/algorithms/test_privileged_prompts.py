"""What a teacher reads that the policy did not."""

from __future__ import annotations

from typing import Any

import pytest

from slimectl.algorithms.privileged_prompts import PrivilegedPrompts
from slimectl.errors import RecordError
from slimectl.types import Sample, Status


def sample(index: int, response: str = "", *, group: int = 0, **fields: Any) -> Sample:
    return Sample(group, index, prompt="2+3=", response=response, status=Status.COMPLETED, **fields)


def shown(template: str, *samples: Sample, success: float = 1.0) -> list[Any]:
    return PrivilegedPrompts(template, success)(samples)


def test_fields_are_filled_and_other_braces_are_text():
    first = sample(0, "6", label=5, metadata={"check": {"error": "{label} is not 6"}})
    template = r"{prompt} \boxed{x} {label}, not {response}: {metadata.check.error}"
    assert shown(template, first) == [r"2+3= \boxed{x} 5, not 6: {label} is not 6"]
    assert first.prompt == "2+3="


def test_the_last_user_message_of_a_chat_is_replaced():
    chat = [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "2+3="},
        {"role": "assistant", "content": "="},
    ]
    (prompt,) = shown("{prompt} (it is {label})", Sample(prompt=chat, label="5"))
    assert prompt == [chat[0], {"role": "user", "content": "2+3= (it is 5)"}, chat[2]]
    assert chat[1]["content"] == "2+3="
    pictures = [{"role": "user", "content": [{"type": "image"}]}]
    with pytest.raises(
        RecordError, match=r"sample 4: algorithm\.opd_teacher_template needs a chat with a user message"
    ):
        shown("{prompt} {label}", Sample(index=4, prompt=pictures, label="5"))


def test_a_demonstration_is_the_first_success_of_another_attempt_at_the_prompt():
    samples = [sample(0, "a", reward=0.0), sample(1, "b", reward=1.0), sample(2, "c", reward=1.0),
               sample(3, "d", reward=0.0, group=1), sample(4, "e", reward=1.0, group=2)]  # fmt: skip
    assert shown("{demonstration}|{prompt}", *samples) == ["b|2+3=", "c|2+3=", "b|2+3=", None, None]
    assert shown("{demonstration}", *samples, success=1.5) == [None] * 5
    parts = [sample(0, "a", reward=1.0, rollout_id=7), sample(1, "b", reward=1.0, rollout_id=7)]
    assert shown("{demonstration}", *parts) == [None, None]  # two parts of one attempt


def test_a_sample_without_feedback_is_not_scored_unless_no_sample_of_the_round_has_any():
    samples = [sample(0), sample(1, metadata={"feedback": "too large"})]
    assert shown("{prompt} {metadata.feedback}", *samples) == [None, "2+3= too large"]
    with pytest.raises(
        RecordError, match=r"sample 0: no metadata\.feedback, which algorithm\.opd_teacher_template shows"
    ):
        shown("{prompt} {metadata.feedback}", samples[0])
    with pytest.raises(RecordError, match=r"sample 0: no label"):
        shown("{prompt} {label}", *samples)
    assert shown("{prompt} {label}") == []
