"""Micro-batches through mcore's pipeline schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from slimectl.policies.megatron.batch import Batch

Finish = Callable[[Batch, Tensor], tuple[Tensor, Any]]
"""(batch, hidden states) on the last stage: the value whose gradient is taken, and what to keep."""


def run(
    chunks: Sequence[nn.Module],
    batches: Sequence[Batch],
    finish: Finish,
    *,
    forward_only: bool,
    before: Callable[[Batch, nn.Module], None] | None = None,
) -> list[Any]:
    """Forward and, unless `forward_only`, backward of all micro-batches; what `finish` kept, on the last stage.

    Gradients add up in the main gradients of this rank; they are shared with others by optimizer.step alone, so that
    several calls make one step. `before` is called ahead of each forward of a chunk.
    """

    def forward(iterator: Iterator[Batch], chunk: nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
        batch = next(iterator)
        if before is not None:
            before(batch, chunk)
        hidden = chunk(batch.tokens_T, batch.sequences)

        def loss(hidden: Tensor) -> tuple[Tensor, Tensor, Any]:
            value, kept = finish(batch, hidden)
            # The number of tokens would divide the gradient; the loss is a sum that needs no division.
            return value, torch.zeros((), dtype=torch.int, device=value.device), kept

        return hidden, loss

    with torch.set_grad_enabled(not forward_only):
        return get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(batches) for _ in chunks],
            model=list(chunks),
            num_microbatches=len(batches),
            seq_length=1,  # variable_seq_lengths: the stages tell each other the shapes
            micro_batch_size=1,
            forward_only=forward_only,
        )
