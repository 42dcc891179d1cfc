"""SIGTERM and SIGHUP end a command as Ctrl-C does: the round ends or is abandoned, and the run goes on from there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import forkserver
import pytest
from forkserver import Process
from workshop import Workshop, set_up

pytestmark = pytest.mark.slow

WAITS = '''
import os, time

def reward(sample):
    """The share of small bytes; waits in the third round, an evaluation or earlier while the file `wait` names that."""
    place = "evaluation" if "held" in sample.prompt else "round" if sample.index >= 32 else "warm-up"
    if os.path.exists("wait") and place in open("wait").read().split():
        open("waiting", "w").close()
        open(f"waiting-{place}", "w").close()
        while os.path.exists("wait"):
            time.sleep(0.01)
    answer = sample.tokens[len(sample.tokens) - sample.response_length:]
    return sum(token < 64 for token in answer) / len(answer)
'''
SHORT = ("-s", "run.num_rollout=4", "-s", "run.save_interval=none")


def waiting_rewards(workshop: Workshop) -> Workshop:
    (workshop.folder / "reward.py").write_text(WAITS)
    (workshop.folder / "held.jsonl").write_text('{"prompt": "held out", "label": ""}\n')
    settings = (workshop.folder / "slimectl.toml").read_text()
    (workshop.folder / "slimectl.toml").write_text(settings.replace("prompts.jsonl@[0:3]", "held.jsonl"))
    return workshop


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, model_dir: Callable[..., Path]) -> bytes:
    """The metrics of an undisturbed run."""
    workshop = waiting_rewards(set_up(tmp_path_factory.mktemp("whole"), model_dir("llama")))
    workshop.slimectl("run", *SHORT)
    return metrics_of(workshop).read_bytes()


def metrics_of(workshop: Workshop) -> Path:
    return workshop.folder / "runs" / "a" / "metrics.jsonl"


def wait_for(condition: Callable[[], bool], process: Process) -> None:
    while not condition():
        time.sleep(0.005)
        assert process.poll() is None


def has_steps(workshop: Workshop) -> bool:
    return metrics_of(workshop).exists() and metrics_of(workshop).read_bytes().count(b"\n") >= 2


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_to_all_processes_of_a_run_lets_the_round_end_and_saves(
    workshop: Workshop, whole: bytes, number: signal.Signals, code: int
):
    waiting_rewards(workshop)
    pipe = subprocess.PIPE
    process = workshop.start("run", *SHORT, "-s", "score.workers=1", stdout=pipe, stderr=pipe, new_session=True)
    wait_for(lambda: has_steps(workshop), process)
    os.killpg(process.pid, number)  # as a terminal that closes, and a scheduler that ends a job
    _, words = process.communicate(timeout=300)
    assert process.returncode == code, words.decode()
    assert f"{number.name}: finishing this round (at most 20 s, run.grace_s)" in words.decode()
    assert "Continue with: slimectl run --resume runs/a" in words.decode()
    assert "Traceback" not in words.decode()
    workshop.slimectl("run", "--resume", "runs/a", "-s", "score.workers=0")
    assert metrics_of(workshop).read_bytes() == whole


def indices_by_round(workshop: Workshop) -> list[list[int]]:
    files = sorted((workshop.folder / "runs" / "a").glob("step_*/samples.jsonl"))
    return [sorted(json.loads(line)["index"] for line in file.read_text().splitlines()) for file in files]


@pytest.mark.parametrize("place", ["round", "evaluation"])
@pytest.mark.parametrize("async_level", [0, 1])
def test_what_does_not_end_in_time_is_abandoned_and_the_round_before_is_saved(
    workshop: Workshop, whole: bytes, place: str, async_level: int
):
    waiting_rewards(workshop)
    (workshop.folder / "wait").write_text(place)
    ahead = ("-s", f"run.async_level={async_level}")
    early = ("-s", "eval.before_train=false") if place == "evaluation" else ()
    process = workshop.start("run", *SHORT, *ahead, *early, "-s", "run.grace_s=0.1", stderr=subprocess.PIPE)
    wait_for((workshop.folder / "waiting").exists, process)
    sampled_ahead = place == "round" and async_level == 1  # the third round is begun before the second has ended
    if sampled_ahead:
        wait_for(lambda: b'"eval/step": 2.0' in metrics_of(workshop).read_bytes(), process)
    process.send_signal(signal.SIGTERM)
    _, words = process.communicate(timeout=300)
    assert process.returncode == 143, words.decode()
    abandoned = "round 3 abandoned. The last checkpoint is from round 2. Continue with: slimectl run --resume runs/a\n"
    between = "interrupted after round 2. Continue with: slimectl run --resume runs/a\n"  # the second still ran
    assert abandoned in words.decode() or (sampled_ahead and between in words.decode())
    assert "Traceback" not in words.decode()
    assert not list((workshop.folder / "runs" / "a").glob(".tmp-*"))
    (workshop.folder / "wait").unlink()
    workshop.slimectl("run", "--resume", "runs/a")
    assert indices_by_round(workshop) == [[*range(16 * number, 16 * (number + 1))] for number in range(4)]
    if not async_level:
        lines, all_lines = metrics_of(workshop).read_bytes().splitlines(), whole.splitlines()
        assert lines == (all_lines[1:] if early else all_lines)


ONE_ROUND = ("-s", "run.num_rollout=1", "-s", "train.lr_decay_iters=4", "-s", "run.save_interval=none")
WARM_UP = ("-s", "sft_warmup.data=prompts.jsonl", "-s", "sft_warmup.max_steps=2", "-s", "sft_warmup.check_interval=1")
NOTHING_YET = "round 1 abandoned. No checkpoint was saved. Continue with: slimectl run --resume runs/a\n"


def ended_while_waiting(
    workshop: Workshop, place: str, number: signal.Signals, *command: str, goes_on: bool = False
) -> tuple[int, str]:
    """The exit code and the words of a command that got a signal while its reward waited, and then `goes_on` or not."""
    waiting_rewards(workshop)
    (workshop.folder / "wait").write_text(place)
    process = workshop.start(*command, stderr=subprocess.PIPE)
    wait_for((workshop.folder / "waiting").exists, process)
    process.send_signal(number)
    if goes_on:
        (workshop.folder / "wait").rename(workshop.folder / "waited")
    code = process.wait(timeout=300)
    _, words = process.communicate()
    assert "Traceback" not in words.decode()
    (workshop.folder / "wait").unlink(missing_ok=True)
    return code, words.decode()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_the_evaluation_before_training_is_abandoned_as_a_round_is(
    workshop: Workshop, whole: bytes, number: signal.Signals, code: int
):
    command = ("run", *ONE_ROUND, "-s", "run.grace_s=0")
    end, words = ended_while_waiting(workshop, "evaluation", number, *command)
    assert (end, NOTHING_YET in words) == (code, True), words
    workshop.slimectl("run", "--resume", "runs/a")
    assert metrics_of(workshop).read_bytes().splitlines()[:2] == whole.splitlines()[:2]


@pytest.mark.parametrize(("grace", "number", "code"), [("0", signal.SIGTERM, 143), ("600", signal.SIGHUP, 129)])
def test_so_is_the_warm_up(workshop: Workshop, grace: str, number: signal.Signals, code: int):
    command = ("run", *ONE_ROUND, *WARM_UP, "-s", f"run.grace_s={grace}")
    end, words = ended_while_waiting(workshop, "warm-up", number, *command, goes_on=grace != "0")
    assert (end, NOTHING_YET in words) == (code, True), words


def test_so_is_the_evaluation_after_the_last_round_and_a_resume_makes_up_for_it(workshop: Workshop, whole: bytes):
    options = ("-s", "eval.before_train=false", "-s", "eval.interval=none", "-s", "run.grace_s=0")
    end, words = ended_while_waiting(workshop, "evaluation", signal.SIGTERM, "run", *ONE_ROUND, *options)
    abandoned = "the evaluation after round 1 abandoned. The last checkpoint is from round 1. Continue with:"
    assert (end, abandoned in words) == (143, True)
    assert len(workshop.metrics("a")) == 1
    workshop.slimectl("run", "--resume", "runs/a")
    training, evaluation = metrics_of(workshop).read_bytes().splitlines()
    assert training == whole.splitlines()[1]
    assert b'"eval/step": 1.0' in evaluation


def test_so_is_an_evaluation_of_a_training_on_a_file(workshop: Workshop):
    command = ("train", "prompts.jsonl", "-c", "slimectl.toml", "--algorithm", "sft", "--name", "a", *ONE_ROUND)
    end, words = ended_while_waiting(workshop, "evaluation", signal.SIGTERM, *command, "-s", "run.grace_s=0")
    assert (end, NOTHING_YET.replace("slimectl run", "slimectl train") in words) == (143, True), words


def test_an_abandoned_evaluation_does_not_wait_for_the_round_that_is_sampled_ahead(workshop: Workshop):
    waiting_rewards(workshop)
    (workshop.folder / "wait").write_text("round evaluation")
    options = ("-s", "run.async_level=1", "-s", "eval.before_train=false", "-s", "eval.interval=2")
    process = workshop.start("run", *SHORT, *options, "-s", "run.grace_s=0.1", stderr=subprocess.PIPE)
    for place in ("round", "evaluation"):
        wait_for((workshop.folder / f"waiting-{place}").exists, process)
    process.send_signal(signal.SIGTERM)
    _, words = process.communicate(timeout=300)
    assert process.returncode == 143, words.decode()
    assert b"round 3 abandoned. The last checkpoint is from round 2" in words


def test_a_second_signal_stops_at_once(workshop: Workshop):
    waiting_rewards(workshop)
    (workshop.folder / "wait").write_text("round")
    process = workshop.start("run", *SHORT, stderr=subprocess.PIPE)
    wait_for((workshop.folder / "waiting").exists, process)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.05)
    process.send_signal(signal.SIGHUP)
    _, words = process.communicate(timeout=300)
    assert process.returncode == 129, words.decode()
    assert words.decode().splitlines()[-1] == "slimectl: ended by SIGHUP"
    assert "Traceback" not in words.decode()


def test_a_stage_ends_in_one_line_with_the_code_of_its_signal(workshop: Workshop):
    waiting_rewards(workshop)
    workshop.slimectl("rollout", "-c", "slimectl.toml", "--data", "held.jsonl", "-o", "samples.jsonl")
    command = ("score", "samples.jsonl", "--custom-rm-path", "reward.py:reward", "-o", "scored.jsonl")
    ending = ended_while_waiting(workshop, "evaluation", signal.SIGTERM, *command)
    assert ending == (143, "slimectl: ended by SIGTERM\n")


READS_ARGUMENTS = """
import os, signal, sys
import typer.core
from slimectl.cli import main

def interrupted(*arguments, parse=typer.core.TyperGroup.parse_args):
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))
    return parse(*arguments)

typer.core.TyperGroup.parse_args = interrupted
main()
"""


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [("SIGTERM", 143, "ended by SIGTERM"), ("SIGHUP", 129, "ended by SIGHUP"), ("SIGINT", 130, "interrupted")],
)
def test_so_does_a_command_whose_arguments_are_being_read(tmp_path: Path, name: str, code: int, words: str):
    process = forkserver.run_python(READS_ARGUMENTS, [name], cwd=tmp_path)
    assert (process.returncode, process.stderr) == (code, f"slimectl: {words}\n")


def test_a_rollout_that_sleeps_keeps_everything_up_until_a_signal(workshop: Workshop):
    asleep = ("-s", "rollout.function_path=slimectl.recipes.debugging:sleep_rollout", "-s", "run.grace_s=0")
    with (workshop.folder / "words").open("wb") as words:
        process = workshop.start("run", *asleep, "-s", "eval.before_train=false", stderr=words)
        wait_for(lambda: b"and trainer stay up" in (workshop.folder / "words").read_bytes(), process)
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(timeout=300) == 143
    assert "round 1 abandoned" in (workshop.folder / "words").read_text()
