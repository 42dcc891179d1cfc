"""Rounds whose rewards teach nothing: what counts as one, and what a run and a training say about them."""

from __future__ import annotations

import json

import pytest
from workshop import Workshop

from slimectl.algorithms.estimators import TrainingBatch
from slimectl.settings import Settings
from slimectl.settings.checks import conflicts
from slimectl.stages.hooks import NO_HOOKS, Hooks
from slimectl.stages.signal import SignalCount, missing_signal
from slimectl.types import Sample, Status, TrainingSample

GROUPS = [0, 0, 1, 1]


def batch(rewards: list[float], advantages: list[float], *, compared: bool = False) -> TrainingBatch:
    """Two prompts with two answers of one token each; an advantage for each row, of which there may be fewer."""
    samples = [Sample(group_index=group, index=i, reward=rewards[i]) for i, group in enumerate(GROUPS[: len(rewards)])]
    rows = [TrainingSample([1, 2], 1, [1.0], advantages=[value]) for value in advantages]
    return TrainingBatch(rows, list(range(len(rows))), samples=samples, rewards=rewards, compared=compared)


def settings(**algorithm: object) -> Settings:
    return Settings.model_validate({"algorithm": {"name": "grpo"} | algorithm})


@pytest.mark.parametrize(
    ("rewards", "advantages", "reason"),
    [
        ([0.0, 0.0, 0.0, 0.0], [], "every reward was 0"),
        ([0.5, 0.5, 0.5, 0.5], [0.0, 0.0, 0.0, 0.0], "every reward was 0.5"),
        ([1.0, 1.0, 0.0, 0.0], [], "the rewards of every group were equal"),
        ([1.0, 1.0, 0.0, 0.0], [1e-17, 1e-17, 0.0, 0.0], "the rewards of every group were equal"),
        ([1.0, 0.0, 0.0, 0.0], [1.0, -1.0], ""),
    ],
)
def test_a_round_of_groups_teaches_if_the_rewards_of_some_group_differ(
    rewards: list[float], advantages: list[float], reason: str
) -> None:
    assert missing_signal(batch(rewards, advantages), settings(), NO_HOOKS) == reason


@pytest.mark.parametrize(
    ("reward", "cut", "reason", "remedy"),
    [
        (1.0, 0, "every reward was 1: the prompts are too easy", "Train on harder prompts"),
        (0.0, 4, "every reward was 0, and 100 % of the responses reached rollout.max_response_len",
         "Raise rollout.max_response_len"),
        (0.0, 3, "every reward was 0", "look"),
        (1.0, 4, "every reward was 1: the prompts are too easy", "Train on harder prompts"),
    ],
)  # fmt: skip
def test_prompts_that_are_too_easy_and_responses_that_are_cut_have_their_own_sentence(
    reward: float, cut: int, reason: str, remedy: str
) -> None:
    equal = batch([reward] * 4, [])
    for i, sample in enumerate(equal.samples):
        sample.status = Status.TRUNCATED if i < cut else Status.COMPLETED
    assert missing_signal(equal, settings(), NO_HOOKS) == reason
    count = SignalCount()
    count.add(reason)
    assert count.remedy("look").startswith(remedy)


def test_without_comparison_in_groups_equal_rewards_of_a_round_teach_nothing() -> None:
    alone = settings(name="reinforce_plus_plus")
    assert missing_signal(batch([1.0, 1.0, 0.0, 0.0], [1.0, 1.0, -1.0, -1.0]), alone, NO_HOOKS) == ""
    assert missing_signal(batch([0.0] * 4, [0.3, -0.3, 0.1, -0.1]), alone, NO_HOOKS) == "every reward was 0"
    assert missing_signal(batch([1.0], [1.0]), alone, NO_HOOKS) == ""  # nothing to be equal to


def test_turns_teach_although_the_attempts_got_the_same() -> None:
    equal = batch([1.0] * 4, [0.3, -0.3, 0.0, 0.0])
    assert missing_signal(equal, settings(name="turn_grpo"), NO_HOOKS) == ""
    assert missing_signal(batch([1.0] * 4, [0.0] * 4), settings(name="turn_grpo"), NO_HOOKS).startswith("every reward")
    [line] = conflicts(settings(name="gigpo", drop_zero_std_groups=True))
    assert line.startswith("algorithm.drop_zero_std_groups: groups of equal rewards still have turns that differ")


def test_a_teacher_or_a_function_of_the_users_teaches_without_rewards() -> None:
    same = batch([0.0] * 4, [0.3, -0.3, 0.1, -0.1])
    taught = settings(name="opd", opd_kl_coef=1.0, opd_teacher_url=["http://127.0.0.1:1"])
    assert missing_signal(same, taught, NO_HOOKS) == ""
    assert missing_signal(same, settings(), Hooks(advantages=lambda rows, samples, rewards: None)) == ""
    assert missing_signal(same, settings(name="sft"), NO_HOOKS) == ""


