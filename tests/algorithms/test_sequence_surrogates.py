"""Losses that look at whole sequences, and gates. T tokens; two rows, of 3 and 2 tokens, the third masked."""

import math

import pytest
import torch

from slimectl.algorithms.losses import PolicyLoss
from slimectl.algorithms.surrogates import (
    SURROGATES,
    BoundedSurrogate,
    Cispo,
    Gmpo,
    Gspo,
    PpoClip,
    Sapo,
    Surrogate,
    TokenRows,
    Topr,
    gmpo_loss,
    gspo_logprobs,
    level_ratio,
    opsm_mask,
    row_means,
    sapo_loss,
    topr_loss,
)
from slimectl.types import TokenBatch

LOG2 = math.log(2)


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def pack(order=(0, 1, 2, 3, 4), rows=(0, 0, 0, 1, 1), count=2, log_ratios=(0.3, 0.1, 9.0, -0.5, 0.1)):
    """Log-ratios of mean 0.2 in the first row (A = 1) and -0.2 in the second (A = -2), against old ones of -1."""
    order_T = torch.tensor(order)
    return TokenBatch(
        logprobs_T=(tensor(*log_ratios) - 1)[order_T].requires_grad_(),
        entropy_T=None,
        row_T=torch.tensor(rows)[order_T],
        rows=count,
        weights_T=tensor(0.25, 0.25, 0.0, 0.25, 0.25)[order_T],
        advantages_T=tensor(1.0, 1.0, 1.0, -2.0, -2.0)[order_T],
        old_logprobs_T=torch.full((len(order),), -1.0, dtype=torch.float64),
    )


def test_row_means_are_over_the_unmasked_tokens_of_each_row():
    mask_T = torch.tensor([True, False, True, False])
    assert row_means(tensor(1.0, 9.0, 3.0, 7.0), TokenRows(mask_T, torch.tensor([0, 0, 0, 1]), 2)).tolist() == [
        2,
        2,
        2,
        0,
    ]


ROWS = TokenRows(torch.tensor([True, True, False, True, True]), torch.tensor([0, 0, 0, 1, 1]), 2)
"""Two rows, of 3 and 2 tokens, the third token masked."""


def test_the_ratio_of_a_sequence_stands_at_each_of_its_tokens():
    found_T = gspo_logprobs(tensor(0.3, 0.1, 9.0, -0.5, 0.1), tensor(-1, 0, 0, -1, 0), ROWS)
    # means of logp - old: (1.3 + 0.1) / 2 and (0.5 + 0.1) / 2
    assert found_T.tolist() == pytest.approx([-1 + 0.7, 0.7, 0.7, -1 + 0.3, 0.3])


def test_a_geometric_mean_of_ratios_that_are_bounded_where_the_advantage_pushes():
    logprobs_T = tensor(0.3, 0.1, 9.0, -0.5, 0.1)
    advantages_T = tensor(1.0, 1.0, 1.0, -2.0, -2.0)
    loss_T, clipped_T = gmpo_loss(
        logprobs_T, torch.zeros(5, dtype=torch.float64), advantages_T, ROWS, low=0.4, high=0.2
    )
    # (0.2 + 0.1) / 2 and (-0.4 + 0.1) / 2
    assert loss_T.tolist() == pytest.approx([-math.exp(0.15)] * 3 + [2 * math.exp(-0.15)] * 2)
    assert clipped_T.tolist() == [1.0, 0.0, 1.0, 1.0, 0.0]


def test_bad_sequences_that_the_policy_has_left_are_not_kept():
    logprobs_T, old_T = tensor(-1.5, -1.5, 9.0, -1.1, -1.1), torch.full((5,), -1.0, dtype=torch.float64)
    # mean(old - logp) is 0.5 in the first row, 0.1 in the second
    for advantages_T, kept in ((tensor(-1, -1, -1, -1, -1), [0, 0, 0, 1, 1]), (tensor(1, 1, 1, 1, 1), [1] * 5)):
        assert opsm_mask(logprobs_T, old_T, advantages_T, ROWS, delta=0.2).tolist() == kept


