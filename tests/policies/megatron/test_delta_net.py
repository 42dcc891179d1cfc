"""The chunked gated delta rule is the recurrence that it stands for, sequence by sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from slimectl.architectures.parallel import ParallelLayout
from slimectl.policies.megatron.batch import packed
from slimectl.policies.megatron.delta_net import _causal_convolution, gated_delta_rule

LENGTHS = (3, 150, 64, 65, 1)


def recurrence(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """One sequence, one token after another: forget, correct, read."""
    state = torch.zeros(query.shape[1], query.shape[2], value.shape[2], dtype=query.dtype)
    outputs = []
    for q, k, v, g, b in zip(query, key, value, decay, beta, strict=True):
        state = state * g.exp()[:, None, None]
        missing = v - torch.einsum("hkv,hk->hv", state, k)
        state = state + torch.einsum("hk,hv->hkv", k, missing * b[:, None])
        outputs.append(torch.einsum("hkv,hk->hv", state, q))
    return torch.stack(outputs)


def test_chunks_compute_the_recurrence_and_its_gradients():
    torch.manual_seed(0)
    tokens, heads, width, depth = sum(LENGTHS), 2, 8, 6
    query, key = (torch.nn.functional.normalize(torch.randn(tokens, heads, width).double(), dim=-1) for _ in "qk")
    value, decay = torch.randn(tokens, heads, depth).double(), -torch.rand(tokens, heads).double()
    given = [query, key, value, decay, torch.rand(tokens, heads).double()]
    inputs = [part.requires_grad_() for part in given]
    row = packed(LENGTHS, ParallelLayout(), rank=0, device=torch.device("cpu"))
    chunked = gated_delta_rule(*inputs, row)
    plain = torch.cat([recurrence(*parts) for parts in zip(*[part.split(LENGTHS) for part in inputs], strict=True)])
    assert (chunked - plain).abs().max() < 1e-12

    weights = torch.randn_like(plain)
    gradients = [torch.autograd.grad((output * weights).sum(), inputs) for output in (chunked, plain)]
    for ours, theirs in zip(*gradients, strict=True):
        assert (ours - theirs).abs().max() < 1e-10


def test_the_convolution_sees_no_other_sequence():
    states = torch.arange(1.0, 7.0)[:, None]
    kernel = torch.tensor([[100.0, 10.0, 1.0]])  # two tokens ago, one ago, now
    positions = torch.tensor([0, 1, 2, 0, 1, 2])
    output = _causal_convolution(states, kernel, positions)
    assert output[:, 0].tolist() == [1, 12, 123, 4, 45, 456]
