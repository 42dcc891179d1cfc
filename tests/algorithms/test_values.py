"""Values in numbers worked out by hand."""

import pytest
import torch

from slimectl.algorithms.estimators import discounted, sequence_rewards
from slimectl.algorithms.losses import SftLoss
from slimectl.algorithms.registry import ALGORITHMS
from slimectl.algorithms.value_loss import (
    PolicyAndValueLoss,
    ValueLoss,
    clipped_value_loss,
    explained_variance,
    generalized_advantages,
)
from slimectl.errors import SettingsError
from slimectl.types import TokenBatch, TrainingSample


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_generalized_advantages_go_back_from_the_last_token():
    # delta = 1 - 0.5, 0.5 - 0.25, 0.25 - 0.5 from the back; A = 0.5, 0.25 + 0.5 / 2, -0.25 + 0.5 / 2
    made_T = generalized_advantages(tensor(0, 0, 1), tensor(0.5, 0.25, 0.5), tensor(1, 1, 1), gamma=1.0, lambd=0.5)
    assert made_T.tolist() == pytest.approx([0.0, 0.5, 0.5])
    # gamma 0.5, lambda 1: delta = 0.5, 0.25 - 0.25, 0.125 - 0.5; A = 0.5, 0 + 0.25, -0.375 + 0.125
    made_T = generalized_advantages(tensor(0, 0, 1), tensor(0.5, 0.25, 0.5), tensor(1, 1, 1), gamma=0.5, lambd=1.0)
    assert made_T.tolist() == pytest.approx([-0.25, 0.25, 0.5])


def test_what_a_tool_wrote_is_no_step():
    # The first example, with three tokens of a tool behind its second: their values bootstrap nothing.
    rewards_T, mask_T = tensor(0, 0, 0, 0, 0, 1), tensor(1, 1, 0, 0, 0, 1)
    made_T = generalized_advantages(rewards_T, tensor(0.5, 0.25, 7, 8, 9, 0.5), mask_T, gamma=1.0, lambd=0.5)
    assert made_T.tolist() == pytest.approx([0.0, 0.5, 0, 0, 0, 0.5])
    made_T = generalized_advantages(rewards_T, tensor(0.5, 0.25, 7, 8, 9, 0.5), mask_T, gamma=0.5, lambd=1.0)
    assert made_T.tolist() == pytest.approx([-0.25, 0.25, 0, 0, 0, 0.5])


