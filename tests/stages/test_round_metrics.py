"""A round in numbers, by hand."""

from __future__ import annotations

import pytest

from slimectl.executors.local import LocalExecutor
from slimectl.settings.layers import from_assignments
from slimectl.settings.loading import resolve
from slimectl.stages.grader import Grader
from slimectl.stages.metrics import component_metrics, repeats, round_metrics, round_perf, row_metrics, turn_metrics
from slimectl.stages.score import score
from slimectl.types import Sample, Status, TrainingSample


def row(advantages: list[float], weights: list[float], **columns: list[float]) -> TrainingSample:
    length = len(weights)
    return TrainingSample(
        tokens=[0, *range(length)], response_length=length, loss_weights=weights, advantages=advantages, **columns
    )


def sample(index: int, reward: float, *, length: int = 2, group: int = 0, **facts: object) -> Sample:
    return Sample(group_index=group, index=index, tokens=[9, 9, 9, *range(length)], response_length=length,
                  reward=reward, status=Status.COMPLETED, **facts)  # fmt: skip


def test_rows_count_only_the_tokens_that_are_trained_on():
    found = row_metrics([row([1.0, 5.0], [1.0, 0.0]), row([-2.0, -4.0], [1.0, 1.0])])
    assert found == {
        "rollout/advantages": pytest.approx(-5 / 3),  # (1 - 2 - 4) / 3; the 5 has no weight
        "rollout/advantages/std": pytest.approx(38**0.5 / 3),  # of the squares 64/9, 1/9 and 49/9
        "rollout/advantages/max": 1.0,
        "rollout/advantages/min": -4.0,
    }


def test_an_answer_without_tokens_hides_nothing_of_the_others():
    found = row_metrics([row([1.0, 5.0], [1.0, 0.0]), row([], [])])
    assert found["rollout/advantages"] == 1.0


def test_log_probabilities_are_told_where_all_rows_have_them():
    old, ref = {"old_log_probs": [-1.0, -2.0]}, {"ref_log_probs": [-1.5, -3.0]}
    found = row_metrics([row([1.0, 1.0], [1.0, 1.0], **old, **ref)])
    assert found["rollout/log_probs"] == -1.5
    assert found["rollout/ref_log_probs"] == -2.25
    assert found["rollout/kl"] == 0.75
    lacking = row_metrics([row([1.0, 1.0], [1.0, 1.0], **old), row([1.0, 1.0], [1.0, 1.0])])
    assert "rollout/log_probs" not in lacking


def test_a_round_without_rows_has_none_of_it():
    assert row_metrics([]) == {}
    assert row_metrics([row([1.0], [0.0])]) == {}


def test_what_every_round_tells():
    settings = resolve([]).settings
    samples = [sample(0, 1.0), sample(1, 0.0, length=4)]
    samples[1].status = Status.TRUNCATED
    samples[0].response, samples[1].response = "a", "b"
    found = round_metrics(samples, [1.0, 0.0], [0.5, -0.5], settings)
    assert found == {
        "rollout/ngram_repetition": 0.0,
        "rollout/duplicate_ratio": 0.0,
        "rollout/length_reward_correlation": -1.0,  # the shorter of two got more
        "rollout/avg_response_length": 3.0,
        "rollout/truncated_ratio": 0.5,
        "rollout/repetition_frac": 0.0,
        "rollout/prompt_len/mean": 3.0,
        "rollout/prompt_len/max": 3.0,
        "rollout/prompt_len/min": 3.0,
        "rollout/avg_reward": 0.5,
        "rollout/rewards": 0.0,
        "rollout/rewards/std": 0.5,
        "rollout/rewards/max": 0.5,
        "rollout/rewards/min": -0.5,
    }


def test_every_component_of_the_rewards_has_its_mean_and_deviation():
    rewards = [{"score": 2.0, "exact": True, "a/b": 0.5, "pred": "4"}, {"score": 1.0, "exact": False, "a/b": None}]
    samples = [sample(0, rewards[0], group=0), sample(1, rewards[1], group=1)]  # type: ignore[arg-type]
    assert component_metrics("rollout/", samples, None) == {
        "rollout/reward/exact": 0.5,
        "rollout/reward/exact/std": 0.5,  # of 1 and 0
    }  # a/b has a number for one prompt only
    alone = component_metrics("rollout/", samples[:1], "exact")
    assert alone == {"rollout/reward/a_b": 0.5, "rollout/reward/a_b/std": 0.0,
                     "rollout/reward/score": 2.0, "rollout/reward/score/std": 0.0}  # fmt: skip
    assert component_metrics("rollout/", [sample(0, 1.0)], None) == {}


