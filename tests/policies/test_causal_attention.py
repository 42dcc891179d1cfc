"""Attention with windows, soft caps and sinks equals the softmax over all scores that defines it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slimectl.policies import causal_attention as module
from slimectl.policies.causal_attention import Scoring, causal_attention


def defined(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    """One row of scores at a time, with the sink as a key of its own."""
    heads, queries, keys = query.shape[1], query.shape[2], key.shape[2]
    outputs = torch.zeros(*query.shape[:3], value.shape[3])
    for head in range(heads):
        k, v = (states[:, head * key.shape[1] // heads] for states in (key, value))
        for i in range(queries):
            position = keys - queries + i
            first = 0 if scoring.window is None else max(0, position - scoring.window + 1)
            seen = slice(first, position + 1)
            scores = (k[:, seen] @ query[:, head, i, :, None])[..., 0] / 2  # scale 4 ** -0.5
            if scoring.cap is not None:
                scores = scoring.cap * torch.tanh(scores / scoring.cap)
            if scoring.sinks_H is not None:
                scores = torch.cat([scores, scoring.sinks_H[head].expand(len(scores), 1)], dim=1)
            weights = scores.softmax(-1)[:, : position + 1 - first]
            outputs[:, head, i] = (weights[:, None] @ v[:, seen])[:, 0]
    return outputs


@pytest.mark.parametrize(
    ("window", "cap", "sinks"),
    [
        (3, None, False),
        (1, None, False),
        (None, 2.0, False),
        (None, None, True),
        (5, 2.0, True),
        (99, None, False),
        (4, None, True),
    ],
)
@pytest.mark.parametrize(("queries", "keys"), [(9, 9), (4, 9), (9, 11), (3, 11)])
def test_windows_caps_and_sinks_are_what_defines_them(monkeypatch, window, cap, sinks, queries, keys):
    monkeypatch.setattr(module, "CHUNK", 4)  # chunks in the middle, and a rest
    monkeypatch.setattr(module, "DENSE_SCORES", 200)  # the larger calls are recomputed
    module._mask_matrix.cache_clear()
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, queries, 4), (2, 2, keys, 4), (2, 2, keys, 6), (4,))
    states = [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]
    *qkv, sinks_H = states
    scoring = Scoring(window, cap, sinks_H if sinks else None)
    results = [causal_attention(*qkv, None, scoring), defined(*qkv, scoring)]
    assert torch.allclose(*results, atol=1e-6)
    used = states if sinks else qkv
    gradients = [torch.autograd.grad(result.square().sum(), used) for result in results]
    for one, other in zip(*gradients, strict=True):
        assert torch.allclose(one, other, atol=1e-5)
    module._mask_matrix.cache_clear()
