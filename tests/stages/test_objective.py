"""What each algorithm makes of a round, in numbers worked out by hand, and that a policy learns from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from stages.passes import set_loss_weights, training_batch

from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.errors import RecordError
from slimectl.policies.fsdp.policy import FsdpPolicy
from slimectl.policies.optimizer import OptimizerOptions
from slimectl.policies.options import TrainerOptions
from slimectl.settings import Settings
from slimectl.settings.algorithm import ALGORITHMS
from slimectl.settings.checks import conflicts
from slimectl.settings.needs import Need
from slimectl.settings.policy_gradient import PolicyGradient
from slimectl.stages.advantages import Models
from slimectl.stages.hooks import NO_HOOKS
from slimectl.stages.train import train
from slimectl.stages.training_batch import build_training_batch
from slimectl.types import Sample, Status, TrainingSample

LENGTHS = (2, 4, 4)
GROUPS = ((1.0, 0.0, 0.0), (1.0, 1.0, 0.0))
NAMES = [name for name, cls in ALGORITHMS.items() if issubclass(cls, PolicyGradient) and name not in ("ppo", "opd")]
"""Those that need no other model; for the others see test_critic_and_teacher.py."""


def attempts() -> list[Sample]:
    """Two groups of three answers, of 2, 4 and 4 tokens."""
    return [
        Sample(
            group_index=group,
            index=3 * group + i,
            tokens=[65 + group, 66, *range(100 + 10 * i, 100 + 10 * i + length)],
            response_length=length,
            reward={"score": reward, "right": reward},
            turn_rewards=[{"reward": reward, "state": "start"}],
            status=Status.COMPLETED,
            weight_versions=["0"],
        )
        for group, rewards in enumerate(GROUPS)
        for i, (reward, length) in enumerate(zip(rewards, LENGTHS, strict=True))
    ]


def named(name: str) -> dict[str, Any]:
    """The algorithm's settings without which it does not run."""
    return {"name": name} | ({"gdpo_weights": {"right": 2.0}} if name == "gdpo" else {})


def algorithm(name: str, **changes: Any) -> PolicyGradient:
    made = ALGORITHMS[name].model_validate(named(name) | changes)
    assert isinstance(made, PolicyGradient)
    return made


def objective(name: str, old: float = -1.0, ref: float | None = None, **changes: Any) -> list[TrainingSample]:
    """Rows of the round with the advantages and the weights of one step; every token as likely as given."""
    chosen, given = algorithm(name, **changes), attempts()
    for sample in given:
        sample.ref_log_probs = None if ref is None else [ref] * sample.response_length
    batch, _ = training_batch(given, chosen, old=old)
    set_loss_weights(batch.rows, batch.executions, chosen)
    return batch.rows


