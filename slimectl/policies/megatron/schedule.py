"""Runs micro-batches with mcore's pipeline schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from slimectl.policies.megatron.batch import Batch

Finish = Callable[[Batch, Tensor], tuple[Tensor, Any]]
"""(batch, hidden states) on the last stage: the value to differentiate, and the output to return."""

Forward = Callable[[Batch, int], Tensor]
"""(batch, index of a chunk): its hidden states."""


def run(
    chunks: Sequence[nn.Module],
    batches: Sequence[Batch],
    finish: Finish,
    *,
    forward: Forward,
    forward_only: bool,
) -> list[Any]:
    """Run forward and, unless `forward_only`, backward of all micro-batches.

    Returns the outputs of `finish` on the last stage. Gradients accumulate in the main gradients of this rank; only
    optimizer.step reduces them over ranks, so that several calls make one step.
    """

    def step(batches: Iterator[Batch], chunk: nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
        batch = next(batches)
        hidden = forward(batch, next(i for i, candidate in enumerate(chunks) if candidate is chunk))

        def loss(hidden: Tensor) -> tuple[Tensor, Tensor, Any]:
            value, output = finish(batch, hidden)
            # The number of tokens would divide the gradient; the loss is a sum that needs no division.
            return value, torch.zeros((), dtype=torch.int, device=value.device), output

        return hidden, loss

    with torch.set_grad_enabled(not forward_only):
        return get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(batches) for _ in chunks],
            model=list(chunks),
            num_microbatches=len(batches),
            seq_length=1,  # variable_seq_lengths: the stages exchange the shapes
            micro_batch_size=1,
            forward_only=forward_only,
        )
