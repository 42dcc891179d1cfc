import math

import pytest
import torch

from slimectl.algorithms.importance_sampling import (
    engine_mismatch_metrics,
    importance_weights,
    rejection_mask,
    self_normalization,
)
from slimectl.algorithms.surrogates import TokenRows

OLD_T = torch.tensor([3.0, 1.0, 0.25], dtype=torch.float64).log()  # weights 3, 1 and 1/4 against an engine at 0
ROLLOUT_T = torch.zeros(3, dtype=torch.float64)


def by_token(old_T, rollout_T, **bounds):
    """Weights of tokens that are all of one row, and which were changed."""
    count = len(old_T)
    mask_T, row_T = torch.ones(count, dtype=torch.bool), torch.zeros(count, dtype=torch.long)
    return importance_weights(old_T, rollout_T, TokenRows(mask_T, row_T, 1), **bounds)


def test_weights_are_truncated_at_both_ends():
    assert by_token(OLD_T, ROLLOUT_T)[0].tolist() == pytest.approx([2.0, 1.0, 0.25])
    assert by_token(OLD_T, ROLLOUT_T, low=0.5, high=1.5)[0].tolist() == pytest.approx([1.5, 1.0, 0.5])


def test_truncated_fraction_marks_what_was_changed():
    assert by_token(OLD_T, ROLLOUT_T)[1].tolist() == [1.0, 0.0, 0.0]
    assert by_token(OLD_T, ROLLOUT_T, low=0.5)[1].tolist() == [1.0, 0.0, 1.0]


def test_mismatch_reports_each_token():
    values = engine_mismatch_metrics(OLD_T, ROLLOUT_T)
    assert values["train_rollout_logprob_abs_diff"].tolist() == pytest.approx([1.098612, 0.0, 1.386294], abs=1e-6)
    assert values["tis"].tolist() == pytest.approx([3.0, 1.0, 0.25])
    assert values["train_rollout_k1"].tolist() == pytest.approx([-1.098612, 0.0, 1.386294], abs=1e-6)
    # w - 1 - log w: 3 - 1 - 1.098612, 0, 0.25 - 1 + 1.386294
    assert values["train_rollout_k3"].tolist() == pytest.approx([0.901388, 0.0, 0.636294], abs=1e-6)


def test_log_weights_are_held_within_twenty():
    weights_T = by_token(torch.tensor([90.0]), torch.tensor([0.0]), high=math.inf)[0]
    assert weights_T.item() == pytest.approx(math.exp(20), rel=1e-5)
    assert by_token(torch.tensor([-90.0]), torch.tensor([0.0]))[0].item() == pytest.approx(math.exp(-20))


def test_weights_are_constants():
    old_T = OLD_T.clone().requires_grad_()
    assert not by_token(old_T, ROLLOUT_T)[0].requires_grad
    assert not any(value_T.requires_grad for value_T in engine_mismatch_metrics(old_T, ROLLOUT_T).values())


def test_bounds_the_wrong_way_round_are_refused():
    with pytest.raises(ValueError, match=r"low is 2.0 and high is 1.0"):
        by_token(OLD_T, ROLLOUT_T, low=2.0, high=1.0)


def weights(**given):
    """Token ratios 4, 1/2 and (masked) 100 in one row, 1e-5 and 1 in the next."""
    rollout_T = -torch.tensor([4.0, 0.5, 100.0, 1e-5, 1.0], dtype=torch.float64).log()
    mask_T, row_T = torch.tensor([True, True, False, True, True]), torch.tensor([0, 0, 0, 1, 1])
    made_T, changed_T = importance_weights(torch.zeros_like(rollout_T), rollout_T, TokenRows(mask_T, row_T, 2), **given)
    return made_T[mask_T].tolist(), changed_T[mask_T].tolist()


@pytest.mark.parametrize(
    ("given", "made", "changed"),
    [
        ({"low": 0.1}, [2.0, 0.5, 0.1, 1.0], [1, 0, 1, 0]),
        ({"low": 0.1, "mode": "truncate"}, [2.0, 0.5, 1e-5, 1.0], [1, 0, 0, 0]),
        ({"low": 0.5, "high": 3.0, "mode": "mask"}, [0.0, 0.5, 0.0, 1.0], [1, 0, 1, 0]),
        ({"high": 3.0, "level": "sequence"}, [2.0, 2.0, 1e-5, 1e-5], [0, 0, 0, 0]),
        ({"high": 1.2, "level": "geometric"}, [1.2, 1.2, 1e-5**0.5, 1e-5**0.5], [1, 1, 0, 0]),
        ({"high": 5.0, "veto": 1e-4}, [4.0, 0.5, 0.0, 0.0], [0, 0, 1, 1]),
    ],
)
def test_importance_weights_by_level_mode_and_veto(given, made, changed):
    assert weights(**given) == (pytest.approx(made), changed)


def test_an_unknown_level_or_mode_is_refused():
    with pytest.raises(ValueError, match=r"unknown level 'word'\. Available: "):
        weights(level="word")
    with pytest.raises(ValueError, match=r"unknown mode 'cut'\. Available: "):
        weights(mode="cut")


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"level": "token", "low": 0.5, "high": 2.0}, [0, 1, 0, 1]),
        ({"level": "sequence", "low": 0.5, "high": 2.5}, [1, 1, 0, 0]),  # products 4 / 2 and 1e-5
        ({"level": "geometric", "low": 0.5, "high": 1.2}, [0, 0, 0, 0]),  # roots 1.41 and 0.003
        ({"level": "geometric", "low": 0.001, "high": 1.5}, [1, 1, 1, 1]),
    ],
)
def test_rejection_keeps_tokens_or_rows_within_bounds(given, kept):
    rollout_T = -torch.tensor([4.0, 0.5, 100.0, 1e-5, 1.0], dtype=torch.float64).log()
    mask_T, row_T = torch.tensor([True, True, False, True, True]), torch.tensor([0, 0, 0, 1, 1])
    kept_T = rejection_mask(torch.zeros_like(rollout_T), rollout_T, TokenRows(mask_T, row_T, 2), **given)
    assert kept_T[mask_T].tolist() == kept
    assert not kept_T.requires_grad


def test_the_mean_weight_is_over_tokens_or_over_rows():
    weights_T = torch.tensor([4.0, 0.5, 9.0, 1.0, 0.5])
    mask_T, row_T = torch.tensor([True, True, False, True, True]), torch.tensor([0, 0, 0, 1, 1])
    assert self_normalization(weights_T, TokenRows(mask_T, row_T, 2), level="token") == pytest.approx(6 / 4)
    by_row_T = torch.tensor([2.0, 2.0, 2.0, 1.0, 1.0])
    assert self_normalization(by_row_T, TokenRows(mask_T, row_T, 2), level="sequence") == pytest.approx(3 / 2)
    assert self_normalization(torch.zeros(5), TokenRows(mask_T, row_T, 2), level="token") == 1.0
