"""Credit for turns: advantages in numbers worked out by hand, and against a loop over floats."""

from __future__ import annotations

from collections import defaultdict
from statistics import fmean, stdev
from typing import Any

import pytest
from algorithms import plain
from hypothesis import given
from hypothesis import strategies as st

from slimectl.algorithms.estimators import TrainingBatch, estimate_advantages
from slimectl.algorithms.registry import ALGORITHMS
from slimectl.algorithms.turn_advantages import (
    compared,
    state_relative,
    turn_reinforce,
    turn_relative,
    turn_returns,
)
from slimectl.data.turn_rewards import checked_turn_rewards, rewarded_turns
from slimectl.errors import RecordError
from slimectl.settings import algorithm as settings
from slimectl.types import Sample, TrainingSample

TURN, GAP = 2, 1
"""Tokens of a turn of the policy, and of the environment's output between two turns."""


ESTIMATORS = {"turn_grpo": turn_relative, "gigpo": state_relative, "step_reinforce": turn_reinforce}


def attempt(index: int, rewards: list[Any], states: str = "", group: int = 0, **changes: Any) -> Sample:
    """An attempt with a turn for each reward. Its reward is their sum, as for environments."""
    mask = ([1] * TURN + [0] * GAP) * (len(rewards) - 1) + [1] * TURN
    turns: list[Any] = [{"reward": r, "state": s} for r, s in zip(rewards, states, strict=True)] if states else rewards
    return Sample(group, index, tokens=[0, *mask], response_length=len(mask), loss_mask=mask, turn_rewards=turns,
                  **{"reward": sum(rewards), **changes})  # fmt: skip


def round_of(name: str, samples: list[Sample]) -> TrainingBatch:
    """The samples as a round, whose rewards are centred within groups."""
    rewards = [float(sample.reward or 0.0) for sample in samples]
    rows = [TrainingSample(s.tokens, s.response_length, [float(bit) for bit in s.mask()],
                           old_log_probs=[-1.0] * s.response_length, ref_log_probs=[-1.5] * s.response_length)
            for s in samples]  # fmt: skip
    by_group = defaultdict(list)
    for sample, reward in zip(samples, rewards, strict=True):
        by_group[sample.group_index].append(reward)
    batch = TrainingBatch(rows, [s.trajectory_id for s in samples], samples, rewards, list(range(len(samples))))
    batch.normalized_rewards = [reward - fmean(by_group[sample.group_index])
                                for sample, reward in zip(samples, rewards, strict=True)]  # fmt: skip
    batch.turns = rewarded_turns(samples, name)
    return batch


def advantages(name: str, samples: list[Sample], **changes: Any) -> list[list[float]]:
    """Advantages of every token, after a check that the environment's tokens have none."""
    algorithm = settings.ALGORITHMS[name].model_validate({"name": name, **changes})
    assert ALGORITHMS[name].advantages is ESTIMATORS[name]
    values, _ = estimate_advantages(round_of(name, samples), algorithm, ESTIMATORS[name])
    for sample, value_T in zip(samples, values, strict=True):
        assert all(value == 0 for value, bit in zip(value_T.tolist(), sample.mask(), strict=True) if not bit)
    return [value_T.tolist() for value_T in values]


def of_turns(tokens: list[float]) -> list[float]:
    """The value of each turn, after a check that all of its tokens have it."""
    turns = [tokens[start : start + TURN] for start in range(0, len(tokens), TURN + GAP)]
    assert all(len(set(turn)) == 1 for turn in turns)
    return [turn[0] for turn in turns]


def test_a_turn_is_compared_with_turns_of_its_number():
    # Returns with gamma 0.5: 1 + 0.5 * 2 = 2, 2 | 0, 0 | 3 + 0.5 * (1 + 0.5 * 4) = 4.5, 3, 4.
    samples = [attempt(0, [1.0, 2.0]), attempt(1, [0.0, 0.0]), attempt(2, [3.0, 1.0, 4.0])]
    centred = [of_turns(row) for row in advantages("turn_grpo", samples, turn_gamma=0.5, grpo_std_normalization=False)]
    first, second = fmean([2.0, 0.0, 4.5]), fmean([2.0, 0.0, 3.0])
    assert centred[0] == pytest.approx([2.0 - first, 2.0 - second])
    assert centred[1] == pytest.approx([-first, -second])
    assert centred[2] == pytest.approx([4.5 - first, 3.0 - second, 0.0])  # no other attempt took a third turn
    normalized = [of_turns(row) for row in advantages("turn_grpo", samples, turn_gamma=0.5)]
    assert normalized[0][1] == pytest.approx((2.0 - second) / (stdev([2.0, 0.0, 3.0]) + 1e-6))


