"""The head over a part of the vocabulary: padding rows count for nothing."""

from __future__ import annotations

import pytest
import torch

from slimectl.architectures.parallel import ParallelLayout
from slimectl.policies import lm_head
from slimectl.policies.lm_head import HeadOptions, VocabularyShard, linear_log_probs
from slimectl.policies.megatron import parallel
from slimectl.policies.megatron.parallel import parallel_state


@pytest.mark.parametrize("kept_logits", [0, 10**6])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_padding_rows_take_part_in_nothing(
    monkeypatch: pytest.MonkeyPatch, kept_logits: int, entropy: bool, dtype: torch.dtype
):
    """A shard of 13 rows and 3 of padding against the plain formulation over 13; two ranks are in test_equal_ranks."""
    parallel.start(ParallelLayout(), seed=0)
    monkeypatch.setattr(lm_head, "CHUNK_LOGITS", 48)
    monkeypatch.setattr(lm_head, "KEPT_LOGITS", kept_logits)
    shard = VocabularyShard(0, 13, parallel_state.get_tensor_model_parallel_group())
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, 5, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(16, 5, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(13, (7,), generator=draw)
    scale = torch.randn(2, 7, generator=draw, dtype=torch.float64)
    values = [
        linear_log_probs(hidden, rows, targets, HeadOptions(0.7, entropy, group))[:2]
        for rows, group in ((weight, shard), (weight[:13], None))
    ]
    losses = [(scale[0] * logprobs).sum() + (0 if h is None else (scale[1] * h).sum()) for logprobs, h in values]
    found, expected = (torch.autograd.grad(loss, [hidden, weight]) for loss in losses)
    tolerance = {"rtol": 1e-9, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 0.02, "atol": 0.01}
    torch.testing.assert_close(values[0], values[1], **tolerance)
    torch.testing.assert_close(found, expected, **tolerance)
    assert not found[1][13:].any()
