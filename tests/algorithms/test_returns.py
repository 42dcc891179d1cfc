import math

import pytest
import torch

from slimectl.algorithms.estimators import (
    TrainingBatch,
    discounted,
    estimate_advantages,
    mask_of,
    penalized_rewards,
    reference_kl,
    reinforce,
    reinforce_returns,
    whitened,
)
from slimectl.algorithms.metrics import mean_and_spread
from slimectl.settings.algorithm import ALGORITHMS
from slimectl.types import TrainingSample


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_returns_are_discounted_from_the_last_token_backwards():
    # 4; 2 + 4/2; 1 + (2 + 4/2) / 2
    assert discounted(tensor(1.0, 2.0, 4.0), 0.5).tolist() == [3.0, 4.0, 4.0]


def test_the_reward_comes_with_the_last_token_that_the_mask_keeps():
    returns_T = reinforce_returns(1.0, None, tensor(1.0, 1.0, 0.0), kl_coef=0.0, gamma=0.5)
    assert returns_T.tolist() == [0.5, 1.0, 0.0]


def test_what_a_tool_wrote_discounts_nothing():
    returns_T = reinforce_returns(1.0, None, tensor(1.0, 0.0, 0.0, 1.0), kl_coef=0.0, gamma=0.5)
    assert returns_T.tolist() == [0.5, 0.0, 0.0, 1.0]


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


def test_the_divergence_of_a_row_is_the_difference_of_log_probabilities():
    row = TrainingSample([1, 2, 3], 2, [1.0, 0.0], old_log_probs=[-1.0, -2.0], ref_log_probs=[-1.5, -1.5])
    assert reference_kl(row).tolist() == [0.5, -0.5]
    assert mask_of(row).tolist() == [1.0, 0.0]


def test_rewards_less_the_divergence_are_those_of_whole_answers():
    log_probs = {"old_log_probs": [-1.0, -1.0], "ref_log_probs": [-1.5, -1.25]}
    rows = [TrainingSample([1, 2, 3], 2, [1.0, weight], **log_probs) for weight in (1.0, 0.0)]
    batch = TrainingBatch(rows, [0, 2], positions=[0, 2], normalized_rewards=[1.0, 5.0, -1.0])
    # Divergences 0.5 and 0.25 of the tokens that are trained on; the sample without a row does not count.
    algorithm = ALGORITHMS["rloo"].model_validate({"name": "rloo", "kl_coef": 0.1})
    assert penalized_rewards(batch, algorithm) == pytest.approx([1.0 - 0.075, -1.0 - 0.05])


def test_penalized_rewards_are_among_the_metrics_if_a_divergence_is_charged():
    rows = [TrainingSample([1, 2], 1, [1.0], old_log_probs=[-1.0], ref_log_probs=[ref]) for ref in (-1.5, -1.0, -0.5)]
    batch = TrainingBatch(rows, [0, 1, 2], positions=[0, 1, 2], rewards=[3.0, 1.0, 2.0])
    batch.normalized_rewards = batch.rewards
    charged = ALGORITHMS["reinforce_plus_plus"].model_validate({"kl_coef": 0.5})
    # Divergences 0.5, 0 and -0.5: rewards 3 - 0.25, 1, 2 + 0.25.
    _, metrics = estimate_advantages(batch, charged, reinforce)
    assert metrics == mean_and_spread("rollout/penalized_rewards", [2.75, 1.0, 2.25])
    assert metrics == {
        "rollout/penalized_rewards": 2.0,
        "rollout/penalized_rewards/std": pytest.approx(math.sqrt(1.625 / 3)),  # deviations 0.75, -1 and 0.25
        "rollout/penalized_rewards/max": 2.75,
        "rollout/penalized_rewards/min": 1.0,
    }
    free = ALGORITHMS["reinforce_plus_plus"].model_validate({"kl_coef": 0})
    assert estimate_advantages(batch, free, reinforce)[1] == {}
