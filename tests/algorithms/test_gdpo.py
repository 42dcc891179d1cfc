"""GDPO: components of a reward, normalized one by one, by hand and against a plain loop."""

from __future__ import annotations

import random
import statistics
from typing import Any

import pytest

from slimectl.algorithms.baselines import decoupled_advantages, group_advantages
from slimectl.errors import RecordError, SettingsError
from slimectl.settings.layers import from_assignments
from slimectl.settings.loading import resolve
from slimectl.settings.rollout_algorithms import Gdpo
from slimectl.stages.filters import nonzero_std
from slimectl.stages.grader import Grader
from slimectl.stages.hooks import NO_HOOKS
from slimectl.stages.signal import missing_signal
from slimectl.stages.training_batch import build_policy_batch
from slimectl.types import Sample, Status

WEIGHTS = {"right": 1.0, "short": 0.5}


def sample(index: int, reward: Any, *, group: int = 0, **facts: Any) -> Sample:
    return Sample(group_index=group, index=index, tokens=[9, 1, 2], response_length=2, reward=reward,
                  rollout_log_probs=[-1.0, -1.0], status=Status.COMPLETED, **facts)  # fmt: skip


def settings(*assignments: str) -> Any:
    given = ["algorithm.name=gdpo", "algorithm.gdpo_weights={right = 1.0, short = 0.5}", *assignments]
    return resolve([from_assignments(given)]).settings


def plain(rows: list[tuple[int, int, dict[str, float | None]]], weights: dict[str, float]) -> list[float]:
    """GDPO in plain Python: rows of (group, attempt, components). Attempts count once."""
    attempts: dict[tuple[int, int], list[dict[str, float | None]]] = {}
    for group, attempt, values in rows:
        attempts.setdefault((group, attempt), []).append(values)
    sums = dict.fromkeys(attempts, 0.0)
    for name, weight in weights.items():
        for group in {group for group, _ in attempts}:
            means = {}
            for key, members in attempts.items():
                known = [values[name] for values in members if values[name] is not None]
                if key[0] == group and known:
                    means[key] = sum(known) / len(known)
            if len(set(means.values())) > 1:
                mean, std = statistics.fmean(means.values()), statistics.stdev(means.values())
                for key, value in means.items():
                    sums[key] += weight * (value - mean) / (std + 1e-6)
    mean, std = statistics.fmean(sums.values()), statistics.stdev(sums.values())
    return [(sums[group, attempt] - mean) / (std + 1e-6) for group, attempt, _ in rows]


def test_components_that_cancel_in_the_sum_keep_their_signal():
    # Group 0: sums 1, 1, so GRPO learns nothing. Each component has mean 1/2 and unbiased std sqrt(1/2):
    # right 0.707, -0.707 and short -0.707, 0.707, so with weights 1 and 1/2 the sums are 0.354, -0.354.
    # The unbiased std of 0.354, -0.354 is 1/2, so the batch makes them 0.707, -0.707 again.
    components = {"right": [1.0, 0.0], "short": [0.0, 1.0]}
    found = decoupled_advantages(components, WEIGHTS, [0, 0], [0, 1])
    assert found == pytest.approx([0.5**0.5, -(0.5**0.5)], abs=1e-5)
    assert group_advantages([1.0, 1.0], [0, 0], [0, 1]) == [0.0, 0.0]


def test_the_scale_of_a_component_does_not_matter():
    components = {"right": [1.0, 0.0, 0.0, 1.0], "short": [0.0, 1.0, 0.0, 0.5]}
    scaled = {"right": components["right"], "short": [1000 * value + 7 for value in components["short"]]}
    weights, places = {"right": 1.0, "short": 1.0}, ([0] * 4, [0, 1, 2, 3])
    found = decoupled_advantages(components, weights, *places)
    assert decoupled_advantages(scaled, weights, *places) == pytest.approx(found, abs=1e-5)


def test_groups_of_unequal_size_and_attempts_of_several_samples_equal_a_plain_loop():
    rng = random.Random(0)
    rows: list[tuple[int, int, dict[str, float | None]]] = []
    for group, size in enumerate((1, 2, 3, 7)):
        for attempt in range(10 * group, 10 * group + size):
            for _ in range(rng.randint(1, 3)):  # fan-out
                short = None if rng.random() < 0.2 else rng.gauss(40.0, 9.0)
                rows.append((group, attempt, {"right": float(rng.random() < 0.5), "short": short}))
    rng.shuffle(rows)
    columns = {name: [values[name] for _, _, values in rows] for name in WEIGHTS}
    found = decoupled_advantages(columns, WEIGHTS, [row[0] for row in rows], [row[1] for row in rows])
    assert found == pytest.approx(plain(rows, WEIGHTS), abs=1e-12)
    by_attempt = dict(zip([row[:2] for row in rows], found, strict=True))
    assert statistics.fmean(by_attempt.values()) == pytest.approx(0.0, abs=1e-12)
    assert statistics.stdev(by_attempt.values()) == pytest.approx(1.0, abs=1e-5)


