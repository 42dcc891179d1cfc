import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slimectl.algorithms.surrogates import (
    check_tokens,
    cispo_loss,
    clip_fraction,
    ppo_clip,
    ratio,
    ratio_bound_metrics,
)


def logs(*ratios):
    """Log-probabilities whose ratio to an old policy of probability 1 is as given."""
    return torch.tensor(ratios, dtype=torch.float64).log().requires_grad_()


def zeros(count):
    return torch.zeros(count, dtype=torch.float64)


def test_the_worse_of_the_clipped_and_the_free_branch_counts():
    advantages_T = torch.tensor([1.0, 1.0, -1.0, -1.0, 2.0], dtype=torch.float64)
    loss_T = ppo_clip(logs(1.5, 0.5, 1.5, 0.5, 1.1), zeros(5), advantages_T, low=0.2, high=0.28)
    # -min(1.5, 1.28), -min(0.5, 0.8), max(1.5, 1.28), max(0.5, 0.8), -1.1 * 2
    assert loss_T.tolist() == pytest.approx([-1.28, -0.5, 1.5, 0.8, -2.2])


def test_gradient_is_zero_exactly_where_the_clip_holds():
    logprobs_T = logs(1.5, 0.5, 1.5, 0.5, 1.1)
    advantages_T = torch.tensor([1.0, 1.0, -1.0, -1.0, 2.0], dtype=torch.float64)
    ppo_clip(logprobs_T, zeros(5), advantages_T, low=0.2, high=0.28).sum().backward()
    # d(-ratio A)/d logp = -ratio A where free: 0, -0.5, 1.5, 0, -2.2
    assert logprobs_T.grad.tolist() == pytest.approx([0.0, -0.5, 1.5, 0.0, -2.2])


def test_clip_fraction_marks_tokens_whose_clipped_branch_is_strictly_larger():
    advantages_T = torch.tensor([1.0, 1.0, -1.0, -1.0, 0.0], dtype=torch.float64)
    marks_T = clip_fraction(logs(1.5, 0.5, 1.5, 0.5, 9.0), zeros(5), advantages_T, low=0.2, high=0.28)
    assert marks_T.tolist() == [1.0, 0.0, 0.0, 1.0, 0.0]  # advantage 0: both branches 0, not strictly larger
    assert not marks_T.requires_grad


def test_ratios_out_of_bounds_are_counted_on_either_side_whatever_the_advantage():
    sides = ratio_bound_metrics(logs(1.5, 1.2, 0.5, 0.9).exp(), low=0.2, high=0.28)
    assert {name: marks_T.tolist() for name, marks_T in sides.items()} == {
        "ratio_high_clipfrac": [1.0, 0.0, 0.0, 0.0],
        "ratio_low_clipfrac": [0.0, 0.0, 1.0, 0.0],
    }


def test_dual_clip_bounds_the_loss_of_bad_tokens_only():
    advantages_T = torch.tensor([-1.0, -1.0, -2.0, 1.0], dtype=torch.float64)
    logprobs_T = logs(5.0, 2.0, 5.0, 5.0)
    loss_T = ppo_clip(logprobs_T, zeros(4), advantages_T, low=0.2, high=0.2, dual=3.0)
    # min(5, 3), min(2, 3), min(10, 6); the good one is clipped as ever: -1.2
    assert loss_T.tolist() == pytest.approx([3.0, 2.0, 6.0, -1.2])
    loss_T.sum().backward()
    assert logprobs_T.grad.tolist() == pytest.approx([0.0, 2.0, 0.0, 0.0])


def test_a_clipped_weight_is_a_constant_before_the_log_probability():
    logprobs_T = logs(3.0, 0.5)
    loss_T, clipped_T = cispo_loss(logprobs_T, zeros(2), torch.tensor([1.0, -2.0]).double(), low=1.0, high=1.0)
    # weights min(3, 2) and 1/2: -2 log 3 and 2 / 2 log 1/2
    assert loss_T.tolist() == pytest.approx([-2 * math.log(3), math.log(0.5)])
    assert clipped_T.tolist() == [1.0, 0.0]
    loss_T.sum().backward()
    assert logprobs_T.grad.tolist() == pytest.approx([-2.0, 1.0])


def test_no_gradient_reaches_the_old_policy():
    old_T = torch.zeros(1, requires_grad=True)
    ppo_clip(torch.zeros(1, requires_grad=True), old_T, torch.ones(1), low=0.2, high=0.2).sum().backward()
    assert old_T.grad is None


def test_a_runaway_ratio_stays_finite():
    assert ratio(torch.tensor([200.0]), torch.tensor([0.0])).item() == pytest.approx(math.exp(20), rel=1e-5)
    assert ppo_clip(torch.tensor([200.0]), torch.tensor([0.0]), torch.zeros(1), low=0.2, high=0.2).item() == 0.0


@pytest.mark.parametrize("bounds", [{"low": 0.0, "high": 0.2}, {"low": 1.1, "high": 0.2}, {"low": 0.2, "high": 0.0}])
def test_bounds_out_of_range_are_refused(bounds):
    with pytest.raises(ValueError, match="must be"):
        ppo_clip(zeros(1), zeros(1), zeros(1), **bounds)


def test_dual_at_most_one_is_refused():
    with pytest.raises(ValueError, match="above 1"):
        ppo_clip(zeros(1), zeros(1), zeros(1), low=0.2, high=0.2, dual=1.0)


@settings(deadline=None)
@given(st.floats(-3, 3), st.floats(-3, 3), st.floats(0.05, 1), st.floats(0.05, 3))
def test_loss_is_never_below_the_unclipped_and_its_gradient_vanishes_where_clipped(log_ratio, advantage, low, high):
    logprobs_T = torch.tensor([log_ratio], dtype=torch.float64, requires_grad=True)
    advantages_T = torch.tensor([advantage], dtype=torch.float64)
    loss_T = ppo_clip(logprobs_T, zeros(1), advantages_T, low=low, high=high)
    loss_T.sum().backward()
    assert loss_T.item() >= -math.exp(log_ratio) * advantage - 1e-9
    if clip_fraction(logprobs_T, zeros(1), advantages_T, low=low, high=high).item():
        assert logprobs_T.grad.item() == 0.0


def test_shapes_that_would_broadcast_are_refused():
    column_T1 = torch.ones(3, 1, dtype=torch.float64)  # [T] - [T, 1] is [T, T]: nine losses of three tokens
    with pytest.raises(
        ValueError, match=r"ppo_clip: .*advantages_T \[3, 1\]: must be one-dimensional and of equal length"
    ):
        ppo_clip(zeros(3), zeros(3), column_T1, low=0.2, high=0.2)
    with pytest.raises(ValueError, match=r"cispo_loss: logprobs_T \[3\], old_logprobs_T \[1\]"):
        cispo_loss(zeros(3), zeros(1), zeros(3), low=0.2, high=0.2)
    check_tokens("loss", logprobs_T=zeros(0), weights_T=zeros(0))  # a pack without response tokens