def test_returns_are_of_turns_in_their_order():
    batch = round_of("turn_grpo", [attempt(4, [1.0, 2.0, 4.0])])
    returns = turn_returns(batch, settings.ALGORITHMS["turn_grpo"].model_validate({"turn_gamma": 0.5}))
    assert {key.number: value for key, value in returns.items()} == {0: 3.0, 1: 4.0, 2: 4.0}
    groups = dict(zip(returns, "aab", strict=True))
    assert list(compared(returns, groups, std_normalization=False).values()) == [-0.5, 0.5, 0.0]


def test_turns_are_compared_within_the_group_or_the_round():
    samples = [attempt(0, [1.0, 3.0]), attempt(1, [0.0]), attempt(2, [10.0], group=1), attempt(3, [12.0], group=1)]
    group = advantages("turn_grpo", samples, turn_baseline="group", grpo_std_normalization=False)
    assert [of_turns(row) for row in group] == [pytest.approx(v) for v in ([5 / 3, 2 / 3], [-7 / 3], [-1.0], [1.0])]
    everything = advantages("turn_grpo", samples, turn_baseline="batch", grpo_std_normalization=False)
    mean = fmean([4.0, 3.0, 0.0, 10.0, 12.0])
    assert of_turns(everything[0]) == pytest.approx([4.0 - mean, 3.0 - mean])
    assert of_turns(everything[3]) == pytest.approx([12.0 - mean])


def test_an_attempt_without_siblings_has_nothing_to_be_compared_with():
    samples = [attempt(0, [1.0, 3.0]), attempt(1, [1.0, 2.0], group=1), attempt(2, [0.0, 2.0], group=1)]
    assert of_turns(advantages("turn_grpo", samples)[0]) == [0.0, 0.0]
    # Equal returns of a turn number teach nothing, although the attempts' rewards differ.
    assert of_turns(advantages("turn_grpo", samples)[1])[1] == 0.0


def test_the_outcome_is_added_to_the_last_turn():
    samples = [attempt(0, [0.0, 0.5], reward=1.0), attempt(1, [0.5, 0.5], reward=0.0)]
    rows = advantages("turn_grpo", samples, outcome_weight=2.0, turn_gamma=0.5, grpo_std_normalization=False)
    # Returns 0 + (0.5 + 2) / 2 = 1.25, 2.5 | 0.5 + 0.25 = 0.75, 0.5
    assert [of_turns(row) for row in rows] == [pytest.approx(v) for v in ([0.25, 1.0], [-0.25, -1.0])]


def test_equal_states_are_compared_within_and_across_attempts():
    # Returns with gamma 1: attempt 0 visits a twice (3, 2) and b (1); attempt 1 visits b (0) and c (0).
    samples = [attempt(0, [1.0, 1.0, 1.0], "aab"), attempt(1, [0.0, 0.0], "bc"), attempt(2, [7.0], "b", group=1)]
    rows = advantages("gigpo", samples, turn_gamma=1.0, grpo_std_normalization=False, step_reward_weight=10.0)
    # The attempts' rewards 3 and 0 differ from their mean by 1.5. A state of another group is another state.
    assert of_turns(rows[0]) == pytest.approx([1.5 + 10 * 0.5, 1.5 - 10 * 0.5, 1.5 + 10 * 0.5])
    assert of_turns(rows[1]) == pytest.approx([-1.5 - 10 * 0.5, -1.5])  # nobody else was in c
    assert of_turns(rows[2]) == [0.0]
    steps = advantages("gigpo", samples, turn_gamma=1.0, episode_reward_weight=0.0)
    assert of_turns(steps[0])[0] == pytest.approx(0.5 / (stdev([3.0, 2.0]) + 1e-6))


