"""ROLL's names for the same quantities."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from slimectl.data.metrics_catalogue import CATALOGUE, ROLL_NAMES, known
from slimectl.runtime import builders
from slimectl.settings.layers import from_assignments
from slimectl.settings.loading import resolve
from slimectl.trackers.roll_names import Renamed, roll_named

ROUND = {
    "train/lr": 0.5,
    "train/ppo_kl": 0.25,
    "train/ratio_high_clipfrac": 0.0625,
    "train/ratio_low_clipfrac": 0.125,
    "train/step": 4.0,
    "rollout/raw_reward": 0.75,
    "rollout/step": 2.0,
    "rollout/repetition_frac": 0.125,
}
EVALUATION = {
    "eval/aime": 0.5, "eval/aime_max_reward": 1.0, "eval/aime_min_reward": 0.0, "eval/aime_samples": 30.0,
    "eval/math": 0.25, "eval/math_max_reward": 2.0, "eval/math_min_reward": -1.0, "eval/math_samples": 10.0,
    "eval/math_accuracy": 0.125, "eval/step": 3.0,
}  # fmt: skip


def test_a_round_is_told_in_rolls_words():
    assert roll_named(ROUND, prompts_per_round=8) == {
        "actor/lr": 0.5,
        "actor/policykl": -0.25,  # the mean of present minus old: ours is old minus present
        "actor/ppo_ratio_high_clipfrac": 0.0625,
        "actor/ppo_ratio_low_clipfrac": 0.125,
        "actor/ppo_ratio_clipfrac": 0.1875,
        "critic/score/mean": 0.75,
        "system/samples": 16.0,  # two rounds of eight prompts
        "train/step": 4.0,
        "rollout/step": 2.0,
    }


def test_phases_are_told_whole_and_in_their_parts():
    found = roll_named(
        {
            "perf/actor_train_time": 3.0, "perf/critic_train_time": 1.0, "perf/generate_time": 8.0,
            "perf/engine_onload_time": 0.5, "perf/engine_offload_time": 0.25, "perf/log_probs_time": 2.0,
            "perf/ref_log_probs_time": 1.5, "perf/values_time": 1.0, "perf/advantages_time": 0.125,
            "memory/cpu/generate/start/rss": 1.0,
        },
        prompts_per_round=8,
    )  # fmt: skip
    parts = ("execute", "onload", "offload", "total")
    assert [found[f"time/train_step/{part}"] for part in parts] == [4.0, 0.0, 0.0, 4.0]
    assert [found[f"time/generate/{part}"] for part in parts] == [8.0, 0.5, 0.25, 8.75]
    assert found["time/compute_log_probs/total"] == 3.5
    assert found["time/ref_log_probs_values_reward"] == 1.5
    assert found["time/old_log_probs_values"] == 3.0
    assert found["time/adv"] == 0.125
    assert found["memory/cpu/generate/start/rss"] == 1.0
    assert not any("do_checkpoint" in name for name in found)


def test_rewards_are_those_less_the_divergence_where_it_is_charged():
    rewards = {"rollout/rewards": 0.5, "rollout/rewards/max": 1.0}
    charged = {"rollout/penalized_rewards": 0.25, "rollout/penalized_rewards/max": 0.75}
    assert roll_named(rewards, prompts_per_round=8) == {"critic/rewards/mean": 0.5, "critic/rewards/max": 1.0}
    found = roll_named(rewards | charged, prompts_per_round=8)
    assert found == {"critic/rewards/mean": 0.25, "critic/rewards/max": 0.75}


def test_the_rate_of_tokens_is_that_of_the_last_five_rounds():
    class Last:
        def log(self, metrics: Mapping[str, float], *, step: int) -> None:
            self.metrics = metrics

    last: Any = Last()
    tracker = Renamed(last, keep_slime_names=False, prompts_per_round=8)
    for step, (rate, seconds) in enumerate([(1000.0, 9.0), (10.0, 1.0), (10.0, 1.0), (10.0, 1.0), (10.0, 1.0)]):
        tracker.log({"perf/tokens_per_sec": rate, "perf/total_time": seconds}, step=step)
    assert last.metrics["system/tps"] == 9040 / 13
    tracker.log({"perf/tokens_per_sec": 40.0, "perf/total_time": 6.0}, step=5)
    assert last.metrics["system/tps"] == 280 / 10  # the round of 9000 tokens is past


def test_scores_of_several_datasets_weigh_by_their_answers():
    found = roll_named(EVALUATION, prompts_per_round=8)
    assert found["val/score/mean"] == pytest.approx((30 * 0.5 + 10 * 0.25) / 40)
    assert (found["val/score/max"], found["val/score/min"]) == (2.0, -1.0)
    assert (found["val/aime/score/mean"], found["val/math/score/min"]) == (0.5, -1.0)


@pytest.mark.parametrize(
    ("naming", "wanted", "unwanted"),
    [
        ("slime", {"rollout/raw_reward", "train/lr"}, {"critic/score/mean"}),
        ("roll", {"critic/score/mean", "actor/lr", "train/step"}, {"rollout/raw_reward", "train/lr"}),
        ("both", {"critic/score/mean", "rollout/raw_reward", "rollout/repetition_frac"}, set()),
    ],
)
def test_trackers_get_the_names_that_are_asked_for(tmp_path: Path, naming: str, wanted: set[str], unwanted: set[str]):
    settings = resolve([from_assignments(["track.with=['jsonl']", f"track.naming={naming}"])]).settings
    [tracker] = builders.start_trackers(settings, tmp_path)
    tracker.log(ROUND, step=4)
    tracker.close()
    names = set(json.loads((tmp_path / "tracked.jsonl").read_text())["metrics"])
    assert wanted <= names
    assert not names & unwanted


@pytest.mark.usefixtures("capsys")  # stderr is no terminal
def test_the_words_on_the_terminal_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    settings = resolve([from_assignments(["track.with=['stdout','jsonl']", "track.naming=roll"])]).settings
    tracker, _ = builders.start_trackers(settings, tmp_path)
    with caplog.at_level(logging.INFO, logger="slimectl"):
        tracker.log(ROUND, step=4)
    assert "reward 0.75" in caplog.text


def test_every_name_on_either_side_is_in_the_catalogue_under_its_naming():
    naming = {metric.name: metric.naming for metric in CATALOGUE}
    assert all(known(name) for name in ROLL_NAMES)
    assert {naming[name] for name in ROLL_NAMES.values()} == {"roll"}
    assert all(known(name) for name in roll_named({**ROUND, **EVALUATION}, prompts_per_round=8))
    assert len(set(ROLL_NAMES.values())) == len(ROLL_NAMES)
