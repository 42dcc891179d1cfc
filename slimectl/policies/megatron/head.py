"""Log-probabilities of a micro-batch's response tokens from the last stage's hidden states.

T tokens of this context-parallel rank · H hidden width · R response tokens of the pack · M response tokens of this rank
U states that predict them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
)
from torch import Tensor

from slimectl.policies.lm_head import (
    HeadOptions,
    HeadOutputs,
    VocabularyShard,
    linear_logits,
    linear_top_log_probs,
    predicted_log_probs,
)
from slimectl.policies.megatron.batch import MicroBatch


def response_log_probs(hidden_T1H: Tensor, weight_VH: Tensor, batch: MicroBatch, options: HeadOptions) -> HeadOutputs:
    """Return log-probabilities [R] and what else is requested. All ranks of the pack get the same numbers.

    Every rank may compute the same loss from them. Each back-propagates only the gradient of its own tokens and its own
    rows of the vocabulary, so that the sum over ranks in finalize_model_grads is the full gradient, counted once.
    """
    hidden_UH = whole(hidden_T1H)[batch.predictions.sources_U]
    logprobs_M, *parts = predicted_log_probs(hidden_UH, weight_VH, batch.predictions, options)
    return HeadOutputs(
        in_pack(logprobs_M, batch), *(None if part_M is None else in_pack(part_M, batch) for part_M in parts)
    )


def response_top_log_probs(
    hidden_T1H: Tensor, weight_VH: Tensor, batch: MicroBatch, k: int, options: HeadOptions
) -> tuple[Tensor, Tensor]:
    """Return the k likeliest tokens in place of every response token, and their log-probabilities, [R, K] each."""
    hidden_UH = whole(hidden_T1H)[batch.predictions.sources_U]
    tokens_UK, logprobs_UK = linear_top_log_probs(hidden_UH, weight_VH, k, options)
    of_states = batch.predictions.of_states
    return in_pack(of_states(tokens_UK), batch), in_pack(of_states(logprobs_UK), batch)


def response_logits(
    hidden_T1H: Tensor, weight_VH: Tensor, batch: MicroBatch, *, vocab_size: int, temperature: float
) -> Tensor:
    """Return logits over the temperature [R, vocabulary], on every rank. Gradients are as in `response_log_probs`."""
    hidden_UH = whole(hidden_T1H)[batch.predictions.sources_U]
    logits_UV = linear_logits(hidden_UH, weight_VH, temperature=temperature)
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        logits_UV = gather_from_tensor_model_parallel_region(logits_UV)
    return in_pack(batch.predictions.of_states(logits_UV[:, :vocab_size]), batch)


def shard_of(vocab_size: int, weight_VH: Tensor) -> VocabularyShard | None:
    """Return the vocabulary rows of this tensor-parallel rank, or None if it holds all."""
    group = parallel_state.get_tensor_model_parallel_group()
    rows = weight_VH.shape[0]
    if group.size() == 1 and rows == vocab_size:
        return None
    start = group.rank() * rows
    return VocabularyShard(start, max(0, min(rows, vocab_size - start)), group)


def whole(hidden_T1H: Tensor) -> Tensor:
    """Return hidden states [T, H] of all tokens of the context-parallel rank. Gradients are summed over the ranks."""
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        hidden_T1H = gather_from_sequence_parallel_region(hidden_T1H, tensor_parallel_output_grad=True)
    return hidden_T1H[:, 0]


def in_pack(values_M: Tensor, batch: MicroBatch) -> Tensor:
    """Combine the values of all context-parallel ranks, in the order of the pack's response tokens."""
    if parallel_state.get_context_parallel_world_size() == 1:
        return values_M
    return _InPack.apply(values_M, batch.mine_M, len(batch.targets_R))  # type: ignore[no-untyped-call]


class _InPack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values_M: Tensor, mine_M: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(mine_M)
        values_R = values_M.new_zeros(count, *values_M.shape[1:]).index_copy_(0, mine_M, values_M)
        # All other ranks hold zeros at these positions, so the sum is exact.
        dist.all_reduce(values_R, group=parallel_state.get_context_parallel_group())
        return values_R

    @staticmethod
    def backward(ctx: Any, grad_R: Tensor) -> tuple[Tensor, None, None]:
        return grad_R[ctx.saved_tensors[0]], None, None
