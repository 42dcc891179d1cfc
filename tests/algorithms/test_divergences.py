import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slimectl.algorithms.kl import approx_kl_metrics, kl_estimate, unbiased_kl_estimate


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("k1", [0.5, -0.5]),
        ("k2", [0.125, 0.125]),
        ("k3", [0.1065307, 0.1487213]),  # e^-0.5 - 1 + 0.5; e^0.5 - 1 - 0.5
        ("low_var_kl", [0.1065307, 0.1487213]),
    ],
)
def test_estimators_at_half_a_nat_either_way(kind, expected):
    assert kl_estimate(tensor(-1.0, -1.5), tensor(-1.5, -1.0), kind).tolist() == pytest.approx(expected, abs=1e-7)


def test_low_var_kl_is_held_at_ten_where_k3_is_not():
    assert kl_estimate(tensor(-5.0), tensor(0.0), "k3").item() == pytest.approx(142.413159)  # e^5 - 1 - 5
    assert kl_estimate(tensor(-5.0), tensor(0.0), "low_var_kl").item() == 10.0


def test_a_token_that_the_policy_gave_up_keeps_a_finite_loss_and_gradient():
    logprobs_T = tensor(-1000.0).requires_grad_()
    loss_T = kl_estimate(logprobs_T, tensor(0.0), "low_var_kl")
    loss_T.sum().backward()
    assert (loss_T.item(), logprobs_T.grad.item()) == (10.0, 0.0)


def test_unbiased_variant_weighs_by_the_ratio_to_the_sampling_policy():
    logprobs_T = tensor(-1.0).requires_grad_()
    estimate_T = unbiased_kl_estimate(logprobs_T, tensor(-1.5), tensor(-1.2), "k1")
    assert estimate_T.item() == pytest.approx(math.exp(0.2) * 0.5)  # 0.610701
    estimate_T.sum().backward()
    assert logprobs_T.grad.item() == pytest.approx(math.exp(0.2) * (0.5 + 1.0))  # product rule: w r + w


def test_unbiased_k3_has_the_gradient_of_the_divergence_itself():
    """Over a vocabulary of three, tokens weighted by the sampling policy: the mean is KL and so is its gradient."""
    logits_V, ref_V, old_V = tensor(0.3, -0.2, 0.9).requires_grad_(), tensor(0.1, 0.2, -0.4), tensor(0.5, 0.0, 0.2)
    logprobs_V, ref_V, old_V = logits_V.log_softmax(0), ref_V.log_softmax(0), old_V.log_softmax(0)
    exact = (logprobs_V.exp() * (logprobs_V - ref_V)).sum()
    estimate = (old_V.exp() * unbiased_kl_estimate(logprobs_V, ref_V, old_V, "k3")).sum()
    assert estimate.item() == pytest.approx(exact.item())
    (exact_V,) = torch.autograd.grad(exact, logits_V, retain_graph=True)
    (estimate_V,) = torch.autograd.grad(estimate, logits_V)
    assert estimate_V.tolist() == pytest.approx(exact_V.tolist())


def test_movement_away_from_the_policy_that_sampled():
    logprobs_T = tensor(-1.0, -2.0).requires_grad_()
    found = approx_kl_metrics(logprobs_T, tensor(-1.5, -2.0))
    assert {name: value_T.tolist() for name, value_T in found.items()} == {
        "ppo_kl": [-0.5, 0.0],
        "approxkl": [0.125, 0.0],  # 0.5² / 2
        "ois": [pytest.approx(1.6487213), 1.0],  # e^0.5
    }
    assert not any(value_T.requires_grad for value_T in found.values())


def test_an_unknown_kind_names_the_known():
    with pytest.raises(ValueError, match=r"unknown KL estimator 'k4'\. Available: k1, k2, k3, low_var_kl"):
        kl_estimate(tensor(0.0), tensor(0.0), "k4")


@given(st.floats(-8, 0), st.floats(-8, 0))
def test_k3_is_never_negative_and_nothing_flows_to_the_reference(logprob, ref):
    ref_T = tensor(ref).requires_grad_()
    k3_T = kl_estimate(tensor(logprob).requires_grad_(), ref_T, "k3")
    k3_T.sum().backward()
    assert k3_T.item() >= -1e-12
    assert ref_T.grad is None