def test_components_of_an_agents_own_reward_are_kept_and_reported():
    agent = resolve([from_assignments(["rollout.custom_generate_function_path=agent.py:play"])]).settings
    rewards = [{"score": 1.5, "solved": 1.0, "tidy": 0.5}, {"score": 0.0, "solved": 0.0, "tidy": 0.0}]
    samples = [sample(i, reward, group=i) for i, reward in enumerate(rewards)]  # type: ignore[arg-type]
    scored = list(score(samples, Grader(agent), agent.score, executor=LocalExecutor()))
    assert [each.reward for each in scored] == rewards
    assert component_metrics("rollout/", scored, None) == {
        "rollout/reward/solved": 0.5, "rollout/reward/solved/std": 0.5,
        "rollout/reward/tidy": 0.25, "rollout/reward/tidy/std": 0.25,
    }  # fmt: skip


def test_what_track_asks_for_besides():
    asked = ["log_passrate=true", "log_multi_turn=true", "log_reward_category=topic", "log_correct_samples=true"]
    settings = resolve([from_assignments([f"track.{one}" for one in asked])]).settings
    samples = [
        sample(0, 1.0, length=5, loss_mask=[1, 1, 0, 0, 1], metadata={"topic": "sums"}),  # two turns, a tool between
        sample(1, 0.0, metadata={"topic": "sums"}),
        sample(2, 0.0, group=1, metadata={"topic": "a/b"}),
        sample(3, 0.0, group=1),
    ]
    found = round_metrics(samples, [1.0, 0.0, 0.0, 0.0], [1.0, -1.0, 0.0, 0.0], settings)
    assert (found["passrate/pass@1"], found["passrate/pass@2"]) == (0.25, 0.5)
    assert found["multi_turn/round_number/max"] == 2.0
    assert found["multi_turn/round_number/mean"] == 1.25
    assert found["multi_turn/raw_response_length/max"] == 5.0
    assert found["multi_turn/wo_obs_response_length/max"] == 3.0
    assert found["rollout/category/sums/share"] == 0.5
    assert found["rollout/category/sums/reward"] == 0.5
    assert found["rollout/category/a_b/share"] == 0.25
    assert found["rollout/category/none/share"] == 0.25
    assert found["rollout/correct_samples/count"] == 1.0
    assert found["rollout/correct_samples/response_len/mean"] == 5.0


def test_rewards_that_some_samples_lack_are_left_out():
    settings = resolve([]).settings
    found = round_metrics([sample(0, 1.0), sample(1, 0.0)], [1.0], [], settings)
    assert not [name for name in found if "reward" in name]


@pytest.mark.parametrize(
    ("text", "is_so"),
    [("again " * 2000, True), ("again " * 100, False), ("".join(map(str, range(4000))), False), ("", False)],
    ids=["long and the same", "short", "long and different", "empty"],
)
def test_repetition_is_looked_for_at_the_end_of_long_answers(text: str, is_so: bool):
    assert repeats(text) is is_so


def test_tokens_a_second_follow_from_samples_and_times():
    samples = [sample(0, 1.0, length=10), sample(1, 0.0, length=30)]  # 3 prompt tokens each
    found = dict(round_perf(samples, {"perf/rollout_time": 2.0, "perf/total_time": 4.0}, gpus=2))
    assert found == {
        "perf/tokens_per_gpu_per_sec": 10.0,  # 40 / 2 s / 2 GPUs
        "perf/longest_sample_tokens_per_sec": 15.0,
        "perf/tokens_per_sec": 11.5,  # 46 / 4 s
    }
    assert dict(round_perf(samples, {}, gpus=1)) == {}
    samples[1].non_generation_time = 0.5
    tools = {name.rpartition("/")[2]: value for name, value in round_perf(samples, {}, gpus=1)}
    assert tools == {"mean": 0.25, "max": 0.5, "min": 0.0}


def test_rewards_of_turns_are_told_by_number_and_states_by_the_size_of_their_groups():
    assert turn_metrics([sample(0, 1.0)]) == {}
    turns = [{"reward": 1.0, "state": "a"}, {"reward": 3.0, "state": "a"}]
    shared = {"reward": 5.0, "state": "b", "turn": 0}  # in two samples of an attempt
    found = turn_metrics([
        sample(0, 1.0, turn_rewards=turns), sample(1, 1.0, group=1, turn_rewards=turns[:1]),
        sample(2, 1.0, rollout_id=2, turn_rewards=[shared]), sample(3, 1.0, rollout_id=2, turn_rewards=[shared, 0.5]),
    ])  # fmt: skip
    assert found == {
        "rollout/turn_reward/0": pytest.approx((1 + 1 + 5) / 3),
        "rollout/turn_reward/1": pytest.approx((3 + 0.5) / 2),
        "rollout/state_groups": 3.0,  # a of group 0 twice, a of group 1, b
        "rollout/state_group_size/mean": pytest.approx(4 / 3),
        "rollout/state_group_size/max": 2.0,
        "rollout/state_group_size/min": 1.0,
    }
    assert set(turn_metrics([sample(0, 1.0, turn_rewards=[0.0] * 20)])) == {
        f"rollout/turn_reward/{n}" for n in range(16)
    }
