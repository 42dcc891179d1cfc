"""Token layout of a pack: positions in the input, in the attention grid and in front of the LM head.

T input tokens · R response tokens · N rows of the attention grid (T plus padding) · A answers · L answer inputs
P prompt tokens. A pack is [prompt | answer 1 | answer 2 …] per bundle; a prompt with one answer is one sequence.
All tensors are built once per pack and read by every layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slimectl.algorithms.packing import Pack, PromptGroup
from slimectl.types import TrainingSample

LEAST_FILL = 0.85
"""A bucket accepts the next shorter sequence while at least this fraction of its grid holds real tokens."""


@dataclass(frozen=True)
class CausalBucket:
    """Sequences of similar length, each attending to itself: rows [start, start + count · length) of the grid."""

    start: int
    count: int
    length: int


@dataclass(frozen=True)
class SharedPromptBucket:
    """Answers of similar length, each attending to its prompt and causally to itself."""

    start: int
    count: int
    length: int
    prompt_AP: Tensor
    """Input positions of the prompt's tokens, padded with its first."""
    mask_ALK: Tensor
    """Additive: 0 where answer token l may see key k of [prompt | answer], -inf elsewhere; [A, 1, L, P + L]."""


@dataclass
class PackedBatch:
    """One pack as tensors; `rows` are the indices of its rows in the caller's batch, in the order of `targets_R`."""

    tokens_T: Tensor
    positions_T: Tensor
    rows: list[int]
    row_R: Tensor
    targets_R: Tensor
    sources_R: Tensor
    """Input position whose hidden state predicts the target: the prompt's last for the first response token."""
    order_N: Tensor
    """Input position at each row of the grid (0 for padding)."""
    place_T: Tensor
    """Row of the grid of each input position."""
    causal: list[CausalBucket]
    answers: list[SharedPromptBucket]
    attention_calls: int = field(default=0)


@dataclass(frozen=True)
class _Span:
    """Input positions [start, start + length), and the span of the prompt if it is shared."""

    start: int
    length: int
    prompt: tuple[int, int] = (0, 0)

    @property
    def area(self) -> int:
        return self.length * (self.prompt[1] + self.length)


def build_packed_batch(
    rows: Sequence[TrainingSample], pack: Pack, *, dtype: torch.dtype, device: torch.device
) -> PackedBatch:
    """Build the layout of `pack`; attention masks have `dtype`."""
    tokens: list[int] = []
    positions: list[int] = []
    spans: list[_Span] = []
    sources: list[int] = []
    members = [i for bundle in pack for i in bundle.rows]
    for bundle in pack:
        _append(rows, bundle, tokens, positions, spans, sources)
    if not pack:
        # A rank without rows computes one unused token: the others wait for its collective calls.
        tokens, positions, spans = [0], [0], [_Span(0, 1)]
    targets = [token for i in members for token in rows[i].tokens[rows[i].prompt_length :]]
    row_R = [position for position, i in enumerate(members) for _ in range(rows[i].response_length)]
    order, causal, answers = _grid(spans, dtype=dtype, device=device)
    order_N = torch.tensor(order, device=device)
    real_N = (order_N >= 0).nonzero()[:, 0]
    place_T = torch.empty(len(tokens), dtype=torch.long, device=device)
    place_T[order_N[real_N]] = real_N

    def as_tensor(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=device)

    return PackedBatch(
        tokens_T=as_tensor(tokens), positions_T=as_tensor(positions), rows=members, row_R=as_tensor(row_R),
        targets_R=as_tensor(targets), sources_R=as_tensor(sources), order_N=order_N.clamp(min=0), place_T=place_T,
        causal=causal, answers=answers,
    )  # fmt: skip


def _append(
    rows: Sequence[TrainingSample],
    bundle: PromptGroup,
    tokens: list[int],
    positions: list[int],
    spans: list[_Span],
    sources: list[int],
) -> None:
    """Append one bundle to the pack. The last token of a row predicts nothing and is left out."""
    start, length = len(tokens), bundle.prompt_length
    tokens += rows[bundle.rows[0]].tokens[:length]
    positions += range(length)
    last_of_prompt = len(tokens) - 1
    for i in bundle.rows:
        answer = rows[i].tokens[length:-1] if rows[i].response_length else []
        if len(bundle.rows) > 1 and answer:
            spans.append(_Span(len(tokens), len(answer), (start, length)))
        if rows[i].response_length:
            sources += [last_of_prompt, *range(len(tokens), len(tokens) + len(answer))]
        tokens += answer
        positions += range(length, length + len(answer))
    spans.append(_Span(start, length if len(bundle.rows) > 1 else len(tokens) - start))


def _grid(
    spans: list[_Span], *, dtype: torch.dtype, device: torch.device
) -> tuple[list[int], list[CausalBucket], list[SharedPromptBucket]]:
    """Group spans of similar length into buckets; lists the input position at each row of the grid (-1 for padding)."""
    order: list[int] = []
    causal: list[CausalBucket] = []
    answers: list[SharedPromptBucket] = []
    for bucket in _buckets([span for span in spans if not span.prompt[1]], lambda span: span.length):
        causal.append(CausalBucket(len(order), len(bucket), _append_padded(bucket, order)))
    for bucket in _buckets([span for span in spans if span.prompt[1]], lambda span: span.area):
        start, length = len(order), _append_padded(bucket, order)
        answers.append(_answers(bucket, start, length, dtype, device))
    return order, causal, answers


def _append_padded(bucket: list[_Span], order: list[int]) -> int:
    """Append the padded rows of a bucket to the grid; returns the length that they are padded to."""
    length = max(span.length for span in bucket)
    for span in bucket:
        order += [*range(span.start, span.start + span.length), *([-1] * (length - span.length))]
    return length


def _buckets(spans: list[_Span], cost: Callable[[_Span], int]) -> list[list[_Span]]:
    """Sort spans into buckets, longest first; a new bucket starts where the current one would drop below LEAST_FILL."""
    buckets: list[list[_Span]] = []
    real = 0
    for span in sorted(spans, key=lambda span: (-cost(span), span.start)):
        if buckets and real + cost(span) >= LEAST_FILL * (len(buckets[-1]) + 1) * cost(buckets[-1][0]):
            buckets[-1].append(span)
            real += cost(span)
        else:
            buckets.append([span])
            real = cost(span)
    return buckets


def _answers(
    bucket: list[_Span], start: int, length: int, dtype: torch.dtype, device: torch.device
) -> SharedPromptBucket:
    """Build a bucket of answers. A padded row still attends to its prompt: a softmax over nothing would be NaN."""
    prompt_start_A = torch.tensor([span.prompt[0] for span in bucket], device=device)
    prompt_length_A = torch.tensor([span.prompt[1] for span in bucket], device=device)
    offset_P = torch.arange(max(span.prompt[1] for span in bucket), device=device)
    in_prompt_AP = offset_P[None] < prompt_length_A[:, None]
    prompt_AP = prompt_start_A[:, None] + offset_P[None] * in_prompt_AP
    visible_LL = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    visible_ALK = torch.cat(
        [in_prompt_AP[:, None].expand(-1, length, -1), visible_LL[None].expand(len(bucket), -1, -1)], dim=2
    )
    mask_ALK = torch.zeros(visible_ALK.shape, dtype=dtype, device=device).masked_fill_(~visible_ALK, -torch.inf)
    return SharedPromptBucket(start, len(bucket), length, prompt_AP, mask_ALK[:, None])
