import pytest
import torch

from slimectl.algorithms.advantages import discounted, reinforce_returns, whitened


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_returns_are_discounted_from_the_last_token_backwards():
    # 4; 2 + 4/2; 1 + (2 + 4/2) / 2
    assert discounted(tensor(1.0, 2.0, 4.0), 0.5).tolist() == [3.0, 4.0, 4.0]


def test_the_reward_comes_with_the_last_token_that_the_mask_keeps():
    returns_T = reinforce_returns(1.0, None, tensor(1.0, 1.0, 0.0), kl_coef=0.0, gamma=0.5)
    assert returns_T.tolist() == [0.5, 1.0, 0.0]


def test_divergence_is_charged_to_every_kept_token():
    returns_T = reinforce_returns(1.0, tensor(1.0, 2.0, 5.0, 3.0), tensor(1.0, 1.0, 0.0, 1.0), kl_coef=0.1, gamma=1.0)
    # token rewards -0.1, -0.2, 0 (masked), 1 - 0.3
    assert returns_T.tolist() == pytest.approx([0.4, 0.5, 0.0, 0.7])


def test_an_answer_that_is_masked_whole_has_no_returns():
    masked_T = reinforce_returns(1.0, tensor(2.0, 2.0), tensor(0.0, 0.0), kl_coef=0.1, gamma=1.0)
    assert masked_T.tolist() == [0.0, 0.0]


def test_whitening_is_over_all_kept_tokens_of_the_batch():
    first_T, second_T = whitened([tensor(1.0, 99.0), tensor(2.0, 3.0)], [tensor(1.0, 0.0), tensor(1.0, 1.0)])
    # 1, 2, 3: mean 2, variance (1 + 0 + 1) / 2 = 1
    assert first_T.tolist() == pytest.approx([-1.0, 0.0])
    assert second_T.tolist() == pytest.approx([0.0, 1.0])


@pytest.mark.parametrize("values", [[0.1, 0.1, 0.1], [7.0]])
def test_values_without_spread_whiten_to_exact_zeros(values):
    value_T = tensor(*values)
    assert whitened([value_T], [torch.ones_like(value_T)])[0].tolist() == [0.0] * len(values)
