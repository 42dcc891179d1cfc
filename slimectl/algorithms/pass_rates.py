"""Of n attempts at one prompt, what they say about k."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that k attempts drawn from n, of which c succeeded, hold a success: 1 - C(n - c, k) / C(n, k).

    Chen et al. 2021, arXiv:2107.03374, eq. 1; unbiased, exact in integers.

    Raises ValueError unless 0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} of {c} successes in {n} attempts: needs 0 <= c <= n and 1 <= k <= n")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def powers_of_two(n: int) -> list[int]:
    """The k of pass@k: 1, 2, 4, ... up to n.

    >>> powers_of_two(6)
    [1, 2, 4]
    """
    return [1 << exponent for exponent in range(max(n, 0).bit_length())]


def average_at_n(rewards: Sequence[float]) -> float:
    """Mean reward of the n attempts: pass@1 where rewards are 0 and 1 (Chen et al. 2021, arXiv:2107.03374).

    Raises ValueError if there are none.
    """
    if not rewards:
        raise ValueError("avg@n of no attempts")
    return fmean(rewards)


def majority_at_n(answers: Sequence[str | None], successes: Sequence[bool]) -> float:
    """Success of the answer that most attempts gave (Wang et al. 2022, arXiv:2203.11171); one success an attempt.

    >>> majority_at_n(["7", "7", "3", None], [True, True, False, False])
    1.0

    Attempts without an answer (None) do not vote; if none has one the result is 0. Answers that tie share the vote: the
    mean of their successes, so the order of attempts does not matter. Answers are compared as strings: normalise
    them first.

    Raises ValueError if there are not as many answers as successes.
    """
    if len(answers) != len(successes):
        raise ValueError(f"{len(answers)} answers for {len(successes)} successes")
    votes: dict[str, list[bool]] = defaultdict(list)
    for answer, success in zip(answers, successes, strict=True):
        if answer is not None:
            votes[answer].append(success)
    if not votes:
        return 0.0
    most = max(map(len, votes.values()))
    return fmean(fmean(voters) for voters in votes.values() if len(voters) == most)
