"""The larger of two numbers: balanced, without leaks, and the same for the same seed."""

from __future__ import annotations

import re
from itertools import pairwise

from slimectl.data.columns import PromptOptions
from slimectl.data.prompts import open_prompts
from slimectl.recipes.larger_number import prompts

LINE = re.compile(r"Which number is larger, (\d+) or (\d+)\?(?: (\d+))?")


def lines(text: str) -> list[tuple[int, int, int | None]]:
    found = [LINE.fullmatch(line) for line in text.split("\n")]
    assert all(found)
    return [(int(m[1]), int(m[2]), int(m[3]) if m[3] else None) for m in found if m]


def test_examples_are_right_and_the_question_is_open():
    for prompt in prompts(size=50):
        *examples, (a, b, nothing) = lines(prompt.text)
        assert nothing is None
        assert prompt.label == str(max(a, b))
        assert len(examples) == 4
        assert all(answer == max(x, y) for x, y, answer in examples)


def test_no_number_occurs_twice_in_a_prompt():
    for prompt in prompts(size=50):
        numbers = [number for a, b, _ in lines(prompt.text) for number in (a, b)]
        assert len(set(numbers)) == len(numbers) == 10
        assert all(10 <= number <= 999 for number in numbers)


def test_position_says_nothing_about_the_answer():
    first = [int(a > b) for prompt in prompts(size=400) for a, b, _ in [lines(prompt.text)[-1]]]
    assert sum(first) == 200
    assert sum(a != b for a, b in pairwise(first)) < 350  # and they do not take turns
    last_example = [int(a > b) for prompt in prompts(size=400) for a, b, _ in [lines(prompt.text)[-2]]]
    assert 160 < sum(a == b for a, b in zip(first, last_example, strict=True)) < 240
    assert all(sum(a > b for a, b, _ in lines(prompt.text)[:-1]) == 2 for prompt in prompts(size=50))


def test_held_out_questions_are_new():
    def asked(seed: int) -> set[frozenset[int]]:
        return {frozenset(lines(prompt.text)[-1][:2]) for prompt in prompts(seed, 3000, min_digits=1, max_digits=2)}

    assert not asked(0) & asked(1)
    assert asked(0) & asked(2)


def test_it_is_a_source_like_any_other():
    source = "slimectl.recipes.larger_number:prompts?size=6&seed=1&shots=0"
    first = next(open_prompts([source]))
    assert re.fullmatch(r"Which number is larger, \d+ or \d+\?", str(first.text))
    assert list(open_prompts([source], PromptOptions(start=2))) == list(open_prompts([source]))[2:]
    assert [prompt.text for prompt in prompts(1, 6, 0)] == [prompt.text for prompt in open_prompts([source])]
