"""Pass rates of n attempts at one prompt: pass@k, avg@n, maj@n."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean


def pass_at_k(n: int, c: int, k: int) -> float:
    """Estimate the probability that k of n attempts, of which c succeeded, include a success: 1 - C(n-c, k) / C(n, k).

    Chen et al. 2021, arXiv:2107.03374, eq. 1; unbiased, exact in integers.

    Raises ValueError unless 0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} of {c} successes in {n} attempts: needs 0 <= c <= n and 1 <= k <= n")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def powers_of_two(n: int) -> list[int]:
    """Return the k of pass@k: 1, 2, 4, ... up to n.

    >>> powers_of_two(6)
    [1, 2, 4]
    """
    return [1 << exponent for exponent in range(max(n, 0).bit_length())]


def average_at_n(rewards: Sequence[float]) -> float:
    """Return the mean reward of the n attempts: pass@1 if rewards are 0 and 1 (Chen et al. 2021, arXiv:2107.03374).

    Raises ValueError if there are none.
    """
    if not rewards:
        raise ValueError("avg@n of no attempts")
    return fmean(rewards)


def majority_at_n(answers: Sequence[str | None], successes: Sequence[bool]) -> float:
    """Return the success of the most frequent answer (Wang et al. 2022, arXiv:2203.11171); one success per attempt.

    >>> majority_at_n(["7", "7", "3", None], [True, True, False, False])
    1.0

    Attempts without an answer (None) do not vote; if none has one the result is 0. Tied answers give the mean of their
    successes, so the order of attempts does not matter. Answers are compared as strings: normalise them first.

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
    max_votes = max(map(len, votes.values()))
    return fmean(fmean(results) for results in votes.values() if len(results) == max_votes)