def test_gspo_has_one_ratio_for_a_sequence_and_clips_whole_sequences():
    given = pack()
    loss, metrics = PolicyLoss(Gspo(eps_clip=0.5, eps_clip_high=0.1))(given)
    # row 0: ratio e^0.2 > 1.1, clipped: -1.1; row 1: ratio e^-0.2: 2 e^-0.2; each half of the weight
    assert loss.item() == pytest.approx(0.5 * -1.1 + 0.5 * 2 * math.exp(-0.2))
    assert metrics["pg_clipfrac"].item() == pytest.approx(0.5)
    # what is reported of the ratio is the sequence's: e^0.2 above 1.1, e^-0.2 not below 1 / 2
    assert (metrics["ratio_max"].item(), metrics["ratio_min"].item()) == pytest.approx((math.exp(0.2), math.exp(-0.2)))
    assert (metrics["ratio_high_clipfrac"].item(), metrics["ratio_low_clipfrac"].item()) == pytest.approx((0.5, 0.0))
    assert metrics["ois"].item() == pytest.approx((math.exp(0.2) + math.exp(-0.2)) / 2)
    loss.backward()
    each = 0.5 * 2 * math.exp(-0.2) / 2  # d ratio / d logp = ratio / 2 for either token
    assert given.logprobs_T.grad.tolist() == pytest.approx([0, 0, 0, each, each])


def test_cispo_clips_the_weight_and_keeps_the_gradient():
    given = pack(log_ratios=(LOG2, -LOG2, 9.0, LOG2, 0.0))
    loss, metrics = PolicyLoss(Cispo(eps_clip=1.0, eps_clip_high=0.5))(given)
    # weights 1.5 (of 2), 0.5, -, 1.5, 1; gradient -weight A / 4
    loss.backward()
    assert given.logprobs_T.grad.tolist() == pytest.approx([-0.375, -0.125, 0.0, 0.75, 0.5])
    by_hand = -0.375 * (LOG2 - 1) - 0.125 * (-LOG2 - 1) + 0.75 * (LOG2 - 1) + 0.5 * -1
    assert loss.item() == pytest.approx(by_hand)
    assert metrics["pg_clipfrac"].item() == pytest.approx(0.5)


def test_the_soft_gate_has_slope_one_at_ratio_one_and_closes_faster_for_bad_tokens():
    logprobs_T = tensor(0.0, 0.0, LOG2, LOG2).requires_grad_()
    loss_T = sapo_loss(logprobs_T, torch.zeros(4), tensor(1.0, -1.0, 1.0, -1.0), tau_pos=1.0, tau_neg=2.0)
    # 4 / tau sigmoid(tau (ratio - 1)): sigmoid(0) = 1/2, sigmoid(1), sigmoid(2)
    one, two = 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(-2))
    assert loss_T.tolist() == pytest.approx([-2.0, 1.0, -4 * one, 2 * two])
    loss_T.sum().backward()
    # -A ratio 4 s (1 - s)
    assert logprobs_T.grad.tolist() == pytest.approx([-1.0, 1.0, -8 * one * (1 - one), 8 * two * (1 - two)])


def test_gmpo_takes_the_geometric_mean_of_ratios_clipped_on_the_side_they_are_pushed_to():
    given = pack()
    loss, metrics = PolicyLoss(Gmpo(eps_clip=0.4, eps_clip_high=0.2))(given)
    # row 0: (min(0.3, 0.2) + 0.1) / 2 = 0.15; row 1, A < 0: (max(-0.5, -0.4) + 0.1) / 2 = -0.15
    assert loss.item() == pytest.approx(-0.5 * math.exp(0.15) + math.exp(-0.15))
    assert metrics["pg_clipfrac"].item() == pytest.approx(0.5)
    # log-ratios 0.3, 0.1, -0.5 and 0.1, bounds 0.2 and -0.4
    assert (metrics["ratio_high_clipfrac"].item(), metrics["ratio_low_clipfrac"].item()) == (0.25, 0.25)
    loss.backward()
    expected = [0.0, -0.25 * math.exp(0.15), 0.0, 0.0, 0.5 * math.exp(-0.15)]
    assert given.logprobs_T.grad.tolist() == pytest.approx(expected)


