"""Records of what a step trains on, token by token (run.keep_samples = "train")."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from slimectl.algorithms.losses import PolicyLoss
from slimectl.algorithms.surrogates import TokenRows, ratio
from slimectl.types import Loss, TrainingSample

COLUMNS = ("rollout_log_probs", "ref_log_probs", "values", "returns", "advantages")
"""Lists of a row that its record has as they are, where there are any."""


def train_records(
    rows: Sequence[TrainingSample],
    executions: Sequence[int],
    log_probs: Sequence[list[float]],
    loss: Loss,
    *,
    step: int,
) -> Iterator[dict[str, Any]]:
    """Yield a record for every row of a step, in the form of a sample with one list a column, one value a token.

    `log_probs` are those of the policy before the update. The ratio is the one that the loss bounds: of gspo the
    sequence's. What a loss of the user's bounds is unknown.
    """
    clipped_by_row = _clipped(rows, log_probs, loss)
    for row, execution, current, (ratios, clipped) in zip(rows, executions, log_probs, clipped_by_row, strict=True):
        record: dict[str, Any] = {
            "group_index": row.group,
            "index": execution if row.index is None else row.index,
            "rollout_id": execution,
            "tokens": row.tokens,
            "response_length": row.response_length,
            "loss_mask": [int(weight != 0) for weight in row.loss_weights],
            "reward": row.reward,
            "step": step,
            "log_probs": current,
            "old_log_probs": current if row.old_log_probs is None else row.old_log_probs,
            "loss_weights": row.loss_weights,
            "ratios": ratios,
        }
        if clipped is not None:
            record["clipped"] = clipped
        yield record | {name: values for name in COLUMNS if (values := getattr(row, name))}


def _clipped(
    rows: Sequence[TrainingSample], log_probs: Sequence[list[float]], loss: Loss
) -> Iterator[tuple[list[float], list[int] | None]]:
    """Yield the ratio of every token of a row, and 1 where its loss is clipped; None where that is unknown."""
    for row, current in zip(rows, log_probs, strict=True):
        logprobs_T = _tensor(current)
        old_T = logprobs_T if row.old_log_probs is None else _tensor(row.old_log_probs)
        if not isinstance(loss, PolicyLoss) or len(row.advantages) != row.response_length:
            yield ratio(logprobs_T, old_T).tolist(), None
            continue
        token_rows = TokenRows(_tensor(row.loss_weights) != 0, torch.zeros(len(old_T), dtype=torch.long), 1)
        bounded_T = loss.surrogate.policy_logprobs(logprobs_T, old_T, token_rows)
        _, clipped_T = loss.surrogate(bounded_T, old_T, _tensor(row.advantages), token_rows)
        yield ratio(bounded_T, old_T).tolist(), clipped_T.int().tolist()


def _tensor(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)
