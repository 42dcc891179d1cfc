"""No response makes a verifier raise, stall, or give anything but a number within its bounds.

A sample of it runs here; all of it with SLIMECTL_HOSTILE=100000 (some 10 minutes on two cores).
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from collections.abc import Iterator

import pytest
from graders import grading, says
from hostile import EXPLOSIVE, LABELS, responses
from hypothesis import given, settings
from hypothesis import strategies as st

from slimectl.executors.local import LocalExecutor
from slimectl.rewards import Verifier, known_types, verifier, weighted
from slimectl.settings import Settings
from slimectl.stages.score import Grader, score
from slimectl.types import Sample

COUNT = int(os.environ.get("SLIMECTL_HOSTILE", "1000"))
TIMEOUT_S = 5.0
"""score.timeout_s, here for all verifiers together, in seconds of CPU: the machine's other work is not theirs."""

STUCK_S = 60.0
"""After which a worker is killed; wall clock."""

TESTS = [{"input": "", "output": "1\n"}]
CHOICES = ["5", "42", "x", "yes"]
OPTIONS: dict[str, dict[str, object]] = {
    "length_penalty": {"limit": 100},
    "overlong": {"limit": 100, "buffer": 50},
    "regex": {"pattern": r"Answer:\s*(.*)"},
}
APART = ("code", "ifbench", "ifeval", "judge", "random", "reasoning_gym", "remote_rm", "reward_model")
NAMES = [prefix + name for name in known_types() if name not in APART for prefix in ("", "boxed_")]
VERIFIERS: dict[str, Verifier] = {
    **{name: verifier(name, **OPTIONS.get(name.removeprefix("boxed_"), {})) for name in NAMES},
    "sum": weighted([{"type": "math"}, {"type": "repetition", "weight": -0.5}]),
    "pattern in the label": verifier("regex"),
}


def sample_of(response: str, label: str, **metadata: object) -> Sample:
    tokens = list(range(len(response) % 200))
    return Sample(response=response, label=label, tokens=tokens, response_length=len(tokens), metadata=metadata)


def label_for(name: str, label: str) -> str | int:
    plain = name.removeprefix("boxed_")
    return {"gpqa": 1, "numeric": "5", "pattern in the label": "x+"}.get(plain, label)


def graded(given: Verifier, sample: Sample) -> float:
    """The number that a verifier gives; asserts what every verdict promises."""
    verdict = given.explain(sample)
    number = verdict.reward["score"] if isinstance(verdict.reward, dict) else verdict.reward
    assert isinstance(number, float)
    assert math.isfinite(number)
    assert given.bounds[0] - 1e-9 <= number <= given.bounds[1] + 1e-9
    assert verdict.span is None or sample.response[slice(*verdict.span)] == verdict.extracted
    assert "\n" not in verdict.why
    return number


def grade_by_all(pair: tuple[str, str]) -> float:
    """Seconds of CPU that all verifiers took for one response."""
    started = time.process_time()
    for name, one in VERIFIERS.items():
        graded(one, sample_of(pair[0], label_for(name, pair[1]), choices=CHOICES))
    return time.process_time() - started


def warm_up(pair: tuple[str, str]) -> None:
    """Import sympy off the clock."""
    verifier("math")(sample_of(r"\boxed{2x}", "x+x"))


@pytest.fixture(scope="module")
def executor() -> Iterator[LocalExecutor]:
    made = LocalExecutor()
    list(made.map(warm_up, [("", "")] * 8, workers=2))
    yield made
    made.close()


def test_no_hostile_response_raises_or_overruns(executor: LocalExecutor):
    pairs = [
        *((f"\\boxed{{{text}}}", label) for text in EXPLOSIVE for label in (LABELS[0], text)),
        *responses(COUNT, seed=1),
    ]
    started, seconds = time.perf_counter(), []
    for pair, result in zip(pairs, executor.map(grade_by_all, pairs, workers=2, timeout_s=STUCK_S), strict=True):
        assert isinstance(result, float), f"{result!r} for {pair!r}"
        assert result < TIMEOUT_S, pair
        seconds.append(result)
    print(
        f"{len(pairs)} responses, {len(VERIFIERS)} verifiers each: {time.perf_counter() - started:.0f} s; "
        f"mean {statistics.fmean(seconds) * 1e3:.2f} ms, at most {max(seconds):.2f} s",
        file=sys.stderr,
    )


@pytest.mark.parametrize("name", [name for name in VERIFIERS if not name.startswith("boxed_")])
@settings(max_examples=50, deadline=None)
@given(
    text=st.text(st.characters(codec=None), max_size=80), around=st.sampled_from(["{}", "\\boxed{{{}}}", "Answer: {}"])
)
def test_no_text_at_all_raises(name: str, text: str, around: str):
    sample = sample_of(around.format(text), label_for(name, "5"), choices=CHOICES)
    assert graded(VERIFIERS[name], sample) == graded(VERIFIERS[name], sample)


TASKS = [
    {"source_dataset": "countdown", "numbers": [1, 2, 3], "target": 6},
    {"source_dataset": "spell_backward", "word": "x"},
    {"source_dataset": "simple_equations", "equation": "x = 6", "variable": "x"},
]


def grade_tasks(pair: tuple[str, str]) -> float:
    started = time.process_time()
    for task in TASKS:
        graded(verifier("reasoning_gym"), sample_of(pair[0], "6", **task))
    return time.process_time() - started


def test_no_hostile_response_breaks_a_reasoning_task(executor: LocalExecutor):
    pytest.importorskip("reasoning_gym")
    list(executor.map(grade_tasks, [("", "")] * 8, workers=2))
    pairs = list(responses(COUNT // 10, seed=2))
    results = list(executor.map(grade_tasks, pairs, workers=2, timeout_s=STUCK_S))
    assert [result for result in results if not isinstance(result, float)] == []


def test_no_hostile_response_or_reply_breaks_the_judge():
    given = {"rm_type": "judge", "explain": True, "concurrency": 16}
    pairs = [*responses(COUNT // 2, seed=4), *((f"Score: {text}", "5") for text in EXPLOSIVE)]
    with grading(lambda body: says(body["messages"][0]["content"].rpartition("|")[2])) as server:
        options = {"template": "{prompt}{label}|{response}", "unread": 0.5}
        chosen = Settings.model_validate({"score": {**given, "rm_url": server.url, "rm_options": options}})
        judge = Grader(chosen)
        samples = [sample_of(*pair) for pair in pairs]
        for sample in score(samples, judge, chosen.score, executor=LocalExecutor()):
            assert isinstance(sample.reward, float)
            assert 0.0 <= sample.reward <= 1.0
            assert "\n" not in sample.metadata["explanation"]["why"]


def grade_code(pair: tuple[str, str]) -> float:
    started = time.perf_counter()
    graded(verifier("code", test_timeout_s=1.0), sample_of(f"```python\n{pair[0]}\n```", "", tests=TESTS))
    return time.perf_counter() - started


def test_no_hostile_program_breaks_the_sandbox(executor: LocalExecutor):
    from test_code import refusal

    if refusal():
        pytest.skip(refusal())
    pairs = list(responses(max(12, COUNT // 100), seed=3))
    results = list(executor.map(grade_code, pairs, workers=2, timeout_s=STUCK_S))
    assert [result for result in results if not isinstance(result, float)] == []