def test_equal_components_give_exact_zeros():
    assert decoupled_advantages({"right": [0.1] * 3, "short": [None] * 3}, WEIGHTS, [0] * 3, [0, 1, 2]) == [0.0] * 3
    assert decoupled_advantages({}, {}, [0, 0], [0, 1]) == [0.0, 0.0]


def batch_of(samples: list[Sample], **options: Any) -> Any:
    return build_policy_batch(samples, Gdpo(gdpo_weights=WEIGHTS, **options), settings().score)


def test_rows_get_the_advantages_of_their_components():
    rewards = [{"score": 1.0, "right": 1.0, "short": 0.0}, {"score": 1.0, "right": 0.0, "short": 1.0}]
    batch, _ = batch_of([sample(i, reward) for i, reward in enumerate(rewards)])
    assert batch.normalized_rewards == pytest.approx([0.5**0.5, -(0.5**0.5)], abs=1e-5)
    assert batch.components == {"right": [1.0, 0.0], "short": [0.0, 1.0]}
    assert batch.any_group_differs  # though both rewards are 1
    assert batch.rewards_differ
    for row in batch.rows:
        row.advantages = [1.0, 1.0]
    assert missing_signal(batch, settings(), NO_HOOKS) == ""


def test_groups_are_dropped_if_all_their_components_are_equal():
    same = [sample(i, {"score": 1.0, "right": 1.0, "short": 0.0}, group=1) for i in (2, 3)]
    split = [sample(i, {"score": 1.0, "right": 1.0 - i, "short": float(i)}, group=0) for i in (0, 1)]
    batch, metrics = batch_of(split + same, drop_zero_std_groups=True)
    assert [row.index for row in batch.rows] == [0, 1]
    assert metrics["rollout/dynamic_filter/drop_zero_std_1.0"] == 1.0
    assert nonzero_std(settings(), split) == (True, "")
    assert nonzero_std(settings(), same) == (False, "zero_std_1.0")
    assert nonzero_std(settings("algorithm.gdpo_weights={short = 1.0}"), same) == (False, "zero_std_0.0")


def test_a_reward_that_was_not_graded_is_zero_in_every_component():
    late = sample(1, 0.0, metadata={"reward_error": "over the limit"})
    batch, _ = batch_of([sample(0, {"score": 1.0, "right": 1.0, "short": 0.5}), late])
    assert batch.components == {"right": [1.0, 0.0], "short": [0.5, 0.0]}


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({"score": 1.0, "right": 1.0, "tidy": 0.0},
         r"sample 1: reward: no component 'short'\. The components are right, tidy\. Return it for every sample"),
        (1.0, r"sample 1: reward: no component 'right'\. The components are none"),
        ({"score": 1.0, "right": "yes", "short": 0.0}, r"sample 1: reward: component 'right' is .*, not a number"),
    ],
)  # fmt: skip
def test_a_missing_component_is_named_with_its_sample(reward: Any, message: str):
    with pytest.raises(RecordError, match=message) as caught:
        batch_of([sample(0, {"score": 1.0, "right": 1.0, "short": 0.0}), sample(1, reward)])
    assert "\n" not in str(caught.value)


def test_the_parts_of_a_sum_are_the_components():
    parts = 'score.rm=[{type = "exact"}, {type = "length_penalty", weight = -0.5, limit = 8, name = "short"}]'
    given = resolve([from_assignments(["algorithm.name=gdpo", parts])]).settings
    rewards = [{"score": 1.0, "exact": 1.0, "short": 0.0}, {"score": -0.5, "exact": 0.0, "short": 1.0}]
    batch, _ = build_policy_batch([sample(i, reward) for i, reward in enumerate(rewards)], given.algorithm, given.score)
    assert batch.components == {"exact": [1.0, 0.0], "short": [0.0, 1.0]}


def test_a_weight_of_a_part_that_the_sum_lacks_is_refused_before_the_run():
    given = settings('score.rm=[{type = "exact", name = "right"}]')
    with pytest.raises(SettingsError, match=r"algorithm\.gdpo_weights\.short: no part of score\.rm .*\(right\)"):
        Grader(given)


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        (["algorithm.name=gdpo"], "algorithm.gdpo_weights: missing"),
        (["algorithm.name=gdpo", "algorithm.gdpo_weights={a = 1.0}", "algorithm.kl_coef=0.1"],
         "Use algorithm.kl_loss_coef"),
        (["algorithm.name=gdpo", "algorithm.gdpo_weights={a = inf}"], "finite"),
        (["algorithm.name=gdpo", "algorithm.gdpo_weights={a = 0.0}"], "every weight is 0"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_are_refused(assignments: list[str], message: str):
    with pytest.raises(SettingsError, match=message):
        resolve([from_assignments(assignments)])