def test_with_lambda_one_they_are_returns_less_values():
    rewards_T, values_T = torch.randn(2, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    made_T = generalized_advantages(rewards_T, values_T, torch.ones_like(values_T), gamma=0.9, lambd=1.0)
    assert (made_T + values_T).tolist() == pytest.approx(discounted(rewards_T, 0.9).tolist())


def test_the_reward_stands_at_the_last_token_that_the_mask_keeps():
    made_T = sequence_rewards(1.0, tensor(1.0, 2.0, 4.0), tensor(1, 1, 0), kl_coef=0.1)
    assert made_T.tolist() == pytest.approx([-0.1, 0.8, 0.0])
    assert sequence_rewards(1.0, None, tensor(0, 0), kl_coef=0.1).tolist() == [0.0, 0.0]


def test_a_value_that_left_its_bounds_has_the_larger_of_two_errors():
    values_T, returns_T = tensor(1.0, 3.0, 0.1), tensor(2.0, 0.0, 2.0)
    loss_T, clipped_T = clipped_value_loss(values_T, torch.zeros_like(values_T), returns_T, clip=0.2)
    assert loss_T.tolist() == pytest.approx([1.8**2, 9.0, 1.9**2])  # 0.2 is farther from 2 than 1 is; 3 from 0 than 0.2
    assert clipped_T.tolist() == [1.0, 0.0, 0.0]


def test_explained_variance_is_of_the_tokens_that_count():
    # returns 1, 0, 1, 0 have variance 1/4; what is left is 0, 0, 1, 0 with 1/4 - 1/16
    values, returns = [tensor(1, 0, 5), tensor(0, 0)], [tensor(1, 0, 9), tensor(1, 0)]
    assert explained_variance(values, returns, [tensor(1, 1, 0), tensor(1, 1)]) == pytest.approx(0.25)
    assert explained_variance(returns, returns, [tensor(1, 1, 0), tensor(1, 1)]) == 1.0
    assert explained_variance([tensor(1, 2)], [tensor(3, 3)], [tensor(1, 1)]) == 0.0


def pack(logprobs_T, weights_T, **columns_T):
    return TokenBatch(logprobs_T, None, torch.arange(len(logprobs_T)), len(logprobs_T), weights_T, **columns_T)


def test_the_value_loss_is_the_weighted_sum_and_stops_its_gradient_where_it_is_clipped():
    batch = pack(
        tensor(1.0, 0.1).requires_grad_(), tensor(0.25, 0.75), values_T=tensor(0.0, 0.0), returns_T=tensor(2.0, 2.0)
    )
    loss, metrics = ValueLoss(value_clip=0.2)(batch)
    loss.backward()
    assert loss.item() == pytest.approx(0.25 * 3.24 + 0.75 * 3.61)
    assert metrics["value_clipfrac"].item() == 0.25
    assert metrics["vpred"].item() == pytest.approx(0.25 * 1.0 + 0.75 * 0.1)
    assert (metrics["value"].item(), metrics["error"].item()) == pytest.approx((0.0, 0.25 * 1.0 + 0.75 * 1.9**2))
    assert batch.logprobs_T.grad.tolist() == pytest.approx([0.0, 0.75 * 2 * -1.9])
    with pytest.raises(SettingsError, match="needs values and returns"):
        ValueLoss()(pack(tensor(1.0), tensor(1.0)))


def test_metrics_of_values_are_means_over_the_tokens_that_count_when_whole_samples_are_masked():
    ppo = ALGORITHMS["ppo"].settings.model_validate({"name": "ppo", "calculate_per_token_loss": False})
    # Two rollouts, of which the second is masked: each token of the first has half of half the weight.
    rows = [TrainingSample([1, 2, 3], 2, [0.25, 0.25]), TrainingSample([1, 2], 1, [0.0])]
    columns_T = {"values_T": tensor(1.0, 3.0, 9.0), "returns_T": tensor(2.0, 2.0, 9.0)}
    loss, metrics = ALGORITHMS["ppo"].critic_loss(ppo, rows)(
        pack(tensor(0.0, 3.0, 9.0), tensor(0.25, 0.25, 0.0), **columns_T)
    )
    assert loss.item() == metrics["value_loss"].item() == pytest.approx(0.25 * 2.0**2 + 0.25 * 1.0**2)
    assert {name: metrics[name].item() for name in ("value", "vpred", "error", "value_clipfrac")} == {
        "value": 2.0, "vpred": 1.5, "error": 2.5, "value_clipfrac": 0.0,
    }  # fmt: skip


def test_a_shared_critic_adds_its_weighted_loss_to_the_policys():
    log_probs_T, predicted_T = tensor(-1.0, -2.0).requires_grad_(), tensor(0.1, 1.0).requires_grad_()
    columns_T = {"values_T": tensor(0.0, 0.0), "returns_T": tensor(2.0, 2.0), "predicted_T": predicted_T}
    batch = pack(log_probs_T, tensor(0.25, 0.75), **columns_T)
    loss, metrics = PolicyAndValueLoss(SftLoss(), ValueLoss(value_clip=0.2), 0.5)(batch)
    loss.backward()
    # policy: 0.25 * 1 + 0.75 * 2; values: 0.25 * 1.9² + 0.75 * 1.8², the second held at 0.2
    assert loss.item() == pytest.approx(1.75 + 0.5 * (0.9025 + 2.43))
    assert metrics["critic-loss"].item() == metrics["critic-value_loss"].item() == pytest.approx(3.3325)
    assert log_probs_T.grad.tolist() == [-0.25, -0.75]
    assert predicted_T.grad.tolist() == pytest.approx([0.5 * 0.25 * 2 * -1.9, 0.0])
    with pytest.raises(SettingsError, match=r'algorithm.critic: .* Set it to "separate"'):
        PolicyAndValueLoss(SftLoss(), ValueLoss(), 0.5)(pack(log_probs_T, tensor(0.25, 0.75)))


def test_rounding_is_no_clipping():
    values_T, old_T, returns_T = 0.1 * torch.rand(3, 4096, generator=torch.Generator().manual_seed(0))
    _, clipped_T = clipped_value_loss(values_T, old_T, returns_T, clip=0.2)
    assert clipped_T.sum() == 0
