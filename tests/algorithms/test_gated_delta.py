"""The chunked gated delta rule is the recurrence that it stands for, sequence by sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from slimectl.algorithms.gated_delta import Chunks, causal_convolution, gated_delta_rule, l2_normalize

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
    chunked, _ = gated_delta_rule(*inputs, Chunks(LENGTHS, torch.device("cpu")))
    plain = torch.cat([recurrence(*parts) for parts in zip(*[part.split(LENGTHS) for part in inputs], strict=True)])
    assert (chunked - plain).abs().max() < 1e-12

    weights = torch.randn_like(plain)
    gradients = [torch.autograd.grad((output * weights).sum(), inputs) for output in (chunked, plain)]
    for ours, theirs in zip(*gradients, strict=True):
        assert (ours - theirs).abs().max() < 1e-10


def test_sequences_go_on_from_the_state_after_their_first_part():
    torch.manual_seed(1)
    lengths, first = (70, 5, 140), (64, 2, 100)
    parts = [
        [torch.nn.functional.normalize(torch.randn(length, 2, 8), dim=-1), torch.randn(length, 2, 6)]
        for length in lengths
    ]
    decay, beta = ([torch.rand(length, 2) for length in lengths] for _ in range(2))

    def computed(spans: list[slice], state: Tensor | None = None) -> tuple[list[Tensor], Tensor]:
        def cut(values: list[Tensor]) -> Tensor:
            return torch.cat([value[span] for value, span in zip(values, spans, strict=True)])

        key, value = cut([k for k, _ in parts]), cut([v for _, v in parts])
        counts = [len(part[0][span]) for part, span in zip(parts, spans, strict=True)]
        chunks = Chunks(counts, torch.device("cpu"))
        output, after = gated_delta_rule(key, key, value, -cut(decay), cut(beta), chunks, state)
        return list(output.split(counts)), after

    whole, last = computed([slice(None)] * 3)
    start, state = computed([slice(count) for count in first])
    end, after = computed([slice(count, None) for count in first], state)
    for one, before, behind in zip(whole, start, end, strict=True):
        torch.testing.assert_close(torch.cat([before, behind]), one, atol=1e-5, rtol=0)
    torch.testing.assert_close(after, last, atol=1e-5, rtol=0)


def test_the_convolution_sees_no_other_sequence():
    states = torch.arange(1.0, 7.0)[:, None]
    kernel = torch.tensor([[100.0, 10.0, 1.0]])  # two tokens ago, one ago, now
    positions = torch.tensor([0, 1, 2, 0, 1, 2])
    output = causal_convolution(states, kernel, positions)
    assert output[:, 0].tolist() == [1, 12, 123, 4, 45, 456]


def test_l2_normalize_divides_by_the_norm_of_each_row():
    states = l2_normalize(torch.tensor([[3.0, 4.0], [0.0, -2.0], [0.0, 0.0]]))
    torch.testing.assert_close(states, torch.tensor([[0.6, 0.8], [0.0, -1.0], [0.0, 0.0]]), atol=1e-6, rtol=0)
