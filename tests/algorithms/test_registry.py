"""The table of algorithms: whole, in step with settings and documents, and coupled to the loss by names that exist."""

from __future__ import annotations

import math
import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from slimectl.algorithms import registry
from slimectl.algorithms.baselines import normalize_rewards
from slimectl.algorithms.estimators import (
    TrainingBatch,
    critic_relative,
    estimate_advantages,
    group_relative,
    group_relative_tokens,
    reinforce,
    without_rewards,
)
from slimectl.algorithms.losses import PolicyLoss
from slimectl.algorithms.registry import ALGORITHMS, COMPUTED, LOSS_SETTINGS, Algorithm, policy_loss
from slimectl.algorithms.scoring import ScoringPass, reference_and_teacher
from slimectl.algorithms.surrogates import SURROGATES
from slimectl.settings import Settings
from slimectl.settings import algorithm as names
from slimectl.settings.needs import Need
from slimectl.settings.policy_gradient import PolicyGradient
from slimectl.types import Sample, TrainingSample

ROOT = Path(__file__).parents[2]
TABLE = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/algorithms.md").read_text().partition("\n## ")[0], re.MULTILINE)
ROLLOUTS = {name: entry for name, entry in ALGORITHMS.items() if entry.settings.trains_on == "rollouts"}
READ_BY = {
    "name": "slimectl/algorithms/registry.py",
    "drop_zero_std_groups": "slimectl/stages/training_batch.py",
    "calculate_per_token_loss": "slimectl/settings/policy_gradient.py",
    "fixed_length": "slimectl/settings/policy_gradient.py",
    "reward_clip": "slimectl/stages/training_batch.py",
    "normalize_advantages": "slimectl/settings/policy_gradient.py",
    "advantage_clip": "slimectl/algorithms/estimators.py",
    "norm_mean_type": "slimectl/settings/policy_gradient.py",
    "norm_std_type": "slimectl/settings/policy_gradient.py",
    "max_len_mask": "slimectl/stages/filters.py",
    "difficulty_mask": "slimectl/stages/filters.py",
    "difficulty_low_threshold": "slimectl/stages/filters.py",
    "difficulty_high_threshold": "slimectl/stages/filters.py",
    "error_max_len_threshold": "slimectl/stages/filters.py",
    "kl_coef": "slimectl/algorithms/estimators.py",
    "ref_load": "slimectl/settings/policy_gradient.py",
    "ref_update_interval": "slimectl/settings/policy_gradient.py",
    "opd_top_k": "slimectl/settings/policy_gradient.py",
    "opd_teacher_load": "slimectl/settings/policy_gradient.py",
    "opd_teacher_url": "slimectl/settings/policy_gradient.py",
    "opd_teacher_api": "slimectl/settings/policy_gradient.py",
    **dict.fromkeys(
        ("opd_teachers", "opd_self_teacher", "opd_teacher_template", "opd_self_success", "opd_align"),
        "slimectl/settings/policy_gradient.py",
    ),
    "use_rollout_logprobs": "slimectl/stages/training_batch.py",
    "tis_batch_normalize": "slimectl/algorithms/registry.py",
    "grpo_std_normalization": "slimectl/settings/policy_gradient.py",
    "gdpo_weights": "slimectl/stages/score.py",
    "gamma": "slimectl/algorithms/estimators.py",
    "lambd": "slimectl/algorithms/estimators.py",
    **dict.fromkeys(
        ("turn_gamma", "turn_baseline", "outcome_weight", "step_reward_weight", "episode_reward_weight"),
        "slimectl/algorithms/turn_advantages.py",
    ),
    "value_clip": "slimectl/algorithms/registry.py",
    "value_coef": "slimectl/algorithms/registry.py",
    "critic": "slimectl/settings/rollout_algorithms.py",
    "critic_load": "slimectl/settings/rollout_algorithms.py",
    "critic_lr": "slimectl/settings/rollout_algorithms.py",
    "num_critic_only_steps": "slimectl/settings/rollout_algorithms.py",
}
"""Settings of policy gradients that are no field of PolicyLoss, and the file that reads each."""


def test_registry_settings_and_documents_name_the_same_algorithms():
    assert list(ALGORITHMS) == list(names.ALGORITHMS) == TABLE
    assert {name: entry.settings for name, entry in ALGORITHMS.items()} == names.ALGORITHMS


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_entry_has_the_functions_that_its_needs_call_for(name: str):
    entry: Algorithm = ALGORITHMS[name]
    needs = entry.settings().needs
    assert (entry.advantages is not None) == (entry.settings.trains_on == "rollouts")
    assert (entry.critic_loss is not None) == (entry.joint_loss is not None) == (Need.CRITIC in needs)
    assert (Need.PAIRS in needs) == (entry.settings.trains_on == "preferences")