# Group 0 has mean 1/3, group 1 has 2/3; both have the unbiased standard deviation sqrt(1/3).
ONE = (2 / 3) / (1 / 3) ** 0.5
CENTRED = [2 / 3, -1 / 3, -1 / 3, 1 / 3, 1 / 3, -2 / 3]
NORMALIZED = [ONE, -ONE / 2, -ONE / 2, ONE / 2, ONE / 2, -ONE]
# Returns are 1 on 2 + 2 + 4 tokens and 0 on 12: mean 0.4, variance (8 * 0.36 + 12 * 0.16) / 19 = 4.8 / 19.
R_STD = (4.8 / 19) ** 0.5
RETURNS = [0.6 / R_STD, -0.4 / R_STD, -0.4 / R_STD, 0.6 / R_STD, 0.6 / R_STD, -0.4 / R_STD]
# The centred rewards sum to 2 * 2/3 - 8/3 + 2/3 + 4/3 - 8/3 = -2 over 20 tokens: mean -0.1; of the tokens 2 have 2/3,
# 8 have -1/3, 6 have 1/3 and 4 have -2/3: sum of squares (2 * 4 + 8 + 6 + 4 * 4) / 9 = 38/9, less 20 * 0.01.
C_STD = ((38 / 9 - 0.2) / 19) ** 0.5
ADVANTAGES = {
    "grpo": NORMALIZED,
    "dr_grpo": CENTRED,
    "dapo": NORMALIZED,
    **dict.fromkeys(("gspo", "cispo", "sapo", "gmpo"), NORMALIZED),
    "topr": CENTRED,
    "rloo": [1.0, -0.5, -0.5, 0.5, 0.5, -1.0],  # 1 - 0, 0 - 1/2, …, 1 - 1/2, …, 0 - 1
    "opo": [0.8, -0.2, -0.2, 0.4, 0.4, -0.6],  # baselines 2 / 10 and (2 + 4) / 10
    # The weighted values sum to 0, with squares 4 * 2 * (1 + 1/4 + 1/4) * 4/3 = 16 over 6 attempts.
    "gdpo": [2 * value / (16 / 5) ** 0.5 for value in NORMALIZED],
    "maxrl": [2.0, -1.0, -1.0, 0.5, 0.5, -1.0],  # over means of 1/3 and 2/3
    "reinforce_plus_plus": RETURNS,
    "reinforce_plus_plus_baseline": [(value + 0.1) / C_STD for value in CENTRED],
    "turn_grpo": NORMALIZED,  # of attempts of one turn, as grpo
    "gigpo": [2 * value for value in NORMALIZED],  # the attempt's, and the same among its equal states
    "step_reinforce": RETURNS,
}
PER_TOKEN = [1 / 20] * 6  # 20 tokens in all
PER_ROLLOUT = [1 / 12, 1 / 24, 1 / 24] * 2  # 6 rollouts of 2 or 4 tokens
WEIGHTS = dict.fromkeys(NAMES, PER_ROLLOUT) | {
    "dr_grpo": [1 / 18000] * 6,
    **dict.fromkeys(("dapo", "cispo", "topr", "rloo", "opo"), PER_TOKEN),
}


@pytest.mark.parametrize("name", NAMES)
def test_advantages_and_weights_of_a_step_are_those_worked_out_by_hand(name: str):
    for i, row in enumerate(objective(name)):
        assert row.advantages == pytest.approx([ADVANTAGES[name][i]] * LENGTHS[i % 3], rel=1e-5)
        assert row.loss_weights == pytest.approx([WEIGHTS[name][i]] * LENGTHS[i % 3])


def uneven() -> list[Sample]:
    """Three attempts, of which the first came as two samples; two; one alone. Each sample has 2 tokens."""
    given = [(0, 0, 1.0), (0, 0, 1.0), (0, 2, 0.0), (0, 3, 0.0), (1, 4, 0.5), (1, 5, 0.0), (2, 6, 1.0)]
    return [
        Sample(group, i, rollout_id=rollout, tokens=[65, 100 + i, 9], response_length=2, reward=reward,
               status=Status.COMPLETED)
        for i, (group, rollout, reward) in enumerate(given)
    ]  # fmt: skip


HALF = 0.5**0.5  # of 0.5 and 0: 0.25 over the standard deviation sqrt(1/8)
# Centred: 4 tokens of 2/3, 4 of -1/3, 2 of 1/4, 2 of -1/4, 2 of 0; their mean is (8/3 - 4/3) / 14 = 2/21.
U_STD = ((4 * 4 / 9 + 4 / 9 + 4 / 16 - 14 * (2 / 21) ** 2) / 13) ** 0.5


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", [ONE, ONE, -ONE / 2, -ONE / 2, HALF, -HALF, 0.0]),
        ("rloo", [1.0, 1.0, -0.5, -0.5, 0.5, -0.5, 0.0]),
        ("reinforce_plus_plus_baseline",
         [(value - 2 / 21) / U_STD for value in (2 / 3, 2 / 3, -1 / 3, -1 / 3, 0.25, -0.25, 0.0)]),
    ],
)  # fmt: skip
def test_groups_of_any_size_are_compared_by_attempts_not_by_samples(name: str, expected: list[float]):
    chosen = algorithm(name, drop_zero_std_groups=False, calculate_per_token_loss=False)
    batch, _ = training_batch(uneven(), chosen)
    rows = batch.rows
    for row, value in zip(rows, expected, strict=True):
        assert row.advantages == pytest.approx([value] * 2, rel=1e-5, abs=1e-9)
    set_loss_weights(rows, batch.executions, chosen)
    # Six attempts: 4 tokens share the first one's sixth, 2 each of the others.
    assert [row.loss_weights for row in rows] == [pytest.approx([1 / 24] * 2)] * 2 + [pytest.approx([1 / 12] * 2)] * 5


