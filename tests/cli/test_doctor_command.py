"""slimectl doctor: what it looks at, and that it can find something wrong."""

from __future__ import annotations

import pytest
from workshop import Workshop

from slimectl.settings import Settings
from slimectl.stages.mismatch import LogProbCheck
from slimectl.types import StepReport


def test_the_machine_is_looked_at(workshop: Workshop):
    lines = workshop.slimectl("doctor").decode().splitlines()
    assert lines[0] == "Software"
    assert lines[1].split()[:2] == ["ok", "python"]
    assert any(line.split()[1:2] == ["torch"] for line in lines)


def test_engine_and_trainer_agree_over_steps_that_change_nothing(workshop: Workshop):
    said = workshop.slimectl("doctor", "--engine", "--model", str(workshop.model), "--steps", "2").decode().splitlines()
    assert [line.split()[0] for line in said] == ["ok", "ok", "ok"]
    differences = [float(line.split()[4]) for line in said[:2]]
    assert all(0 < difference < 1e-4 for difference in differences)


@pytest.mark.slow
def test_a_disagreement_fails_with_exit_code_1(workshop: Workshop):
    strict = ["-s", "run.max_logprob_mismatch=1e-9"]
    said = workshop.slimectl("doctor", "--engine", "--model", str(workshop.model), *strict, code=1).decode()
    assert said.startswith("FAIL")
    assert "checks failed: agreement, step 1" in workshop.stderr


def test_a_run_that_ends_with_an_error_of_cuda_names_the_command(workshop: Workshop):
    (workshop.folder / "broken.py").write_text("def reward(sample):\n    raise RuntimeError('CUDA error: no device')\n")
    workshop.slimectl("run", "-s", "score.custom_rm_path=broken.py:reward", "-s", "score.workers=0", code=2)
    assert "Check this machine: slimectl doctor" in workshop.stderr


def test_without_a_model_it_says_what_to_add(workshop: Workshop):
    (workshop.folder / "slimectl.toml").unlink()
    workshop.slimectl("doctor", "--engine", code=2)
    assert "Add --model DIR" in workshop.stderr


def test_a_run_warns_of_a_disagreement_or_stops(workshop: Workshop):
    strict = ["-s", "run.num_rollout=2", "-s", "run.max_logprob_mismatch=1e-12"]
    workshop.slimectl("run", *strict)
    assert workshop.stderr.count("Engine and trainer differ by") == 1  # a finding that begins with round 1
    workshop.slimectl("run", *strict, "--name", "b", "-s", "run.on_logprob_mismatch=stop", code=1)
    assert "run.max_logprob_mismatch = 1e-12. Run `slimectl doctor --engine` to find the cause" in workshop.stderr
    assert len([line for line in workshop.metrics("b") if "train/loss" in line["metrics"]]) == 1


STEP = {"train/train_rollout_logprob_abs_diff": 0.2}
LEFT_OVER = {"train/rollouts_left_over": 1.0}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "recorded", "reports", "warnings"),
    [
        ({}, False, [(1, STEP | {"rollout/staleness/max": 0.0})], 1),
        ({}, False, [(1, STEP | {"rollout/staleness/max": 1.0})], 0),  # responses of older weights
        ({}, False, [(1, STEP), (1, STEP), (2, STEP)], 3),
        ({}, True, [(1, LEFT_OVER), (2, STEP), (2, STEP), (3, STEP)], 1),  # the model has been trained since
        ({"use_rollout_logprobs": True}, False, [(1, STEP), (1, STEP), (2, STEP)], 2),  # as it has in a second step
        ({"use_rollout_logprobs": True}, False, [(1, STEP | LEFT_OVER), (2, STEP), (3, STEP)], 2),
        ({"use_rollout_logprobs": True}, False, [(1, LEFT_OVER), (2, STEP)], 1),
    ],
)
def test_a_disagreement_is_told_of_log_probabilities_of_the_same_weights(
    caplog: pytest.LogCaptureFixture,
    algorithm: dict[str, bool],
    recorded: bool,
    reports: list[tuple[int, dict[str, float]]],
    warnings: int,
):
    settings = Settings.model_validate(
        {"algorithm": {"name": "grpo"} | algorithm, "run": {"max_logprob_mismatch": 0.1}}
    )
    check = LogProbCheck(settings, recorded)
    for step, (rollout_id, metrics) in enumerate(reports):
        is_step = STEP.keys() <= metrics.keys()
        check.check(StepReport(step, rollout_id, weight_version="1", metrics=metrics, is_step=is_step))
    assert caplog.text.count("differ by 0.200") == warnings