def test_a_teacher_that_scored_no_sample_teaches_nothing() -> None:
    unscored = batch([0.0] * 4, [0.0] * 4)
    for row in unscored.rows:
        row.teacher_weight = 0.0
    shown = {"opd_self_teacher": "current", "opd_teacher_template": "{demonstration} {prompt}", "opd_top_k": 4}
    for divergence in ("token", "jsd"):
        taught = settings(name="opd", opd_divergence=divergence, **shown)
        reason = "no sample had all fields of algorithm.opd_teacher_template"
        assert missing_signal(unscored, taught, NO_HOOKS) == reason
        assert missing_signal(batch([0.0] * 4, [0.1] * 4), taught, NO_HOOKS) == ""
    mixed = settings(opd_kl_coef=1.0, opd_divergence="jsd", **shown)
    assert missing_signal(unscored, mixed, NO_HOOKS) == "every reward was 0"


def test_rounds_are_counted_in_all_and_in_a_row() -> None:
    count = SignalCount()
    for reason in ("every reward was 0", "", "every reward was 1", "every reward was 1"):
        count.add(reason)
    assert (count.rounds, count.without, count.in_a_row) == (4, 3, 2)
    assert count.closing_message("look") == "no learning signal in 3 of 4 rounds: every reward was 1. look"
    count.add(""), count.add("")
    assert count.closing_message("look") == ""  # half of the rounds taught something


NOTHING = ("-s", "score.custom_rm_path=none", "-s", "score.rm_type=exact", "-s", "eval.interval=none")
"""No answer of an untrained model is exactly its label."""


def test_a_run_that_learns_nothing_says_so_every_round_and_at_its_end(workshop: Workshop) -> None:
    workshop.slimectl("run", *NOTHING, "--name", "b", "-s", "run.num_rollout=2", "-s", "run.keep_samples=false")
    lines = [line for line in workshop.stderr.splitlines() if line.startswith("step") and "reward" in line]
    assert [line.endswith("no signal") for line in lines] == [True, True], workshop.stderr
    steps = [line["metrics"] for line in workshop.metrics("b") if "rollout/step" in line["metrics"]]
    assert [metrics["rollout/no_signal"] for metrics in steps] == [1.0, 1.0]
    assert "no learning signal in 2 of 2 rounds: every reward was 0. Look at rewards with: " in workshop.stderr
    assert "slimectl rollout -c runs/b/run.toml --model runs/b/latest -o samples.jsonl" in workshop.stderr
    assert "slimectl score samples.jsonl -c runs/b/run.toml --explain" in workshop.stderr


@pytest.mark.slow
def test_a_run_stops_after_so_many_rounds_without_signal_and_after_a_resume_at_once(workshop: Workshop) -> None:
    stop = ("-s", "run.on_no_signal=stop", "-s", "run.no_signal_rounds=2", "-s", "run.save_interval=none")
    workshop.slimectl("run", *NOTHING, *stop, "--name", "b", code=1)
    assert "no learning signal in 2 rounds in a row: every reward was 0" in workshop.stderr
    state = json.loads((workshop.folder / "runs/b/step_000002/state.json").read_text())
    assert state["signal"] == {"rounds": 2, "without": 2, "in_a_row": 2, "reason": "every reward was 0"}
    # The command that the message names explains a sample of that round.
    assert "slimectl score runs/b/step_000002/samples.jsonl -c runs/b/run.toml --explain" in workshop.stderr
    out = workshop.slimectl(
        "score", "runs/b/step_000002/samples.jsonl", "-c", "runs/b/run.toml", "--explain", "-o", "explained.jsonl"
    )
    assert out == b""
    assert "reward 0: 16 samples" in workshop.stderr
    workshop.slimectl("run", "--resume", "runs/b", code=1)
    assert "no learning signal in 3 rounds in a row" in workshop.stderr


@pytest.mark.slow
def test_a_training_that_learns_nothing_says_so_and_stops_where_asked(workshop: Workshop) -> None:
    toml = ("-c", "slimectl.toml")
    workshop.slimectl("rollout", *toml, "-o", "s.jsonl")
    workshop.slimectl("score", "s.jsonl", *toml, "-o", "equal.jsonl", *NOTHING[:4])
    training = ("train", "equal.jsonl", *toml, "-s", "run.rollout_batch_size=2")
    out = workshop.slimectl(*training)
    assert [json.loads(line)["metrics"]["rollout/no_signal"] for line in out.splitlines()] == [1.0] * 4
    reason = "every reward was 0, and 100 % of the responses reached rollout.max_response_len. "
    assert f"no learning signal in 4 of 4 rounds: {reason}" in workshop.stderr
    stop = ("-s", "run.on_no_signal=stop", "-s", "run.no_signal_rounds=3")
    assert len(workshop.slimectl(*training, *stop, code=1).splitlines()) == 3
    assert "no learning signal in 3 rounds in a row" in workshop.stderr


def test_a_run_that_learns_says_nothing_about_signal(workshop: Workshop) -> None:
    workshop.slimectl("run", "--name", "b", "-s", "run.num_rollout=1", "-s", "eval.interval=none")
    assert "signal" not in workshop.stderr
    assert "nothing" not in workshop.stderr