def test_divergence_in_the_reward_is_charged_to_the_answer_or_to_each_of_its_tokens():
    # Each token 0.5 likelier than by the reference: 2 tokens cost 1 * 0.1, 4 tokens cost 2 * 0.1.
    rloo = objective("rloo", old=-1.0, ref=-1.5, kl_coef=0.1)
    assert rloo[0].advantages == pytest.approx([0.9 - -0.2] * 2)  # the others got -0.2 each
    assert rloo[0].old_log_probs == [-1.0, -1.0]
    # Returns now fall by 0.05 a token: 0.9, 0.95 (1 is at the end, less its own 0.05) and so on; compare two of them.
    plain = objective("reinforce_plus_plus", old=-1.0, ref=-1.5, kl_coef=0.1)
    first, last = plain[0].advantages
    bad = plain[1].advantages
    assert (last - first) / (last - bad[3]) == pytest.approx(0.05 / 1.0)
    centred = objective("reinforce_plus_plus_baseline", old=-1.0, ref=-1.5, kl_coef=0.1)
    without = objective("reinforce_plus_plus_baseline")
    for row, other in zip(centred, without, strict=True):  # the same charge for every token is whitened away
        assert row.advantages == pytest.approx(other.advantages)


def test_returns_of_reinforce_plus_plus_are_discounted():
    (first, second), zeros = (objective("reinforce_plus_plus", gamma=0.5)[i].advantages for i in (0, 1))
    assert (first - zeros[0]) / (second - zeros[0]) == pytest.approx(0.5)


def test_without_a_baseline_a_prompt_needs_no_second_answer():
    alone = [sample for sample in attempts() if sample.index % 3 == 0]
    assert Need.GROUPS not in algorithm("reinforce_plus_plus").needs
    assert Need.GROUPS in algorithm("rloo").needs
    with pytest.raises(RecordError, match="rloo compares the responses to a prompt"):
        build_training_batch(alone, Settings.model_validate({"algorithm": {"name": "rloo"}}), NO_HOOKS, version=0)


def test_a_divergence_without_a_reference_is_refused():
    with pytest.raises(RecordError, match=r"sample 0: no ref_log_probs, which algorithm.kl_coef needs"):
        objective("rloo", kl_coef=0.1)