def test_returns_of_step_reinforce_are_whitened_over_the_tokens_of_the_round():
    samples = [attempt(0, [0.0, 1.0]), attempt(1, [0.0], group=1)]
    # Returns 0.5, 1 | 0 of two tokens each: mean 0.5, variance 4 * 0.25 / 5.
    rows = advantages("step_reinforce", samples, turn_gamma=0.5)
    std = (4 * 0.25 / 5) ** 0.5
    assert [of_turns(row) for row in rows] == [pytest.approx([0.0, 0.5 / std]), pytest.approx([-0.5 / std])]


def test_returns_are_bounded_before_they_are_whitened():
    samples = [attempt(0, [9.0]), attempt(1, [-9.0]), attempt(2, [0.5])]
    rows = advantages("turn_grpo", samples, reward_clip=2.0, grpo_std_normalization=False)
    assert [of_turns(row) for row in rows] == [[2.0], [-2.0], [pytest.approx(0.5 - 0.5 / 3)]]
    plain_returns = advantages("step_reinforce", samples, reward_clip=2.0, normalize_advantages=False)
    assert [of_turns(row) for row in plain_returns] == [[2.0], [-2.0], [0.5]]


def test_divergence_is_charged_to_each_token():
    samples = [attempt(0, [1.0]), attempt(1, [0.0])]
    rows = advantages("turn_grpo", samples, kl_coef=0.2, grpo_std_normalization=False)
    assert rows == [pytest.approx([0.4, 0.4]), pytest.approx([-0.6, -0.6])]  # each token is 0.5 likelier


def test_an_attempt_of_several_samples_is_one_sequence_of_turns():
    # One turn in each sample, as of an agent that rewrites its history; the second attempt is one sample.
    parts = [attempt(i, [reward], rollout_id=0, reward=3.0) for i, reward in enumerate((1.0, 2.0))]
    samples = [*parts, attempt(2, [0.0, 0.0])]
    rows = advantages("turn_grpo", samples, grpo_std_normalization=False)
    assert [of_turns(row) for row in rows] == [[1.5], [1.0], [-1.5, -1.0]]  # returns 3, 2 | 0, 0
    # Numbers of turns say the order where the samples do not.
    for sample, number in zip(parts, (1, 0), strict=True):
        sample.turn_rewards = [{"reward": 1.0 + number, "turn": number}]
    assert [of_turns(row) for row in advantages("turn_grpo", samples, grpo_std_normalization=False)] == [
        [1.0], [1.5], [-1.5, -1.0]]  # fmt: skip


def test_a_turn_that_branches_share_counts_once():
    # Turns 0, 1 in one branch and 0, 2 in the other: its tokens are trained in the first.
    def entry(turn: int, reward: float, start: int) -> dict[str, Any]:
        return {"reward": reward, "turn": turn, "start": start, "end": start + 2}

    first, second = (attempt(i, [0.0, 0.0], rollout_id=0, reward=7.0) for i in (0, 1))
    first.turn_rewards = [entry(0, 1.0, 0), entry(1, 2.0, 3)]
    second.turn_rewards, second.loss_mask = [entry(0, 1.0, 0), entry(2, 4.0, 3)], [0, 0, 0, 1, 1]
    rows = advantages("turn_grpo", [first, second, attempt(2, [0.0, 0.0, 0.0])], grpo_std_normalization=False)
    # Returns 1 + 2 + 4, 2 + 4, 4 against zeros.
    assert rows[0] == [3.5, 3.5, 0.0, 3.0, 3.0]
    assert rows[1] == [0.0, 0.0, 0.0, 2.0, 2.0]


def test_players_have_their_own_turns():
    samples = [attempt(0, [1.0], rollout_id=0), attempt(1, [-1.0], rollout_id=0), attempt(2, [0.0], rollout_id=2)]
    samples[1].turn_rewards = [{"reward": -1.0, "player": 1}]
    rows = advantages("turn_grpo", samples, grpo_std_normalization=False)
    assert [of_turns(row) for row in rows] == [[0.5], [0.0], [-0.5]]