def test_off_policy_masking_silences_bad_sequences_that_the_policy_has_left():
    given = pack()
    loss, metrics = PolicyLoss(PpoClip(eps_clip=0.5), use_opsm=True)(given)
    # row 1 is bad and mean(old - logp) = 0.2 > 1e-4: only row 0 is left
    assert loss.item() == pytest.approx(-0.25 * (math.exp(0.3) + math.exp(0.1)))
    assert metrics["opsm_clipfrac"].item() == pytest.approx(0.5)
    assert PolicyLoss(use_opsm=True, opsm_delta=0.3)(given)[1]["opsm_clipfrac"].item() == 0.0


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_sums_do_not_depend_on_the_order_or_the_packing_of_rows(surrogate):
    loss = PolicyLoss(SURROGATES[surrogate](), use_opsm=True, opsm_delta=0.3)
    whole, turned = pack(), pack(order=(3, 4, 0, 1, 2))
    first, second = pack(order=(0, 1, 2), count=1), pack(order=(3, 4), rows=(0, 0, 0, 0, 0), count=1)
    values = [loss(given)[0] for given in (whole, turned, first, second)]
    for value in values:
        value.backward()
    assert values[1].item() == pytest.approx(values[0].item(), abs=1e-12)
    assert values[2].item() + values[3].item() == pytest.approx(values[0].item(), abs=1e-12)
    grad = whole.logprobs_T.grad.tolist()
    assert [*first.logprobs_T.grad.tolist(), *second.logprobs_T.grad.tolist()] == pytest.approx(grad, abs=1e-12)
    assert grad[2] == 0.0


@pytest.mark.parametrize(
    ("surrogate", "bounds"),
    [
        (PpoClip(eps_clip=0.1), {"low": 0.1, "high": 0.1}),
        (Gspo(eps_clip=0.1, eps_clip_high=0.3), {"low": 0.1, "high": 0.3}),
        (Gmpo(eps_clip=LOG2, eps_clip_high=LOG2), {"low": 0.5, "high": 1.0}),  # of the ratio, not of its logarithm
        (Sapo(), None),
    ],
)
def test_the_bounds_of_the_ratio_that_are_reported(surrogate: Surrogate, bounds: dict[str, float] | None):
    assert isinstance(surrogate, BoundedSurrogate) == (bounds is not None)
    assert surrogate.ratio_bounds == (bounds and pytest.approx(bounds))


def test_ratios_of_a_row_are_the_product_or_the_geometric_mean_of_its_unmasked_tokens():
    logprobs_T = (tensor(LOG2, LOG2, 9.0, -LOG2, 0.0) - 1).requires_grad_()
    old_T = torch.full((5,), -1.0, dtype=torch.float64)
    by_level = {level: level_ratio(logprobs_T, old_T, ROWS, level) for level in ("token", "sequence", "geometric")}
    assert by_level["token"].tolist()[:2] == pytest.approx([2, 2])
    assert by_level["sequence"].tolist() == pytest.approx([4, 4, 4, 0.5, 0.5])
    assert by_level["geometric"].tolist() == pytest.approx([2, 2, 2, 2**-0.5, 2**-0.5])


def test_topr_imitates_good_responses_and_tapers_bad_ones():
    logprobs_T = (tensor(LOG2, -3 * LOG2, 9.0, -LOG2, 0.0) - 1).requires_grad_()
    old_T, advantages_T = torch.full((5,), -1.0, dtype=torch.float64), tensor(1.0, 1.0, 1.0, -2.0, -2.0)
    loss_T, truncated_T = topr_loss(logprobs_T, old_T, advantages_T, ROWS, level="sequence", high=1.0)
    (gradient_T,) = torch.autograd.grad(loss_T.sum(), logprobs_T)
    # The first row is good: -A, although its ratio is 1/4. The second is bad: 2 times its ratio of 1/2.
    assert gradient_T.tolist() == pytest.approx([-1.0, -1.0, -1.0, 1.0, 1.0])
    assert truncated_T.tolist() == [0.0] * 5
    _, truncated_T = topr_loss(logprobs_T, old_T, advantages_T, ROWS, level="sequence", high=0.4)
    assert truncated_T.tolist() == [0.0, 0.0, 0.0, 1.0, 1.0]
    weighted = Topr(topr_clip=0.4, topr_positive_weight=3.0, topr_negative_weight=0.5)
    (gradient_T,) = torch.autograd.grad(weighted(logprobs_T, old_T, advantages_T, ROWS)[0].sum(), logprobs_T)
    assert gradient_T.tolist() == pytest.approx([-3.0, -3.0, -3.0, 0.4, 0.4])
