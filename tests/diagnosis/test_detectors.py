"""Every detector on records that a person can follow: the round in which its finding begins, and what it says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from slimectl.diagnosis import Diagnosis, Finding
from slimectl.diagnosis.catalogue import DETECTORS

ROUNDS = 40
FAULT = 21
"""First round with the fault."""
HEALTHY = {
    "rollout/raw_reward": 0.5, "rollout/min_reward": 0.0, "rollout/max_reward": 1.0, "rollout/truncated_ratio": 0.1,
    "rollout/entropy": 1.0, "rollout/response_len/mean": 100.0, "rollout/response_len/median": 100.0,
    "rollout/response_len/max": 200.0, "rollout/advantages": 0.0, "rollout/advantages/std": 1.0,
    "rollout/staleness/mean": 0.0, "rollout/staleness/max": 0.0, "rollout/zero_std/count_1": 2.0,
    "rollout/zero_std/count_0": 2.0, "train/grad_norm": 1.0, "train/lr": 1e-4, "train/pg_clipfrac": 0.0,
    "train/ratio_max": 1.0, "train/ratio_high_clipfrac": 0.0, "train/ratio_low_clipfrac": 0.0, "train/approxkl": 0.0,
    "train/train_rollout_logprob_abs_diff": 0.002, "train/kl_loss": 0.01, "train/step": 1.0,
    "rollout/reward/exact": 0.4, "rollout/reward/exact/std": 0.4, "rollout/reward/form": 0.1,
    "rollout/reward/form/std": 0.1,
}  # fmt: skip
TIMES = {
    "perf/total_time": 10.0, "perf/wait_time": 2.0, "perf/generate_time": 2.0, "perf/reward_time": 0.5,
    "perf/actor_train_time": 5.0, "perf/log_probs_time": 1.0, "perf/update_weights_time": 0.5, "perf/mfu": 0.3,
    "perf/gpu_memory_allocated_gb": 40.0, "perf/gpu_memory_used_ratio": 0.8, "perf/memory_used_ratio": 0.5,
    "perf/disk_free_gb": 500.0, "perf/disk_used_ratio": 0.5,
}  # fmt: skip
SETTINGS = {
    "run.num_rollout": ROUNDS, "run.rollout_batch_size": 16, "run.no_signal_rounds": 10, "train.lr": 1e-4,
    "run.max_logprob_mismatch": 0.1, "rollout.n_samples_per_prompt": 8, "rollout.max_response_len": 200,
    "eval.success_threshold": 1.0, "algorithm.eps_clip": 0.2, "algorithm.grpo_std_normalization": True,
    "engine.backend": "vllm", "score.timeout_s": 5.0, "eval.interval": 5,
}  # fmt: skip
Fault = dict[str, float] | Callable[[int], dict[str, float]]


def records(fault: Fault, rounds: int = ROUNDS) -> Iterator[dict[str, Any]]:
    """Lines of a run whose values are healthy, with a little noise in the reward, and of the fault from FAULT on."""
    for number in range(1, rounds + 1):
        values = HEALTHY | TIMES
        values["rollout/raw_reward"] += 0.004 * (number % 2)
        if number >= FAULT:
            values |= fault(number) if callable(fault) else fault
        of_perf = {name: value for name, value in values.items() if name.startswith("perf/")}
        of_metrics = {name: value for name, value in values.items() if name not in of_perf}
        yield {"step": number, "rollout_id": number, "weight_version": str(number), "metrics": of_metrics}
        yield {"step": number, "metrics": of_perf}


def begun(lines: Iterator[dict[str, Any]] | Sequence[dict[str, Any]], **settings: Any) -> dict[str, Finding]:
    """The findings that begin, by kind, with the round in which they are reported as `last_round`."""
    values = SETTINGS | {name.replace("__", "."): value for name, value in settings.items()}
    diagnosis, found, number = Diagnosis(values, Path("runs/a")), {}, 0
    for line in lines:
        number = line.get("rollout_id", number)
        for finding in diagnosis.observe(line):
            if finding.lasts:
                found.setdefault(finding.kind, (number, finding))
    return found


NO_SIGNAL = {"rollout/no_signal": 1.0, "rollout/min_reward": 0.0, "rollout/max_reward": 0.0}
FAULTS: list[tuple[str, Fault, int, str, dict[str, Any]]] = [
    # kind, values from round 21 on, round of the report, part of the title, settings
    ("no-signal", NO_SIGNAL, 23, "every reward is 0", {}),
    ("no-signal", NO_SIGNAL, 21, "every reward is 0", {"run__no_signal_rounds": 1}),
    ("no-signal", {"rollout/no_signal": 1.0}, 23, "the rewards of every group are equal", {}),
    ("vanishing-signal", {"rollout/zero_std/count_0": 14.0}, 25, "16 of 16 groups have equal rewards", {}),
    ("all-solved", {"rollout/zero_std/count_1": 15.0}, 25, "in 15 of 16 groups", {}),
    ("reward-collapse", {"rollout/raw_reward": 0.2}, 23, "The mean reward collapsed: it was 0.50", {}),
    ("advantages", {"rollout/advantages/std": 4.0}, 25, "their deviation 4", {}),
    ("diverging", {"train/grad_norm": 9.0}, 25, "gradient norm is 9, and was 1", {}),
    ("entropy-collapse", {"rollout/entropy": 0.05}, 23, "is 0.05 nat, and was 1", {}),
    ("entropy-explosion", {"rollout/entropy": 4.5}, 23, "is 4.5 nat, and was 1", {}),
    ("entropy-explosion", {"rollout/entropy": 2.5, "rollout/raw_reward": 0.4}, 23, "is 2.5 nat", {}),
    # From round 28 on the mean of five rounds is above 1.5 and more than 1.3 times that of the five before.
    ("kl-growth", lambda n: {"train/kl_loss": 0.1 * (n - 20) ** 1.5}, 30, "keeps rising", {}),
    ("kl-growth", {"train/approxkl": 0.6}, 23, "0.6 nat² per token", {}),
    ("ratio-growth", {"train/ratio_max": 300.0}, 23, "300 times as likely", {}),
    ("gradient-spikes", lambda n: {"train/grad_norm": 30.0 if n % 4 == 0 else 1.0}, 32, "up to 30, 30 times", {}),
    ("clip-fraction", {"train/pg_clipfrac": 0.4}, 23, "40% of the tokens", {}),
    ("clip-fraction", {"train/ratio_high_clipfrac": 0.5, "train/ratio_low_clipfrac": 0.4}, 23, "90%", {}),
    ("learning-rate-zero", {"train/lr": 0.0}, 22, "is 0, and 18 rounds remain", {}),
    ("frozen", {"train/grad_norm": 0.0}, 23, "the gradient norm is 0", {}),
    ("frozen", {"train/grad_norm": 0.02}, 23, "its norm is 0.02, and was 1 at the same entropy", {}),
    ("length-growth", {"rollout/response_len/mean": 260.0}, 23, "260 tokens, and 100 at the start", {}),
    ("length-shrinkage", {"rollout/response_len/mean": 40.0}, 23, "40 tokens, and 100 at the start", {}),
    ("reward-follows-length", {"rollout/length_reward_correlation": 0.95}, 25, "longer responses get more", {}),
    ("truncation", {"rollout/truncated_ratio": 0.7}, 23, "70% of the responses are cut", {}),
    ("duplicates", {"rollout/duplicate_ratio": 1.0, "rollout/raw_reward": 0.3}, 23, "100% of the responses repeat", {}),
    ("duplicates", {"rollout/duplicate_ratio": 1.0}, 23, "at an entropy of 1 nat", {}),
    ("repetition", {"rollout/ngram_repetition": 0.8}, 23, "80% of their 4-grams", {}),
    ("verifier-timeouts", {"rollout/reward_timeouts": 0.1}, 22, "Grading of 10% of the samples", {}),
    ("verifier-errors", {"rollout/error/HookError": 32.0}, 22, "32 attempts failed", {}),  # of 128
    ("component-dominates", {"rollout/reward/form/std": 0.004}, 25, "component exact decides alone", {}),
    ("mismatch", {"train/train_rollout_logprob_abs_diff": 0.2}, 22, "differ by 0.2 nat per token, 100 times", {}),
    ("mismatch", {"train/train_rollout_logprob_abs_diff": 0.15}, 22, "differ by 0.15 nat per token",
     {"rollout__repetition_penalty": 1.5}),
    ("mismatch", {"train/train_rollout_logprob_abs_diff": 0.008}, 22, "0.008 nat",
     {"engine__backend": "auto", "engine__dtype": "float32", "train__dtype": "float32"}),
    ("staleness", {"rollout/staleness/mean": 4.0}, 23, "4.0 weight versions old, and settings explain 1",
     {"run__async_level": 1}),
    # 4 s per round after 40 s in twenty rounds: 60 s are lost in round 25, and the finding needs three rounds.
    ("waiting", {"perf/wait_time": 9.0}, 25, "in 90% of the time", {"engine__backend": "embedded"}),
    ("waiting", {"perf/wait_time": 4.0}, 27, "waits for samples in 40% of the time", {}),
    ("slow-grader", {"perf/reward_time": 5.0}, 23, "Grading takes 50% of the time, 5 s per round", {}),
    ("slow-log-probs", {"perf/log_probs_time": 6.0, "perf/actor_train_time": 3.0}, 23, "take 60% of the time", {}),
    ("slow-push", {"perf/update_weights_time": 8.0}, 27, "takes 80% of the time", {}),
    ("straggler", {"perf/slowest_rank_ratio": 2.0, "perf/slowest_rank": 3.0}, 23, "rank 3, which takes 2.0", {}),
    ("straggler", {"rollout/response_len/max": 900.0, "perf/generate_time": 6.0, "perf/wait_time": 6.0}, 26,
     "900 tokens, and the median is 100", {}),
    ("memory", {"perf/gpu_memory_used_ratio": 0.97}, 23, "a training GPU is nearly full: 97%", {}),
    ("disk", {"perf/disk_used_ratio": 0.96, "perf/disk_free_gb": 2.0}, 21, "2 GiB left", {}),
    # Round 32: 300 GiB in 15 rounds (500 in the middle of 13 to 17, 200 in that of 28 to 32), 140 left, 8 rounds to go.
    ("disk", lambda n: {"perf/disk_free_gb": 500.0 - 30 * (n - 20)}, 32, "full in about 7 rounds", {}),
    ("out-of-memory", {"perf/pack_splits": 2.0}, 21, "2 packs of the round were split", {}),
    ("low-utilization", {"perf/mfu": 0.02}, 23, "2.0% of the GPU's peak", {}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "fault", "number", "title", "settings"), FAULTS, ids=[row[0] for row in FAULTS])
def test_a_fault_is_found(kind: str, fault: Fault, number: int, title: str, settings: dict[str, Any]):
    found = begun(records(fault), **settings)
    reported, finding = found[kind]
    assert title in finding.title
    assert (reported, finding.first_round >= FAULT) == (number, True)
    assert all(evidence.values for evidence in finding.evidence)
    assert finding.evidence
    assert not any("{" in text for text in (*finding.causes, *finding.remedies, *finding.commands))


def test_healthy_records_have_no_findings():
    assert begun(records({})) == {}


def test_every_detector_has_a_fault_here():
    of_evaluations = {detector.kind for detector in DETECTORS if detector.after == "evaluation"}
    tested = {kind for kind, *_ in FAULTS} | of_evaluations | {"flat-reward", "checkpoints", "stopped"}
    assert {detector.kind for detector in DETECTORS} == tested


def test_a_finding_ends_when_its_trouble_is_over():
    diagnosis = Diagnosis(SETTINGS, Path("runs/a"))
    changes = [
        (line.get("step"), finding)
        for line in records(lambda n: {"rollout/truncated_ratio": 0.7 if n < 30 else 0.1})
        for finding in diagnosis.observe(line)
    ]
    assert [(step, finding.kind, finding.first_round, finding.last_round) for step, finding in changes] == [
        (23, "truncation", 21, None),
        (32, "truncation", 21, 29),  # after three rounds without it
    ]
    assert [finding.last_round for finding in diagnosis.findings] == [29]
    assert diagnosis.findings[0].place == "rounds 21 to 29"


def test_a_reward_that_stays_flat_with_signal_is_found_after_sixty_rounds():
    reported, finding = begun(records({}, rounds=70))["flat-reward"]
    assert reported == 62
    assert "after 62 rounds, with signal" in finding.title
    rising = records(lambda n: {"rollout/raw_reward": 0.5 + 0.002 * n}, rounds=70)
    assert begun(rising) == {}


def test_checkpoints_that_take_most_of_the_time_are_found():
    saves = [line for lines in zip(*[records({})] * 2, strict=True) for line in (*lines, {
        "step": lines[0]["step"], "metrics": {"perf/save_model_time": 8.0}})]  # fmt: skip
    # 60 s are reached with the eighth save, which the ninth round sees.
    reported, finding = begun(saves)["checkpoints"]
    assert reported == 9
    assert "takes 42% of the time" in finding.title  # 64 of 64 + 90


def evaluated(
    values: Sequence[float], rewards: Sequence[float], *, name: str, error: float
) -> Iterator[dict[str, Any]]:
    """Five rounds of each reward, with an evaluation before the first and after each five."""
    for place, value in enumerate(values):
        metrics = {name: value, f"{name}_stderr": error}
        yield {"step": 5 * place, "rollout_id": 5 * place, "metrics": metrics}
        for number in range(5 * place + 1, 5 * place + 6) if place < len(rewards) else ():
            reward = rewards[place] + 0.001 * (number % 2)
            yield {"step": number, "rollout_id": number, "metrics": {"rollout/raw_reward": reward}}
            yield {"step": number, "metrics": {"perf/total_time": 1.0}}


@pytest.mark.parametrize(
    ("values", "rewards", "number"),
    [
        ((0.5, 0.5, 0.51), (0.3, 0.9), 10),  # the reward gains 0.6, of which the evaluation shows nothing
        ((0.5, 0.4, 0.3), (0.3, 0.5), 10),  # it falls
        ((0.5, 0.6, 0.7), (0.3, 0.9), None),
        ((0.5, 0.5, 0.5), (0.3, 0.3), None),  # both flat
    ],
)
def test_a_reward_that_rises_alone_is_gamed(values: Sequence[float], rewards: Sequence[float], number: int | None):
    found = begun(evaluated(values, rewards, name="eval/small_avg_reward", error=0.01))
    assert found.get("gaming", (None,))[0] == number


def test_an_evaluation_that_reaches_zero_is_compared_by_its_earlier_error():
    lines = list(evaluated((0.2, 0.2, 0.0), (0.3, 0.5), name="eval/small_avg_reward", error=0.02))
    lines[-1]["metrics"]["eval/small_avg_reward_stderr"] = 0.0  # all responses are wrong, so they do not differ
    assert begun(lines)["gaming"][0] == 10


def test_an_evaluation_that_never_gains_in_60_rounds_is_flat():
    accuracies = (0.5, *[0.49, 0.5] * 6)  # at rounds 0, 5, … 60
    flat = begun(evaluated(accuracies, [0.5] * 13, name="eval/small_accuracy", error=0.01))
    assert flat["flat-evaluation"][0] == 60
    better = (*accuracies[:6], 0.52, *accuracies[7:])
    assert "flat-evaluation" not in begun(evaluated(better, [0.5] * 13, name="eval/small_accuracy", error=0.01))


@pytest.mark.parametrize(
    ("accuracies", "error", "best"),
    [
        # The reported case: the accuracy was there and is gone.
        ((0.875, 0.938, 0.0), 0.03, "0.938 at round 5"),
        ((0.2, 0.9, 0.5), 0.03, None),  # more than half of 0.9 is left
        ((0.2, 0.9, 0.4), 0.03, None),  # more than a quarter is left, and the next evaluation may be better
        ((0.9, 0.4, 0.4), 0.03, "0.9 at round 0"),
        ((0.2, 0.06, 0.02), 0.06, None),  # 0.18 is less than two standard errors of both: 0.24
    ],
)
def test_an_accuracy_that_was_there_and_is_gone(accuracies: Sequence[float], error: float, best: str | None):
    found = begun(evaluated(accuracies, [0.5] * 3, name="eval/words_accuracy", error=error))
    assert ("evaluation-collapse" in found) == (best is not None)
    if best is not None:
        assert f"The accuracy on words collapsed: it was {best} and is 0" in found["evaluation-collapse"][1].title


@pytest.mark.parametrize(("averages", "is_collapse"), [((0.6, 0.6, 0.6), False), ((0.6, 0.3, 0.3), True)])
def test_an_accuracy_that_falls_while_answers_are_nearly_right(averages: Sequence[float], is_collapse: bool):
    lines = list(evaluated((0.9, 0.1, 0.1), [0.5] * 3, name="eval/words_accuracy", error=0.03))
    evaluations = [line["metrics"] for line in lines if "eval/words_accuracy" in line["metrics"]]
    for metrics, average in zip(evaluations, averages, strict=True):
        metrics |= {"eval/words_avg_reward": average, "eval/words_avg_reward_stderr": 0.02}
    assert ("evaluation-collapse" in begun(lines)) == is_collapse


@pytest.mark.parametrize(
    ("rewards", "collapse"),
    [
        # Means of three rounds: 0.8 at rounds 1 to 3, and 0.8 / 3 at rounds 4 to 6.
        ([0.8, 0.9, 0.7, 0.5, 0.1, 0.2, 0.0], "it was 0.8 at round 2 and is 0.267"),  # after six rounds
        ([0.8, 0.9, 0.7, 0.5, 0.5, 0.4, 0.6], None),  # 0.5 is more than half of 0.8
        ([0.0, 0.1, 0.9, 0.8, 0.1, 0.0, 0.1], None),  # the best three, 0.1 0.9 0.8, are not all above the last
        ([-1.0, 2.0, 2.0, 2.0, -0.5, -0.5, -0.5], "it was 2 at round 3 and is -0.5"),  # low is -1
        ([0.8, 0.8, 0.8, 0.0, 0.0], None),  # too short to tell
        ([0.1] * 9, None),
    ],
)
def test_a_reward_that_was_there_and_is_gone(rewards: list[float], collapse: str | None):
    lines = [
        line
        for number, reward in enumerate(rewards, 1)
        for line in (
            {"step": number, "rollout_id": number, "metrics": {"rollout/raw_reward": reward}},
            {"step": number, "metrics": {"perf/total_time": 1.0}},
        )
    ]
    found = begun(lines)
    assert ("reward-collapse" in found) == (collapse is not None)
    if collapse is not None:
        assert collapse in found["reward-collapse"][1].title


def test_a_policy_that_one_update_destroyed_names_the_learning_rate():
    broken = {
        "rollout/no_signal": 1.0, "rollout/raw_reward": 0.0, "rollout/min_reward": 0.0, "rollout/max_reward": 0.0,
        "rollout/entropy": 0.0, "rollout/truncated_ratio": 1.0,
    }  # fmt: skip
    _, finding = begun(records(broken))["no-signal"]
    assert finding.causes[0] == "An update destroyed the policy: the reward was 0.504, and the entropy 1 nat"
    assert finding.remedies[0] == "Restart with train.lr = 1e-05"
    _, same_entropy = begun(records(broken | {"rollout/entropy": 0.9}))["no-signal"]  # as with a wrong label
    assert same_entropy.remedies[0] == "Raise rollout.max_response_len, or ask for shorter responses"


def test_commands_quote_a_folder_with_blanks():
    diagnosis = Diagnosis(SETTINGS, Path("my runs/a"))
    findings = [finding for line in records(NO_SIGNAL) for finding in diagnosis.observe(line)]
    assert findings[0].commands[0] == "slimectl inspect 'my runs/a' --sort reward --explain"
