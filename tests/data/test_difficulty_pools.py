"""Difficulty pools: which prompt comes next, what is retired, and that a resume repeats the draws."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from slimectl.data.difficulty_pools import DifficultyPools, PoolOptions
from slimectl.errors import SettingsError
from slimectl.settings.layers import from_assignments
from slimectl.settings.loading import resolve

BOUNDS = {"easy_threshold": 0.75, "hard_threshold": 0.25}
ROWS = range(8)
SUCCESSES = [True, True, True, True], [True, False, True, False], [False, False, False, False]
"""Of rows 0, 3 and 6, of rows 1, 4 and 7, and of rows 2 and 5: easy, normal and hard."""


def answered(pools: DifficultyPools, numbers: range, order=ROWS) -> list[int]:
    """Draw and record one row at a time, and return the rows."""
    rows = []
    for number in numbers:
        row = pools.draw(number, order)
        assert row is not None
        pools.record(number, SUCCESSES[row % 3])
        rows.append(row)
    return rows


def test_every_row_is_new_once_before_normal_rows_repeat_in_turn():
    pools = DifficultyPools(PoolOptions(**BOUNDS, easy_fraction=0.0, hard_fraction=0.0))
    assert answered(pools, range(14)) == [*range(8), 1, 4, 7, 1, 4, 7]
    assert pools.counts() == {"easy": 3, "normal": 3, "hard": 2, "retired": 0}


def test_pools_are_drawn_by_their_shares():
    pools = DifficultyPools(PoolOptions(**BOUNDS, easy_fraction=0.1, hard_fraction=0.3, seed=3))
    answered(pools, range(30))
    counts = Counter(row % 3 for row in answered(pools, range(30, 2030)))
    # 200, 1200 and 600 are expected; the standard deviations are at most sqrt(2000 * 0.6 * 0.4) = 22.
    assert all(abs(counts[kind] - expected) < 4 * 22 for kind, expected in enumerate((200, 1200, 600)))


def test_an_empty_pool_gives_way_to_another():
    pools = DifficultyPools(PoolOptions(hard_threshold=0.25, hard_fraction=1.0))
    # Row 2 is the first hard one.
    assert answered(pools, range(5), range(4)) == [0, 1, 2, 2, 2]


def test_a_prompt_moves_with_its_newest_pass_rate():
    pools = DifficultyPools(PoolOptions(**BOUNDS, easy_fraction=0.0, hard_fraction=0.0))
    for number, successes in enumerate(([True], [False], [True, False])):
        assert pools.draw(number, [5]) == 5
        pools.record(number, successes)
        assert [name for name, count in pools.counts().items() if count] == [("easy", "hard", "normal")[number]]
    pools.draw(3, [5])
    pools.record(3, [])  # no graded response: it stays where it was
    assert pools.counts()["normal"] == 1


def test_solved_prompts_are_retired_and_the_draws_end_with_them():
    pools = DifficultyPools(PoolOptions(retire_after=2))
    for number, success in enumerate((True, False, True)):
        assert pools.draw(number, [9]) == 9
        pools.record(number, [success])
    assert pools.counts()["retired"] == 0  # solved once in a row
    assert pools.draw(3, [9]) == 9
    pools.record(3, [True])
    assert pools.counts() == {"easy": 0, "normal": 0, "hard": 0, "retired": 1}
    assert pools.draw(4, [9]) is None


def test_a_round_with_more_prompts_than_rows_draws_rows_that_are_being_answered():
    pools = DifficultyPools(PoolOptions(retire_after=1))
    assert [pools.draw(number, range(2)) for number in range(3)] == [0, 1, 0]
    pools.record(0, [True])
    pools.record(2, [False])  # its newest response did not solve it
    assert pools.counts() == {"easy": 0, "normal": 1, "hard": 0, "retired": 0}


def test_a_prompt_that_does_not_fit_is_not_drawn_again():
    pools = DifficultyPools(PoolOptions(retire_after=1))
    assert pools.draw(0, range(2)) == 0
    pools.skip(0)
    assert [pools.draw(number, range(2)) for number in (1, 2)] == [1, 1]


@pytest.mark.parametrize("finished", [0, 3, 11])
def test_a_resume_repeats_the_draws(finished: int):
    options = PoolOptions(**BOUNDS, easy_fraction=0.2, hard_fraction=0.3, retire_after=3)
    whole = DifficultyPools(options)
    rows = answered(whole, range(40))
    first = DifficultyPools(options)
    answered(first, range(finished))
    in_flight = [first.draw(number, ROWS) for number in (finished, finished + 1)]
    state = json.loads(json.dumps(first.to_json()))
    resumed = DifficultyPools(options, state, position=finished)
    assert [resumed.draw(number, ROWS) for number in (finished, finished + 1)] == in_flight
    # Without draws in flight, all that follows is the same.
    second = DifficultyPools(options)
    answered(second, range(finished))
    state = json.loads(json.dumps(second.to_json()))
    resumed = DifficultyPools(options, state, position=finished)
    assert answered(resumed, range(finished, 40)) == rows[finished:]
    assert resumed.to_json() == whole.to_json()


@pytest.mark.parametrize(
    ("assignments", "words"),
    [
        (["rollout.easy_threshold=0.5", "rollout.data_weights=[1]"],
         "rollout.data_weights and rollout.easy_threshold, hard_threshold or retire_after cannot be combined"),
        (["rollout.retire_after=1", "rollout.data_source_path=a:b"], "both decide which prompt comes next"),
        (["rollout.retire_after=1", "rollout.function_path=a:b"], "pools need the loop over prompts"),
        (["rollout.easy_threshold=0.2", "rollout.hard_threshold=0.3"], "0.3 is not below rollout.easy_threshold: 0.2"),
        (["rollout.easy_threshold=0.5", "rollout.easy_fraction=1"], "are more than 1 together"),
        (["rollout.easy_fraction=0.5"], "rollout.easy_fraction has no effect without rollout.easy_threshold"),
        (["algorithm.name=dpo", "train.ppo_epochs=2"], "train.ppo_epochs: dpo does not train on rounds of rollouts"),
    ],
)  # fmt: skip
def test_settings_that_contradict_each_other_are_refused(assignments: list[str], words: str):
    with pytest.raises(SettingsError, match=words):
        resolve([from_assignments(assignments)])
