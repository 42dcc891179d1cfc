"""Prompts that ask for the larger of two numbers. A small model answers some of them correctly."""

from __future__ import annotations

import random
from collections.abc import Iterator
from zlib import crc32

from slimectl.types import Prompt

Pair = tuple[int, int]


def prompts(
    seed: int = 0, size: int = 1000, shots: int = 4, min_digits: int = 2, max_digits: int = 3
) -> Iterator[Prompt]:
    """Yield `size` few-shot prompts. The label is the larger number as a string. Stop the answer at a newline.

    >>> print(next(prompts(shots=2)).text)
    Which number is larger, 548 or 377? 548
    Which number is larger, 74 or 698? 698
    Which number is larger, 680 or 210?

    The larger number comes first in half of the questions, and in half of a prompt's examples. No number occurs twice
    in a prompt. An even seed and an odd one never ask for the same two numbers, so train on one and hold out the other.
    SmolLM2-135M-Instruct begins near 0.4 at temperature 1, and answers with the other number equally often.
    """
    for i in range(size):
        # Questions 2k and 2k + 1 share a coin and take its two sides.
        larger_first = bool(random.Random(f"larger_number:{seed}:coin:{i // 2}").getrandbits(1)) ^ bool(i % 2)
        rng = random.Random(f"larger_number:{seed}:{i}")
        numbers = range(10 ** (min_digits - 1), 10**max_digits)
        while True:
            sampled_numbers = rng.sample(numbers, 2 * (shots + 1))
            question_pair, *examples = (
                _order((a, b), False) for a, b in zip(sampled_numbers[::2], sampled_numbers[1::2], strict=True)
            )
            if crc32(repr(question_pair).encode()) % 2 == seed % 2:
                break
        larger_first_flags = [bool(k % 2) for k in range(shots)]
        rng.shuffle(larger_first_flags)
        example_pairs = [_order(pair, place) for pair, place in zip(examples, larger_first_flags, strict=True)]
        text = "".join(f"{_question(pair)} {max(pair)}\n" for pair in example_pairs)
        yield Prompt(text=text + _question(_order(question_pair, larger_first)), label=str(max(question_pair)))


def _order(pair: Pair, larger_first: bool) -> Pair:
    return (max(pair), min(pair)) if larger_first else (min(pair), max(pair))


def _question(pair: Pair) -> str:
    return f"Which number is larger, {pair[0]} or {pair[1]}?"