episodes = st.lists(
    st.tuples(st.integers(0, 2), st.lists(st.tuples(st.floats(-3, 3), st.sampled_from("abc")), min_size=1, max_size=5)),
    min_size=1,
    max_size=6,
)


@given(episodes, st.floats(0.1, 1.0))
def test_turns_agree_with_a_loop(given_episodes: list[tuple[int, list[tuple[float, str]]]], gamma: float):
    samples = [
        attempt(i, [reward for reward, _ in turns], "".join(state for _, state in turns), group=group)
        for i, (group, turns) in enumerate(given_episodes)
    ]
    returns = [plain.returns([reward for reward, _ in turns], gamma) for _, turns in given_episodes]
    places = [(i, k) for i, values in enumerate(returns) for k in range(len(values))]

    def normalized(i: int, k: int, peers: list[tuple[int, int]]) -> float:
        values = [returns[a][b] for a, b in peers]
        if max(values) - min(values) < 1e-5:  # rounding decides
            return float("nan")
        return (returns[i][k] - fmean(values)) / (stdev(values) + 1e-6)

    def same(name: str, i: int, k: int, a: int, b: int) -> bool:
        if given_episodes[i][0] != given_episodes[a][0]:
            return False
        return k == b if name == "turn_grpo" else given_episodes[i][1][k][1] == given_episodes[a][1][b][1]

    for name, changes in (("turn_grpo", {}), ("gigpo", {"episode_reward_weight": 0.0})):
        rows = advantages(name, samples, turn_gamma=gamma, **changes)
        for i, k in places:
            expected = normalized(i, k, [(a, b) for a, b in places if same(name, i, k, a, b)])
            if expected == expected:
                assert of_turns(rows[i])[k] == pytest.approx(expected, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"turn_rewards": None}, "sample 0: no turn_rewards, which gigpo needs. Sample from an environment"),
        ({"turn_rewards": [1.0]}, "sample 0: turn_rewards has 1 entries, but the policy took 2 turns. Give one"),
        ({"turn_rewards": [1.0, "a"]}, "sample 0: turn_rewards: turn 1: got str, expected a number, or an object"),
        ({"turn_rewards": [{"reward": 1, "start": 4, "end": 9}]}, "tokens 4 to 9 are outside of the response of 5"),
        ({}, "turn 0 of group 0: no state, which gigpo compares. Give it in sample.turn_rewards, or use turn_grpo"),
    ],
)
def test_turns_that_do_not_fit_are_one_line(changes: dict[str, Any], message: str):
    sample = attempt(0, [0.0, 1.0])
    for name, value in changes.items():
        setattr(sample, name, value)
    with pytest.raises(RecordError) as error:
        advantages("gigpo", [sample])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (1.0, "expected a list with an entry for each turn, got float"),
        ([True], "turn 0: got bool"),
        ([float("nan")], "turn 0: reward: nan is not a finite number"),
        ([10**400], "turn 0: reward: a number too large for a float"),
        ([{"score": 1.0}], "turn 0: unknown key 'score'"),
        ([{}], "turn 0: got NoneType"),
        ([{"reward": 1, "turn": -1}], "turn 0: turn must be a whole number of at least 0, got -1"),
        ([{"reward": 1, "state": 3}], "turn 0: state must be a string, got int"),
        ([{"reward": 1, "start": 3}], "turn 0: start and end must be given together"),
        (
            [{"reward": 1, "start": 0, "end": 3}, {"reward": 1, "start": 2, "end": 4}],
            "turn 1: tokens 2 to 4 overlap the turn before it",
        ),
    ],
)
def test_turn_rewards_of_another_form_are_refused(value: Any, message: str):
    with pytest.raises(ValueError, match=message):
        checked_turn_rewards(value)


def test_turns_that_a_session_recorded_are_used_where_the_mask_has_gaps():
    sample = attempt(0, [1.0, 2.0])
    sample.loss_mask, sample.metadata = [1, 0, 0, 0, 1], {"agent": {"turns": [[0, 2], [3, 5]]}}
    [[first, second]] = rewarded_turns([sample], "turn_grpo")
    assert (first.start, first.end, second.start, second.end) == (0, 2, 3, 5)
