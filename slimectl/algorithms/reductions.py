"""Loss weights per token, which hold the whole reduction of a step.

With these weights in `TrainingSample.loss_weights` the loss of a step is sum(weights * loss). No later stage needs a
denominator, and the gradient cannot depend on ranks, packs or micro-batches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence

from slimectl.settings.needs import Reduction


def token_weights(
    masks: Sequence[Sequence[int]], executions: Sequence[Hashable], *, kind: Reduction, fixed_length: int | None = None
) -> list[list[float]]:
    """Return a weight per response token, shaped like `masks` (0 or 1 per token). `executions` has one id per sample.

    >>> token_weights([[1, 1], [1, 0]], executions=[0, 1], kind="rollout_mean")
    [[0.25, 0.25], [0.5, 0.0]]

    With N executions in the step and M unmasked tokens in this one (all its samples together):
    rollout_mean  1 / (N M)              mean over executions of each one's token mean (GRPO, arXiv:2402.03300, eq. 3)
    per_token     1 / (sum of all M)     mean over tokens (DAPO, arXiv:2503.14476, eq. 12)
    fixed_length  1 / (N fixed_length)   independent of lengths (Dr. GRPO, arXiv:2503.20783)
    The first two sum to 1 over a step unless a whole sample is masked, the third to (sum of all M) / (N fixed_length).
    A fully masked execution has zero weights but still counts in N, so removing samples makes a step smaller and does
    not change the weights of the others.

    Raises ValueError for unequal lengths, an unknown kind, or a missing `fixed_length`.
    """
    if len(masks) != len(executions):
        raise ValueError(f"{len(masks)} masks for {len(executions)} executions")
    counts: dict[Hashable, int] = defaultdict(int)
    for mask, execution in zip(masks, executions, strict=True):
        counts[execution] += sum(mask)
    if kind == "rollout_mean":
        denominators = {execution: len(counts) * count for execution, count in counts.items()}
    elif kind == "per_token":
        denominators = dict.fromkeys(counts, sum(counts.values()))
    elif kind == "fixed_length":
        if fixed_length is None or fixed_length < 1:
            raise ValueError(f"fixed_length is {fixed_length}, but must be a positive number of tokens")
        denominators = dict.fromkeys(counts, len(counts) * fixed_length)
    else:
        raise ValueError(f"unknown reduction {kind!r}. Available: rollout_mean, per_token, fixed_length")
    return [
        [bit / denominators[execution] if bit else 0.0 for bit in mask]
        for mask, execution in zip(masks, executions, strict=True)
    ]
