"""ROLL's names for the same quantities."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from slimectl import builders
from slimectl.data.metrics_catalogue import CATALOGUE, ROLL_NAMES, known
from slimectl.settings.loading import from_assignments, resolve
from slimectl.trackers.roll_names import roll_named

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
    [tracker] = builders.trackers(settings, tmp_path)
    tracker.log(ROUND, step=4)
    tracker.close()
    names = set(json.loads((tmp_path / "tracked.jsonl").read_text())["metrics"])
    assert wanted <= names
    assert not names & unwanted


@pytest.mark.usefixtures("capsys")  # stderr is no terminal
def test_the_words_on_the_terminal_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    settings = resolve([from_assignments(["track.naming=roll"])]).settings
    [tracker] = builders.trackers(settings, tmp_path)
    with caplog.at_level(logging.INFO, logger="slimectl"):
        tracker.log(ROUND, step=4)
    assert "reward 0.75" in caplog.text


def test_every_name_on_either_side_is_in_the_catalogue_under_its_naming():
    naming = {metric.name: metric.naming for metric in CATALOGUE}
    assert all(known(name) for name in ROLL_NAMES)
    assert {naming[name] for name in ROLL_NAMES.values()} == {"roll"}
    assert all(known(name) for name in roll_named({**ROUND, **EVALUATION}, prompts_per_round=8))
    assert len(set(ROLL_NAMES.values())) == len(ROLL_NAMES)
