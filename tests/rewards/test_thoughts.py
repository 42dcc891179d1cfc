"""One rule for thoughts: what follows the last closed one is graded, and an unclosed one has no answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from sandboxes import PATIENT, needs_sandbox

from slimectl.errors import SettingsError
from slimectl.rewards import verifier
from slimectl.rewards.thoughts import after_thought, answer_span, opened_by
from slimectl.types import Sample

ANSWERS = [
    ("a", "a"),
    ("", ""),
    ("<think>a</think>b", "b"),
    ("a</think>b", "b"),  # the prompt opened it
    ("<think>a</think>b</think>c", "c"),
    ("<think>a</think>b<think>c</think>d", "d"),
    ("<think>a</think>b<think>c", None),  # the last one never closes
    ("<think>a", None),
    ("b <think>a", None),
    ("<think>a</thinking>b", None),  # closed by another tag
    ("<thinking><think>a</think>b", None),
    ("<thinking><think>a</think>b</thinking>c", "c"),
    ("a</think>", ""),
    ("<think></think>b", "b"),
    ("if x < 3 > 2 [THIN]", "if x < 3 > 2 [THIN]"),
    ('<think>a</think>cut = s.split("</think>")', 'cut = s.split("</think>")'),  # mentioned only
    ("<think>a</think>The tag `<think>` opens it.", "The tag `<think>` opens it."),
    ("<think>It ends with `</think>`, so 5.", None),
    ("<think>```x```</think>```y```", "```y```"),
    ("<think>It's 'a'</think>'b' it is", "'b' it is"),
    ('a</think>re.sub(r"<think>.*?</think>", "", s)', 're.sub(r"<think>.*?</think>", "", s)'),
    ('<think>He says "no</think>It is "yes".', 'It is "yes".'),
    ("<|channel|>analysis<|message|>a<|channel|>commentary to=f <|constrain|>json<|message|>b", None),
    ("a<|channel|>final<|message|>b<|channel|>commentary<|message|>c", None),
    ("<|channel|>analysis<|message|>a<|channel|>final <|constrain|>json<|message|>b", "b"),
]


@pytest.mark.parametrize(("response", "answer"), ANSWERS)
def test_the_answer_is_what_follows_the_last_closed_thought(response: str, answer: str | None):
    span = answer_span(Sample(response=response))
    assert (span.text if span else None) == answer
    assert span is None or response[slice(*span.span)] == answer


TAGS = [
    ("<think>", "</think>"), ("<thinking>", "</thinking>"), ("<thought>", "</thought>"), ("<thoughts>", "</thoughts>"),
    ("<reasoning>", "</reasoning>"), ("<scratchpad>", "</scratchpad>"), ("<Think>", "</THINK>"),
    ("<think >", "< /think>"), ("<seed:think>", "</seed:think>"), ("<longcat_think>", "</longcat_think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"), ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"), ("<|channel>thought", "<channel|>"),
    ("<unused94>thought", "<unused95>"), ("<start_working_out>", "<end_working_out>"), ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
]  # fmt: skip


@pytest.mark.parametrize(("opening", "closing"), TAGS)
def test_the_tags_of_all_families(opening: str, closing: str):
    text = f"{opening}Lyon{closing}Paris"
    assert text[after_thought(text) :] == "Paris"
    assert after_thought(f"{opening}Lyon") == -1
    assert after_thought("Lyon", opening) == -1
    assert f"Lyon{closing}Paris"[after_thought(f"Lyon{closing}Paris", opening) :] == "Paris"
    assert opened_by(f"<user>x{opening}\n") == opened_by([{"role": "assistant", "content": opening}]) == opening


@pytest.mark.parametrize(
    ("prompt", "metadata", "answer"),
    [
        ("Capital?<think>\n", {}, None),
        ("Capital?<think>\n</think>\n", {}, "Paris"),
        ("What does <think> mean?", {}, "Paris"),
        ([{"role": "user", "content": "<think>"}], {}, "Paris"),
        ([{"role": "user", "content": "x"}, {"role": "assistant", "content": "<think>"}], {}, None),
        ([], {"opened_thought": "<think>"}, None),  # the chat template did
        ("<think>", {"opened_thought": ""}, "Paris"),
        ("<think>", {"opened_thought": "<think>"}, None),
    ],
)
def test_a_prompt_may_open_the_thought(prompt: Any, metadata: dict[str, str], answer: str | None):
    sample = Sample(prompt=prompt, response="Paris", metadata=metadata, label="Paris")
    span = answer_span(sample)
    assert (span.text if span else None) == answer
    assert verifier("exact")(sample) == float(answer is not None)
    assert verifier("exact")(replace(sample, response="Lyon</think>Paris")) == 1.0


LINES = {"instruction_id_list": ["punctuation:no_comma"]}
DOUBLE = {"tests": [{"input": "2", "output": "4"}]}
RULES = [
    ("exact", {}, "Paris", {}, "Paris"),
    ("contains", {}, "Paris", {}, "It is Paris."),
    ("regex", {"pattern": r"is (\w+)"}, "Paris", {}, "It is Paris."),
    ("f1", {}, "Paris", {}, "Paris."),
    ("numeric", {}, "42", {}, "It is 42."),
    ("numeric", {"source": "last_line"}, "42", {}, "It is\n42"),
    ("exact", {"source": "answer_tag"}, "42", {}, "<answer>42</answer>"),
    ("exact", {"source": "boxed"}, "42", {}, r"\boxed{42}"),
    ("boxed_numeric", {}, "42", {}, r"\boxed{42}"),
    ("math", {}, "42", {}, r"\boxed{42}"),
    ("deepscaler", {}, "42", {}, r"\boxed{42}"),
    ("dapo", {}, "42", {}, "Answer: 42"),
    ("boxed_dapo", {}, "42", {}, r"\boxed{42}"),
    ("gpqa", {}, "B", {}, "The answer is (B)."),
    ("gpqa", {}, "B", {"choices": ["Lyon", "Paris"]}, "Paris"),
    ("ifeval", {}, "", LINES, "No comma"),
    ("ifbench", {}, "", {"instruction_id_list": ["format:no_whitespace"]}, "ab"),
]


def number(rm_type: str, sample: Sample, **options: Any) -> float:
    reward = verifier(rm_type, **options)(sample)
    return reward["acc"] if isinstance(reward, dict) else reward


@pytest.mark.parametrize(("rm_type", "options", "label", "metadata", "right"), RULES)
def test_every_verifier_grades_the_answer_only(rm_type, options, label, metadata, right):
    other = "I do, not, know."
    graded = verifier(rm_type, **options)
    for response, reward in [
        (f"<think>{other}</think>{right}", 1.0),
        (f"{other}</think>\n\n{right}", 1.0),
        (f"<think>{right}</think>{other}", 0.0),
        (f"{right}</think>{other}", 0.0),
        (f"<think>{right}", 0.0),
        (f"{right}<think>{right}", 0.0),
        (f"<think>a</think>{right}<reasoning>{right}", 0.0),
    ]:
        sample = Sample(response=response, label=label, metadata=metadata)
        verdict = graded.explain(sample)
        assert number(rm_type, sample, **options) == reward, response
        assert graded.extract(sample) == verdict.extracted
        if reward:
            alone = Sample(response=right, label=label, metadata=metadata)
            assert verdict.extracted == graded.extract(alone) or rm_type == "deepscaler"
            assert verdict.span is None or response[slice(*verdict.span)] == verdict.extracted
        elif response.endswith(right):
            assert verdict.extracted is None
            assert "thought never closes" in verdict.why
    opened = Sample(response=right, label=label, metadata={**metadata, "opened_thought": "<think>"})
    assert number(rm_type, opened, **options) == 0.0


@needs_sandbox
def test_a_program_in_a_thought_is_not_run():
    program = "```python\nprint(2 * int(input()))\n```"
    code = verifier("code", **PATIENT)
    assert code(Sample(response=f"<think>```python\nx\n```</think>{program}", metadata=DOUBLE)) == 1.0
    for response in (f"<think>{program}", f"{program}</think>It doubles."):
        assert code(Sample(response=response, metadata=DOUBLE)) == 0.0
        assert code.extract(Sample(response=response, metadata=DOUBLE)) is None


def test_reasoning_gym_grades_the_answer_only():
    gym = pytest.importorskip("reasoning_gym")
    entry = gym.create_dataset("basic_arithmetic", seed=1, size=1)[0]
    right, graded = str(entry["answer"]), verifier("reasoning_gym")
    metadata = {"source_dataset": "basic_arithmetic", "entry": entry}
    rewards = [
        graded(Sample(response=response, label=right, metadata=metadata))
        for response in (f"<think>0</think>{right}", f"<think>{right}", f"<think><answer>{right}</answer></think>none")
    ]
    assert rewards[0] == 1.0
    assert rewards[1] == 0.0
    assert rewards[2] < 1.0
    assert graded.extract(Sample(response=f"<think>{right}", metadata=metadata)) is None


def test_with_thought_searches_the_thought_too():
    form = verifier("regex", pattern=r"(?s)^(<think>).*</think>", source="with_thought")
    assert form(Sample(response="<think>a</think>b", label="<think>")) == 1.0
    assert form(Sample(response="b", label="<think>")) == 0.0
    assert verifier("contains", source="with_thought")(Sample(response="<think>Lyon", label="Lyon")) == 1.0
    with pytest.raises(SettingsError, match=r'looks for <think>, but thoughts are not searched\. .*"with_thought"'):
        verifier("regex", pattern=r"^<think>.*</think>")
