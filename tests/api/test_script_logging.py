"""configure_logger, init_tracking and log, in programs of their own."""

from __future__ import annotations

import os
import re
from pathlib import Path

import forkserver
import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
from slimectl.runtime.tracking_functions import configure_logger, init_tracking, log
from slimectl.migrate.slime.arguments import parse_args

args = parse_args()
configure_logger()
init_tracking(args, primary=True)
for rollout_id in range(args.num_rollout):
    log(args, {"train/loss": 0.5, "rollout/reward": 2.0 + rollout_id, "rollout_step": rollout_id}, "rollout_step")
"""


def program(folder: Path, code: str, *words: str) -> tuple[str, str]:
    """Run a program in a folder; return its standard output and error."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "WANDB_MODE": "offline"}
    result = forkserver.run_python(code, words, cwd=folder, env=variables)
    return result.stdout.strip(), result.stderr.strip()


def test_messages_have_time_prefix_and_place_and_only_the_first_call_counts(tmp_path: Path) -> None:
    code = """
import logging
from slimectl.runtime.tracking_functions import configure_logger
configure_logger(" 50%")
configure_logger(" second")
logging.getLogger("mine").info("ready")
logging.getLogger("mine").debug("quiet")
"""
    (tmp_path / "mine.py").write_text(code)
    _, error = program(tmp_path, "import mine")
    assert re.fullmatch(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d 50%\] mine.py:6 - ready", error)


def test_tensorboard_has_every_metric_at_the_step_of_its_key(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    output = program(tmp_path, PROGRAM, "--num-rollout", "3", "--use-tensorboard", "--tb-experiment-name", "mine")
    assert output == ("", "")
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard_log/mine"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("rollout/reward")] == [(0, 2), (1, 3), (2, 4)]
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(0, 0.5), (1, 0.5), (2, 0.5)]


def test_without_a_tracker_nothing_is_written(tmp_path: Path) -> None:
    assert program(tmp_path, PROGRAM, "--num-rollout", "3") == ("", "")
    assert list(tmp_path.iterdir()) == []


def test_wandb_starts_once_and_a_secondary_process_logs_nothing_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    code = PROGRAM + "print(args.wandb_run_id)"
    run_id, _ = program(tmp_path, code, "--num-rollout", "2", "--use-wandb", "--wandb-project", "p")
    (file,) = tmp_path.glob("runs/run/wandb/offline-run-*/*.wandb")
    assert file.stem == f"run-{run_id}"
    program(tmp_path, PROGRAM.replace("primary=True", "primary=False"), "--num-rollout", "2", "--use-wandb")
    assert list(tmp_path.glob("runs/run/wandb/offline-run-*/*.wandb")) == [file]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("log(args, {'a': 1.0}, 'step')", "log: metrics has no number under 'step', the key of the step. Add it."),
        ("log(args, {'a': 'b', 'step': 1}, 'step')", "log: the metric 'a' is 'b'. Metrics are numbers."),
        ("log(args, {'step': 1}, 'step')", "log: tracking has not started. Call init_tracking(args) first."),
        ("init_tracking(args); init_tracking(args)", "init_tracking was already called in this process."),
        ("range(args.num_rollout)", "args.num_rollout: the command line has no --num-rollout. Add --num-rollout N."),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, code: str, message: str) -> None:
    start = PROGRAM[: PROGRAM.index("configure_logger()\ninit")]
    assert message in program(tmp_path, start + code)[1]
