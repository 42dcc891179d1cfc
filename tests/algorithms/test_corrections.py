import math

import pytest
import torch

from slimectl.algorithms.corrections import mismatch, truncated_fraction, truncated_importance

OLD_T = torch.tensor([3.0, 1.0, 0.25], dtype=torch.float64).log()  # weights 3, 1 and 1/4 against an engine at 0
ROLLOUT_T = torch.zeros(3, dtype=torch.float64)


def test_weights_are_truncated_at_both_ends():
    assert truncated_importance(OLD_T, ROLLOUT_T).tolist() == pytest.approx([2.0, 1.0, 0.25])
    assert truncated_importance(OLD_T, ROLLOUT_T, low=0.5, high=1.5).tolist() == pytest.approx([1.5, 1.0, 0.5])


def test_truncated_fraction_marks_what_was_changed():
    assert truncated_fraction(OLD_T, ROLLOUT_T).tolist() == [1.0, 0.0, 0.0]
    assert truncated_fraction(OLD_T, ROLLOUT_T, low=0.5).tolist() == [1.0, 0.0, 1.0]


def test_mismatch_reports_each_token():
    values = mismatch(OLD_T, ROLLOUT_T)
    assert values["train_rollout_logprob_abs_diff"].tolist() == pytest.approx([1.098612, 0.0, 1.386294], abs=1e-6)
    assert values["tis"].tolist() == pytest.approx([3.0, 1.0, 0.25])
    assert values["train_rollout_k1"].tolist() == pytest.approx([-1.098612, 0.0, 1.386294], abs=1e-6)
    # w - 1 - log w: 3 - 1 - 1.098612, 0, 0.25 - 1 + 1.386294
    assert values["train_rollout_k3"].tolist() == pytest.approx([0.901388, 0.0, 0.636294], abs=1e-6)


def test_log_weights_are_held_within_twenty():
    weights_T = truncated_importance(torch.tensor([90.0]), torch.tensor([0.0]), high=math.inf)
    assert weights_T.item() == pytest.approx(math.exp(20), rel=1e-5)
    assert truncated_importance(torch.tensor([-90.0]), torch.tensor([0.0])).item() == pytest.approx(math.exp(-20))


def test_weights_are_constants():
    old_T = OLD_T.clone().requires_grad_()
    assert not truncated_importance(old_T, ROLLOUT_T).requires_grad
    assert not any(value_T.requires_grad for value_T in mismatch(old_T, ROLLOUT_T).values())


def test_bounds_the_wrong_way_round_are_refused():
    with pytest.raises(ValueError, match=r"low is 2.0 and high 1.0"):
        truncated_importance(OLD_T, ROLLOUT_T, low=2.0, high=1.0)
