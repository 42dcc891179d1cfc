"""A round of three samples in numbers."""

import numpy as np
import pytest

from slimectl.algorithms.metrics import (
    agent_metrics,
    correlation_within,
    count_failures,
    environment_metrics,
    mean_and_spread,
    quantiles,
    repeated_ngrams,
    response_metrics,
    rollout_metrics,
    standard_deviation,
    zero_std_groups,
)
from slimectl.types import Sample, Status


def sample(length: int, status: Status = Status.COMPLETED, **facts: object) -> Sample:
    return Sample(tokens=[1, *range(length)], response_length=length, status=status, **facts)


def test_lengths_rewards_and_failures_of_a_round():
    samples = [sample(2), sample(6, Status.TRUNCATED), sample(1, Status.FAILED, metadata={"error": "OSError: gone"})]
    assert rollout_metrics(samples, [0.5, 2.0]) == pytest.approx(
        {
            "rollout/response_len/mean": 3.0,
            "rollout/response_len/median": 2.0,
            "rollout/response_len/max": 6.0,
            "rollout/response_len/min": 1.0,
            "rollout/truncation_rate": 1 / 3,
            "rollout/raw_reward": 1.25,
            "rollout/max_reward": 2.0,
            "rollout/min_reward": 0.5,
            "rollout/std_reward": 0.75,
            "rollout/reward_quantiles/p10": 0.65,  # 0.5 + 0.1 * 1.5
            "rollout/reward_quantiles/p25": 0.875,
            "rollout/reward_quantiles/p50": 1.25,
            "rollout/reward_quantiles/p75": 1.625,
            "rollout/reward_quantiles/p90": 1.85,
            "rollout/error/OSError": 1.0,
        }
    )


def test_failures_are_counted_by_exception():
    failed = [
        sample(1, Status.FAILED, metadata={"error": said})
        for said in ("OSError: gone", "OSError: full", "KeyError: 'a'")
    ]
    assert count_failures("eval/aime/", [sample(2), *failed]) == {
        "eval/aime/error/KeyError": 1.0,
        "eval/aime/error/OSError": 2.0,
    }
    assert count_failures("eval/aime/", [sample(2)]) == {}


def test_what_the_engine_told_is_summed_before_it_is_divided():
    samples = [
        sample(
            2, rollout_log_probs=[-1.0, -9.0], loss_mask=[1, 0],
            prefix_cache_info={"total_prompt_tokens": 10, "cached_tokens": 4},
            spec_info={"spec_verify_ct": 2, "completion_token_num": 5, "spec_draft_token_num": 6,
                       "spec_accept_token_num": 3},
        ),
        sample(1, rollout_log_probs=[-2.0], prefix_cache_info={"total_prompt_tokens": 30, "cached_tokens": 0}),
    ]  # fmt: skip
    found = rollout_metrics(samples, [])
    assert found["rollout/rollout_log_probs"] == -1.5  # of the tokens -1 and -2; the masked one has no say
    assert found["rollout/prefix_cache_hit_rate"] == 0.1  # 4 of 40
    assert (found["rollout/spec_accept_length"], found["rollout/spec_accept_rate"]) == (2.5, 0.5)
    assert "rollout/raw_reward" not in found


def test_groups_that_agree_are_counted_by_their_reward():
    groups = [[1.0, 1.0], [0.0, 0.0, 0.0], [0.0, 0.0], [1.0, 0.0], [0.5]]
    assert zero_std_groups(groups) == {"rollout/zero_std/count_0": 2.0, "rollout/zero_std/count_1": 1.0}


def test_attempts_of_programs_are_averaged_and_branches_of_one_count_once():
    whole = {"exit_code": 0, "turn_count": 3, "tool_calls": 2, "timed_out": False}
    stopped = {"exit_code": -9, "turn_count": 1, "refused_requests": 1, "timed_out": True}
    attempts = [
        Sample(index=0, rollout_id=0, metadata={"agent": whole}),
        Sample(index=0, rollout_id=0, metadata={"agent": whole}),
        Sample(index=1, metadata={"agent": stopped}),
        Sample(index=2, status=Status.FAILED, metadata={"agent": {"exit_code": 0, "turn_count": 0}}),
        Sample(index=3, status=Status.FAILED, metadata={"agent": {"exit_code": 1, "turn_count": 0}}),
        Sample(index=4, metadata={"agent": "a word of the task's"}),
    ]
    assert agent_metrics(attempts) == {
        "rollout/agent/turns": 1.0, "rollout/agent/tool_calls": 0.5, "rollout/agent/refused_requests": 0.25,
        "rollout/agent/timed_out": 0.25, "rollout/agent/failed": 0.75,
    }  # fmt: skip
    assert agent_metrics(attempts[5:]) == {}