def test_every_field_of_the_loss_is_a_setting_of_the_same_type_or_computed():
    settings = {key: field for entry in ROLLOUTS.values() for key, field in entry.settings.model_fields.items()}
    assert {field.name for field in fields(PolicyLoss)} == LOSS_SETTINGS | COMPUTED
    assert settings.keys() >= LOSS_SETTINGS
    numbers = {field.name: field for field in fields(PolicyLoss) if field.name in LOSS_SETTINGS}
    for key, field in numbers.items():
        assert (field.type in ("bool", "str")) == isinstance(settings[key].default, bool | str), key


@pytest.mark.parametrize("name", SURROGATES)
def test_every_field_of_a_surrogate_is_a_setting_of_the_algorithms_that_use_it(name: str):
    users = [entry.settings for entry in ROLLOUTS.values() if entry.settings.surrogate == name]
    assert users, f"no algorithm uses {name}"
    for settings in users:
        assert settings.model_fields.keys() >= {field.name for field in fields(SURROGATES[name])}


@pytest.mark.parametrize("name", ROLLOUTS)
def test_no_setting_is_ignored(name: str):
    surrogate = SURROGATES[ROLLOUTS[name].settings.surrogate]
    for key in ROLLOUTS[name].settings.model_fields:
        if key not in LOSS_SETTINGS | {field.name for field in fields(surrogate)}:
            assert key == "name" or re.search(rf"\.{key}\b", (ROOT / READ_BY[key]).read_text()), key


@pytest.mark.parametrize("name", ROLLOUTS)
def test_the_loss_has_the_values_of_the_settings(name: str):
    settings = ROLLOUTS[name].settings()
    assert isinstance(settings, PolicyGradient)
    rows = [TrainingSample([1, 2, 3], 2, [0.25, 0.25])]
    loss = policy_loss(settings, rows)
    assert type(loss.surrogate) is SURROGATES[settings.surrogate]
    assert loss.report_scale == 2.0  # 1 / (0.25 + 0.25)
    for part in (loss, loss.surrogate):
        for key in {field.name for field in fields(part)} & type(settings).model_fields.keys():
            assert getattr(part, key) == getattr(settings, key), key


@pytest.mark.parametrize(
    ("changes", "needs"),
    [
        ({}, set()),
        ({"kl_coef": 0.1}, {Need.REFERENCE, Need.OLD_LOG_PROBS}),
        ({"kl_loss_coef": 0.1}, {Need.REFERENCE}),
        ({"opd_kl_coef": 0.1}, {Need.TEACHER, Need.OLD_LOG_PROBS}),
        ({"opd_kl_coef": 0.1, "opd_divergence": "jsd", "opd_top_k": 8}, {Need.TEACHER_TOP}),
        ({"opd_kl_coef": 0.1, "opd_divergence": "forward_kl"}, set()),
        ({"use_tis": True}, {Need.ROLLOUT_LOG_PROBS}),
        ({"use_tis": True, "tis_batch_normalize": True}, {Need.ROLLOUT_LOG_PROBS, Need.OLD_LOG_PROBS}),
    ],
    ids=[
        "defaults",
        "kl in the reward",
        "kl in the loss",
        "teacher",
        "likeliest tokens",
        "teacher in the trainer",
        "tis",
        "normalized tis",
    ],
)
def test_needs_follow_from_the_settings(changes: dict[str, float], needs: set[Need]):
    grpo = names.ALGORITHMS["grpo"].model_validate({"name": "grpo", **changes})
    assert grpo.needs == needs | {Need.REWARDS, Need.GROUPS}


RAW = (1.0, 0.0)
"""Rewards that an algorithm without a baseline does not compare."""


def batch(
    *, rewards: tuple[float, float] = RAW, compared: tuple[float, float] = (0.5, -0.5), **columns: list[float]
) -> TrainingBatch:
    """Two answers of two tokens to one prompt."""
    rows = [TrainingSample([9, 1, 2], 2, [1.0, 1.0], **columns) for _ in rewards]
    samples = [Sample(index=i, tokens=[9, 1, 2], response_length=2) for i in range(2)]
    return TrainingBatch(rows, [0, 1], samples, list(rewards), [0, 1], normalized_rewards=list(compared))


def settings_of(name: str, **changes: float) -> PolicyGradient:
    settings = names.ALGORITHMS[name].model_validate({"name": name, **changes})
    assert isinstance(settings, PolicyGradient)
    return settings


def lists(advantages: list[torch.Tensor]) -> list[list[float]]:
    return [advantage_T.tolist() for advantage_T in advantages]


def test_rewards_are_compared_by_the_baseline_of_the_algorithm():
    samples = batch().samples
    assert normalize_rewards(samples, [1.0, 0.0], settings_of("rloo")) == [1.0, -1.0]
    assert normalize_rewards(samples, [1.0, 0.0], settings_of("dr_grpo")) == [0.5, -0.5]
    assert normalize_rewards(samples, [1.0, 0.0], settings_of("ppo")) == [1.0, 0.0]


