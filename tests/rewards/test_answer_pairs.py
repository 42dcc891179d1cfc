"""Some 1 800 pairs, by families: no wrong response is paid, and of the right ones all but one in a hundred are."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from answer_pairs import DAPO, GPQA, IFEVAL, Family, Pair, fenced, outputs, program_in, programs
from sandboxes import PATIENT, needs_sandbox

from slimectl.rewards import verifier
from slimectl.rewards.code import same_output
from slimectl.rewards.fences import find_program
from slimectl.rewards.thoughts import answer_start
from slimectl.types import Sample

PAIRS = 120
"""Of each family, at least."""


def paid(rm_type: str) -> Callable[[Pair], bool]:
    graded = verifier(rm_type)

    def is_paid(pair: Pair) -> bool:
        reward = graded(Sample(response=pair.response, label=pair.label, metadata=pair.metadata))
        return (reward["acc"] if isinstance(reward, dict) else reward) == 1.0

    return is_paid


def takes_program(pair: Pair) -> bool:
    start = answer_start(Sample(response=pair.response))
    block = find_program(pair.response, start) if start >= 0 else None
    return block is not None and block.program == pair.label


def takes_output(pair: Pair) -> bool:
    return same_output(pair.response, pair.label, as_numbers=True)


FAMILIES: list[tuple[Callable[[Pair], bool], Family]] = [
    *((paid("gpqa"), family) for family in GPQA),
    *((paid("dapo"), family) for family in DAPO),
    *((paid("ifeval"), family) for family in IFEVAL),
    (takes_program, programs),
    (takes_output, outputs),
]


@pytest.mark.parametrize(("is_paid", "family"), FAMILIES, ids=[family.__name__ for _, family in FAMILIES])
def test_no_wrong_response_is_paid_and_right_ones_are(is_paid: Callable[[Pair], bool], family: Family):
    random, pairs = Random(family.__name__), list[Pair]()
    while len(pairs) < PAIRS:
        pairs += family(random)
    verdicts = [(pair, is_paid(pair)) for pair in pairs]
    assert [pair for pair, is_right in verdicts if is_right and not pair.right] == []
    missed = [pair for pair, is_right in verdicts if pair.right and not is_right]
    assert len(missed) <= 0.01 * sum(pair.right for pair in pairs), missed


@needs_sandbox
def test_programs_by_families_pass_their_tests():
    random, graded = Random(1), verifier("code", **PATIENT)
    for _ in range(12):
        program = program_in(random)
        response = f"{fenced(program, random)}\n```\n4\n```"
        tests = [{"input": "2", "output": "4"}, {"input": "21\n", "output": "42.0"}]
        assert graded(Sample(response=response, metadata={"tests": tests})) == 1.0, response
        tests = [{"input": "2", "output": "5"}, {"input": "3", "output": "-6"}]
        assert graded(Sample(response=response, metadata={"tests": tests})) == 0.0, response