TOP = {"opd_divergence": "forward_kl", "opd_top_k": 2}


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("kl_coef and algorithm.kl_loss_coef cannot", {"name": "rloo", "kl_coef": 0.1, "kl_loss_coef": 0.1}),
        ("normalize_advantages", {"name": "reinforce_plus_plus", "normalize_advantages": False}),
        ("ref_update_interval has no effect without a divergence", {"ref_update_interval": 5}),
        ("kl_coef has no effect with algorithm.name opd", {"name": "opd", "kl_coef": 0.1}),
        ("opd_teacher_load has no effect with algorithm.opd_kl_coef = 0", {"opd_teacher_load": "teacher"}),
        ("opd_divergence has no effect with algorithm.opd_kl_coef = 0", {"opd_divergence": "jsd", "opd_top_k": 2}),
        ("opd_top_k has no effect with algorithm.opd_divergence = token", {"name": "opd", "opd_top_k": 2}),
        ("opd_jsd_beta has no effect with", {"name": "opd", **TOP, "opd_jsd_beta": 0.1}),
        ("opd_divergence: jsd over the full vocabulary needs one teacher", {"name": "opd", "opd_divergence": "jsd"}),
        ("rs_clip has no effect without algorithm.use_rs = true", {"rs_clip": 5.0}),
        ("opsm_delta has no effect without algorithm.use_opsm", {"opsm_delta": 0.1}),
        ("tis_batch_normalize has no effect without algorithm.use_tis", {"tis_batch_normalize": True}),
        (
            "use_rollout_logprobs and algorithm.use_rs cannot be",
            {"use_rollout_logprobs": True, "use_rs": True},
        ),
        ("tis_clip_low: 3 is above algorithm.tis_clip: 2", {"use_tis": True, "tis_clip_low": 3.0}),
        ("critic_lr has no effect with algorithm.critic = shared", {"name": "ppo", "critic": "shared", "critic_lr": 1}),
        ("value_coef has no effect with algorithm.critic = separate", {"name": "ppo", "value_coef": 0.5}),
        ('tis_mode = "truncate"', {"use_tis": True, "tis_clip_low": 0.5, "tis_mode": "truncate"}),
    ],
)
def test_contradictions_name_the_keys(key: str, changes: dict[str, Any]):
    (line,) = conflicts(Settings.model_validate({"algorithm": {"name": "grpo"} | changes}))
    assert key in line


@pytest.mark.parametrize("name", ["custom_advantage_function_path", "custom_loss_function_path"])
def test_a_function_that_would_not_be_called_is_refused(name: str):
    asked = {"algorithm": {"name": "dpo"}, "train": {name: "mine.py:mine"}}
    (line,) = conflicts(Settings.model_validate(asked))
    assert f"train.{name} has no effect with algorithm.name dpo" in line


def test_what_a_paper_changes_is_the_default_of_its_algorithm():
    dapo = algorithm("dapo").model_dump()
    gspo, cispo = algorithm("gspo").model_dump(), algorithm("cispo").model_dump()
    assert [(each["eps_clip"], each["eps_clip_high"]) for each in (gspo, cispo)] == [(3e-4, 4e-4), (1.0, 4.0)]
    assert (dapo["eps_clip"], dapo["eps_clip_high"], dapo["kl_loss_coef"]) == (0.2, 0.28, 0.0)


@pytest.fixture
def policy(model_dir: Callable[..., Path]) -> FsdpPolicy:
    return FsdpPolicy(
        model_dir(), HFCheckpoint(), TrainerOptions(optimizer=OptimizerOptions(lr=1e-3, weight_decay=0.0))
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_policy_takes_steps_of_every_algorithm(name: str, policy: FsdpPolicy):
    chosen = {"algorithm": named(name), "train": {"num_steps_per_rollout": 2}}
    rounds = {"run": {"rollout_batch_size": 2}, "rollout": {"n_samples_per_prompt": 3}}
    before = {name: tensor.clone() for name, tensor in policy.weights()}
    settings = Settings.model_validate(chosen | rounds)
    first, second = (report.metrics for report in train(attempts(), Models(policy), settings))
    # The ratio of the first step is 1: its loss is minus the weighted advantages of group 0, half of all.
    rows = zip(ADVANTAGES[name], WEIGHTS[name], LENGTHS, strict=False)
    by_hand = -2 * sum(advantage * weight * length for advantage, weight, length in rows)
    if name == "sapo":  # 2 / tau at a ratio of 1: 2 A for good tokens, 2 / 1.05 A for bad ones, here ONE against ONE
        by_hand = -2 * (2 - 2 / 1.05) * ONE / 6
    if name not in ("cispo", "topr"):  # whose loss has the log-probability as a factor
        assert first["train/loss"] == pytest.approx(by_hand, abs=1e-5)
    assert second["train/ppo_kl"] != 0
    for metrics in (first, second):
        assert metrics["train/grad_norm"] > 0
    assert any(not torch.equal(tensor, before[name]) for name, tensor in policy.weights())