def test_the_divergence_is_charged_before_the_comparison_or_by_token():
    # Each token is 0.5 likelier than by the reference: an answer costs 0.1 * (0.5 + 0.5), a token 0.1 * 0.5.
    columns = {"old_log_probs": [-1.0, -1.0], "ref_log_probs": [-1.5, -1.5]}
    assert lists(group_relative(batch(), settings_of("grpo"))) == [[0.5, 0.5], [-0.5, -0.5]]
    charged = group_relative(batch(**columns), settings_of("rloo", kl_coef=0.1))
    assert lists(charged) == [pytest.approx([1.0, 1.0]), pytest.approx([-1.0, -1.0])]  # both cost the same
    by_token = group_relative_tokens(batch(**columns), settings_of("reinforce_plus_plus_baseline", kl_coef=0.1))
    assert lists(by_token) == [pytest.approx([0.45, 0.45]), pytest.approx([-0.55, -0.55])]


def test_rewards_that_a_user_compared_are_not_compared_again():
    shaped = batch(old_log_probs=[-1.0, -1.0], ref_log_probs=[-1.5, -1.5])
    shaped.compared = True
    charged = group_relative(shaped, settings_of("rloo", kl_coef=0.1))
    assert lists(charged) == [pytest.approx([0.9, 0.9]), pytest.approx([-0.1, -0.1])]


def test_returns_are_discounted_and_a_teacher_needs_no_reward():
    returns = reinforce(batch(compared=RAW), settings_of("reinforce_plus_plus", gamma=0.5))  # type: ignore[arg-type]
    assert lists(returns) == [[0.5, 1.0], [0.0, 0.0]]
    assert lists(without_rewards(batch(), settings_of("opd"))) == [[0.0, 0.0], [0.0, 0.0]]


def test_a_critic_is_the_baseline_of_every_token():
    # delta = (0 + 0.5 - 0.5, 1 - 0.5) = (0, 0.5); the first token adds 0.5 times the second's
    judged = batch(compared=RAW, values=[0.5, 0.5])
    advantages = critic_relative(judged, settings_of("ppo", lambd=0.5))  # type: ignore[arg-type]
    assert lists(advantages) == [[0.25, 0.5], [-0.25, -0.5]]


def test_a_teachers_divergence_is_taken_from_the_advantage_of_each_token():
    distilled = batch(old_log_probs=[-1.0, -1.0])
    for sample in distilled.samples:
        sample.teacher_log_probs = [-2.0, -1.0]  # the first token is e times likelier than by the teacher
    advantages, metrics = estimate_advantages(distilled, settings_of("opd", opd_kl_coef=0.5), without_rewards)
    assert lists(advantages) == [[-0.5, 0.0], [-0.5, 0.0]]
    assert metrics == {"train/opd_reverse_kl": 0.5}  # the mean of 1 and 0


def test_returns_with_a_critic_are_those_before_advantages_are_whitened():
    judged = batch(compared=RAW, values=[0.5, 0.5])
    settings = settings_of("ppo", lambd=0.5, normalize_advantages=True)
    advantages, _ = estimate_advantages(judged, settings, critic_relative)
    assert [row.returns for row in judged.rows] == [[0.75, 1.0], [0.25, 0.0]]  # values and (0.25, 0.5), (-0.25, -0.5)
    # mean 0, unbiased variance (2 * 0.0625 + 2 * 0.25) / 3
    assert lists(advantages)[0] == pytest.approx([0.25 / math.sqrt(0.625 / 3), 0.5 / math.sqrt(0.625 / 3)])


def test_an_algorithm_has_reference_and_teacher_score_responses_on_their_own_prompts():
    samples = [Sample(tokens=[1, 2, 3], response_length=1), Sample(tokens=[4, 5], response_length=2)]
    for name, algorithm in registry.ALGORITHMS.items():
        settings = Settings().model_copy(update={"algorithm": algorithm.settings()})
        assert algorithm.scoring is reference_and_teacher
        assert [(each.model, each.field) for each in algorithm.scoring(settings)] == [
            ("reference", "ref_log_probs"), *[("teacher", "teacher_log_probs")] * (name == "opd")
        ]  # fmt: skip
    assert ScoringPass("policy", "teacher_log_probs").tokens(samples) == [[1, 2, 3], [4, 5]]


@pytest.mark.parametrize(("top_k", "passes"), [(8, [("teacher", "teacher_top_log_probs", 8)]), (None, [])])
def test_a_divergence_of_distributions_asks_for_the_likeliest_tokens(top_k: int | None, passes: list[object]):
    chosen = settings_of("opd", opd_divergence="reverse_kl", opd_top_k=top_k)
    settings = Settings().model_copy(update={"algorithm": chosen})
    reference, *others = registry.ALGORITHMS["opd"].scoring(settings)
    assert (reference.model, reference.top_k) == ("reference", None)
    assert [(each.model, each.field, each.top_k) for each in others] == passes
