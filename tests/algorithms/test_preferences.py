"""Preferences in numbers worked out by hand."""

import math

import pytest
import torch

from slimectl.algorithms.preferences import LinearizedLoss, dpo_rewards, preference_loss, preference_pairs
from slimectl.errors import SettingsError
from slimectl.types import TokenBatch


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_pairs_are_of_unequal_rewards_only():
    assert preference_pairs([0.5, 0.0, 1.0, 1.0]) == [(2, 1)]
    assert preference_pairs([0.0, 1.0, 0.0], "all") == [(1, 0), (1, 2)]
    assert preference_pairs([1.0, 1.0]) == preference_pairs([1.0]) == preference_pairs([]) == []


def test_the_loss_of_a_pair_and_its_slope():
    losses_P, slopes_P = preference_loss(tensor(0.0, math.log(3)))  # sigmoid is 1/2 and 3/4
    assert losses_P.tolist() == pytest.approx([math.log(2), math.log(4 / 3)])
    assert slopes_P.tolist() == pytest.approx([-0.5, -0.25])
    losses_P, slopes_P = preference_loss(tensor(math.log(3)), label_smoothing=0.1)
    assert losses_P.tolist() == pytest.approx([0.9 * math.log(4 / 3) + 0.1 * math.log(4)])
    assert slopes_P.tolist() == pytest.approx([0.75 - 0.9])


def test_the_slope_is_that_of_autograd():
    margins_P = tensor(-2.0, 0.3, 4.0).requires_grad_()
    losses_P, slopes_P = preference_loss(margins_P, label_smoothing=0.2)
    losses_P.sum().backward()
    assert margins_P.grad.tolist() == pytest.approx(slopes_P.tolist())


def test_the_reward_that_a_policy_implies():
    assert dpo_rewards(tensor(-3.0, -5.0), tensor(-4.0, -4.0), beta=0.1).tolist() == pytest.approx([0.1, -0.1])


def test_the_loss_of_slopes_has_them_as_its_gradient():
    logprobs_T, places_T = tensor(-1.0, -2.0, -3.0).requires_grad_(), torch.tensor([0, 0, 1])
    given = {"logprobs_T": logprobs_T, "entropy_T": None, "row_T": places_T, "rows": 2}
    loss, metrics = LinearizedLoss()(
        TokenBatch(**given, weights_T=tensor(0.5, 0.5, 0.5), advantages_T=tensor(0.25, 0.25, -0.25))
    )
    loss.backward()
    assert (loss.item(), metrics) == (pytest.approx(-0.125 * (-1 - 2 + 3)), {})
    assert logprobs_T.grad.tolist() == [-0.125, -0.125, 0.125]
    with pytest.raises(SettingsError, match="needs its slopes"):
        LinearizedLoss()(TokenBatch(**given, weights_T=tensor(0.5, 0.5, 0.5)))
