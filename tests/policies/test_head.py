"""Chunked log-probabilities against autograd's plain ones."""

from __future__ import annotations

import pytest
import torch
from policies.policy_cases import assert_chunks_are_exact

from slimectl.policies import lm_head, onednn_linear
from slimectl.policies.lm_head import HeadOptions, linear_log_probs


@pytest.mark.parametrize("kept_logits", [0, 40, 10**6])
@pytest.mark.parametrize("entropy", [False, True])
def test_values_and_gradients_equal_the_plain_formulation(
    monkeypatch: pytest.MonkeyPatch, kept_logits: int, entropy: bool
):
    monkeypatch.setattr(lm_head, "CHUNK_LOGITS", 40)
    monkeypatch.setattr(lm_head, "KEPT_LOGITS", kept_logits)
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, 5, generator=draw, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(13, 5, generator=draw, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(13, (7,), generator=draw)
    scale = torch.randn(2, 7, generator=draw, dtype=torch.float64)
    plain = torch.log_softmax(hidden @ weight.t() / 0.7, dim=1)
    plain_entropy = -(plain.exp() * plain).sum(1)
    value = (scale[0] * plain[range(7), targets]).sum() + entropy * (scale[1] * plain_entropy).sum()
    expected = torch.autograd.grad(value, [hidden, weight])
    logprobs, entropies, _ = linear_log_probs(hidden, weight, targets, HeadOptions(0.7, entropy))
    torch.testing.assert_close(logprobs, plain[range(7), targets])
    loss = (scale[0] * logprobs).sum()
    if entropy:
        torch.testing.assert_close(entropies, plain_entropy)
        loss = loss + (scale[1] * entropies).sum()
    else:
        assert entropies is None
    torch.testing.assert_close(torch.autograd.grad(loss, [hidden, weight]), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("kept_logits", [0, 10**6])
def test_onednn_computes_multiples_of_rows_and_gives_the_values_and_gradients_of_torch(
    monkeypatch: pytest.MonkeyPatch, kept_logits: int, shared: bool
):
    monkeypatch.setattr(lm_head, "CHUNK_LOGITS", 200 * 13)
    monkeypatch.setattr(lm_head, "KEPT_LOGITS", kept_logits)
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(450, 8, generator=draw, requires_grad=True)
    weight = torch.randn(13, 8, generator=draw, requires_grad=True)
    state = torch.arange(450)
    targets = torch.randint(12, (450,), generator=draw)
    if shared:  # state 3 predicts another token too
        state, targets = (torch.cat([part[:4], part[3:]]) for part in (state, targets))
        targets[4] = 12
    scale = torch.randn(len(targets), generator=draw)
    products: list[tuple[int, ...]] = []
    plain_product = onednn_linear.product

    def counted(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        products.append((len(left), left.shape[1]))
        return plain_product(left, right)

    def step(fast: bool) -> list[torch.Tensor]:
        monkeypatch.setattr(onednn_linear, "_has_unused_instructions", lambda: fast)
        logprobs, entropies, _ = linear_log_probs(
            hidden, weight, targets, HeadOptions(0.7, entropy=True), state_Q=state if shared else None
        )
        assert entropies is not None
        assert len(entropies) == 450
        loss = (scale * logprobs).sum() + (scale[:450] * entropies).sum()
        return [logprobs, entropies, *torch.autograd.grad(loss, [hidden, weight])]

    monkeypatch.setattr(onednn_linear, "product", counted)
    plain = step(False)
    assert not products
    torch.testing.assert_close(step(True), plain, rtol=1e-5, atol=1e-5)
    chunks = [192, 192, 128]  # 200 in whole 64s; 450 states and 62 that predict nothing
    recomputed = chunks if not kept_logits else []
    assert [rows for rows, width in products if width == 8] == chunks + recomputed
    assert [rows for rows, width in products if width == 13] == chunks


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("kept_logits", [0, 200, 10**6])
def test_many_chunks_in_bfloat16_are_as_exact_as_one_product(
    monkeypatch: pytest.MonkeyPatch, kept_logits: int, entropy: bool, shared: bool
):
    draw = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, 24, generator=draw).bfloat16() for size in (1024, 13))
    state = torch.arange(1024)
    targets = torch.randint(12, (1024,), generator=draw)
    if shared:  # state 3 predicts another token too
        state, targets = (torch.cat([part[:4], part[3:]]) for part in (state, targets))
        targets[4] = 12
    scale, entropy_scale = torch.randn(len(targets), generator=draw), torch.randn(1024, generator=draw)

    def gradients(dtype: torch.dtype) -> list[torch.Tensor]:
        inputs = [part.to(dtype).requires_grad_() for part in (hidden, weight)]
        logprobs, entropies, _ = linear_log_probs(
            *inputs, targets, HeadOptions(0.7, entropy), state_Q=state if shared else None
        )
        loss = (scale * logprobs).sum() + (0 if entropies is None else (entropy_scale * entropies).sum())
        return [part.double() for part in torch.autograd.grad(loss, inputs)]

    assert_chunks_are_exact(gradients, monkeypatch, kept_logits)


def test_log_probs_of_bfloat16_are_float32():
    hidden, weight = torch.ones(2, 4, dtype=torch.bfloat16), torch.zeros(8, 4, dtype=torch.bfloat16)
    logprobs, entropy, _ = linear_log_probs(hidden, weight, torch.tensor([0, 7]), HeadOptions(entropy=True))
    assert logprobs.tolist() == pytest.approx([-2.0794415] * 2)  # -ln 8
    assert entropy.tolist() == pytest.approx([2.0794415] * 2)


def test_no_targets_still_reach_the_weights():
    weight = torch.ones(3, 2, requires_grad=True)
    hidden = torch.ones(0, 2, requires_grad=True)
    logprobs, _, _ = linear_log_probs(hidden, weight, torch.empty(0, dtype=torch.long), HeadOptions())
    logprobs.sum().backward()
    assert weight.grad.tolist() == [[0.0, 0.0]] * 3
