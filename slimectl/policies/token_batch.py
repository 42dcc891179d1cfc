"""Builds the token batch of a pack from its rows, and merges the metrics of packs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from slimectl.errors import RecordError
from slimectl.types import TokenBatch, TrainingSample

CONSTANTS = {
    "loss_weights": "weights_T", "advantages": "advantages_T", "old_log_probs": "old_logprobs_T",
    "ref_log_probs": "ref_logprobs_T", "rollout_log_probs": "rollout_logprobs_T",
    "values": "values_T", "returns": "returns_T",
}  # fmt: skip


def available_columns(rows: Sequence[TrainingSample]) -> list[str]:
    """Return the names of the constant columns in the batch. A column is in all rows or in none. Raises RecordError."""
    names = []
    for name in CONSTANTS:
        lengths = [len(getattr(row, name) or ()) for row in rows]
        if not any(lengths) and name != "loss_weights":
            continue
        for i, (length, row) in enumerate(zip(lengths, rows, strict=True)):
            if length != row.response_length:
                raise RecordError(f"row {i}: {name}: {length} values for {row.response_length} response tokens")
        names.append(name)
    return names


def check_vocabulary(rows: Sequence[TrainingSample], vocabulary: int) -> None:
    """Raise RecordError for a token without an embedding in the model, which would end the process on a GPU."""
    for i, row in enumerate(rows):
        if max(row.tokens, default=0) >= vocabulary:
            raise RecordError(
                f"row {i}: token {max(row.tokens)} is not in the model's vocabulary of {vocabulary} tokens. "
                f"Use samples whose tokens come from this model's tokenizer."
            )


def response_tokens(
    rows: Sequence[TrainingSample],
    names: Sequence[str],
    *,
    members: Sequence[int],
    row_R: Tensor,
    logprobs_R: Tensor,
    entropy_R: Tensor | None,
    predicted_R: Tensor | None = None,
) -> TokenBatch:
    """Build the pack of the rows `members` of `rows`, with the constant columns `names`.

    `row_R` is the position in `members` that each token belongs to.
    """
    columns = {
        CONSTANTS[name]: torch.tensor(
            [value for i in members for value in getattr(rows[i], name)], dtype=torch.float32, device=logprobs_R.device
        )
        for name in names
    }
    rewards = [rows[i].reward for i in members]
    if None not in rewards:
        columns["rewards_T"] = torch.tensor(rewards, dtype=torch.float32, device=logprobs_R.device)[row_R]
    samples = [rows[i] for i in members]
    lengths = [len(sample.tokens) for sample in samples]
    return TokenBatch(
        logprobs_R, entropy_R, row_R, len(members), **columns, total_lengths=lengths, predicted_T=predicted_R,
        has_weight=any(any(sample.loss_weights) for sample in samples), samples=samples,
    )  # fmt: skip


def merge_metrics(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge metrics of packs or ranks: sums by name, in order, or extremes where a name ends in _max or _min."""
    merged: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            if name not in merged:
                merged[name] = value
            elif name.endswith(("_max", "_min")):
                merged[name] = _extreme(name, merged[name], value)
            else:
                merged[name] = merged[name] + value
    return merged


def _extreme(name: str, *values: Any) -> Any:
    """Return the larger or the smaller value, depending on the name. Tensors are compared on their device."""
    largest = name.endswith("_max")
    if all(isinstance(value, Tensor) for value in values):
        return (torch.maximum if largest else torch.minimum)(*values)
    return (max if largest else min)(values)


def read_metrics(sums: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the numbers in scalar tensors of one device, waiting for a GPU only once."""
    if not sums:
        return {}
    return dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True))