def test_episodes_are_averaged_and_their_turns_have_a_reward_each():
    report = {"turns": 3, "tool_calls": 2, "errors": 1, "failures": 1, "timeouts": 1, "rewards": [0.0, 0.5, 1.0]}
    episodes = [
        Sample(index=0, rollout_id=0, metadata={"env": report}),
        Sample(index=0, rollout_id=0, metadata={"env": report | {"player": 1, "rewards": [0.0, 0.0, -1.5]}}),
        Sample(index=1, metadata={"env": {"turns": 1, "rewards": [{"score": 1}]}}),
        Sample(index=2, metadata={"env": {"task": 7, "split": "train"}}),
    ]
    assert environment_metrics(episodes) == {
        "rollout/env/turns": 2.0, "rollout/env/tool_calls": 1.0, "rollout/env/errors": 0.5,
        "rollout/env/failures": 0.5, "rollout/env/timeouts": 0.5, "rollout/env/turn_reward": 0.0,
    }  # fmt: skip
    assert environment_metrics(episodes[3:]) == {}


def test_deviation_and_percentiles_are_those_of_numpy():
    values = [0.25, -3.0, 8.5, 2.0, 2.0, -0.125, 7.0]
    found = mean_and_spread("a", values) | quantiles("a", values)
    assert found["a/std"] == standard_deviation(values) == pytest.approx(np.std(values))
    for percentile in (10, 25, 50, 75, 90):
        assert found[f"a/p{percentile}"] == pytest.approx(np.percentile(values, percentile))
    assert quantiles("a", [4.0]) == {f"a/p{percentile}": 4.0 for percentile in (10, 25, 50, 75, 90)}


def test_responses_are_compared_within_groups():
    def sample(group: int, text: str, tokens: list[int]) -> Sample:
        return Sample(group_index=group, tokens=[0, *tokens], response_length=len(tokens), response=text)

    samples = [
        sample(0, "a", [1, 2, 1, 2, 1, 2, 1]),  # 1212 2121 1212 2121: two of four occurred before
        sample(0, "a", [1, 2, 3, 4, 5]),
        sample(1, "a", [1, 2, 3]),  # alone in its group, and too short for a 4-gram
    ]
    assert response_metrics(samples, [1.0, 0.0, 5.0]) == {
        "rollout/ngram_repetition": pytest.approx(2 / 6),
        "rollout/duplicate_ratio": 1.0,
        "rollout/length_reward_correlation": 1.0,
    }
    # Groups with lengths 1, 3 and 2, 2, 5. Centred: -1, 1, -1, -1, 2 and rewards -1/2, 1/2, 1/3, 1/3, -2/3.
    # Products: 1/2 + 1/2 - 1/3 - 1/3 - 4/3 = -1. Squares: 8, and 1/2 + 2/3 = 7/6.
    lengths, rewards = [1, 3, 2, 2, 5], [0.0, 1.0, 1.0, 1.0, 0.0]
    varied = [sample(i > 1, str(i), [1] * length) for i, length in enumerate(lengths)]
    correlation = response_metrics(varied, rewards)["rollout/length_reward_correlation"]
    assert correlation == pytest.approx(-1 / (8 * 7 / 6) ** 0.5)
    assert response_metrics(varied, [1.0] * 5)["rollout/length_reward_correlation"] == 0.0
    assert response_metrics(samples[2:], [1.0]) == {"rollout/ngram_repetition": 0.0}


def test_repeated_ngrams_of_two_sequences_by_hand():
    # 12 23 are distinct, 11 11 11 is one: 3 of 5 are distinct.
    assert repeated_ngrams([[1, 2, 3], [1, 1, 1, 1]], n=2) == pytest.approx(0.4)
    assert repeated_ngrams([[1, 2, 3]], n=4) == 0.0


def test_correlation_within_groups_by_hand():
    # Deviations (-1, -.5) (1, .5) and (-2, 0) (0, -1) (2, 1): products 3, squares 10 and 2.5, so 3 / sqrt(25).
    groups = [[(0.0, 0.0), (2.0, 1.0)], [(0.0, 1.0), (2.0, 0.0), (4.0, 2.0)]]
    assert correlation_within(groups) == pytest.approx(0.6)
