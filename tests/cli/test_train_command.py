"""slimectl train: a stage with records on stdout, a table on a terminal; and a run with a folder of its own."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time

import pytest
from safetensors.torch import load_file, save_file
from workshop import Workshop

TRAINING = ("train", "prompts.jsonl", "-c", "slimectl.toml", "--algorithm", "sft", "-s", "run.rollout_batch_size=4")


def test_a_terminal_gets_a_table_and_a_pipe_gets_records(workshop: Workshop) -> None:
    records = [json.loads(line) for line in workshop.slimectl(*TRAINING).splitlines()]
    assert len(records) == 2
    master, slave = os.openpty()
    process = workshop.start(*TRAINING, stdout=slave, stderr=subprocess.PIPE)
    os.close(slave)
    _, stderr = process.communicate(timeout=300)
    shown = os.read(master, 1 << 16).decode()
    os.close(master)
    assert process.returncode == 0, stderr.decode()
    header, *rows = shown.splitlines()
    assert header.split() == ["step", "reward", "loss", "grad", "entropy", "length", "lr"]
    assert [row.split()[0] for row in rows] == ["1", "2"]
    losses = [f"{record['metrics']['train/loss']:.4g}" for record in records]
    assert [row.split()[2] for row in rows] == losses
    assert max(map(len, shown.splitlines())) <= 80


SUPERVISED = """
[algorithm]
name = "sft"
[run]
name = "sft"
num_epoch = 2
save_interval = 1
rollout_batch_size = 3
"""


def test_a_stage_refuses_what_needs_a_folder_and_leaves_it_to_the_run_of_a_shared_file(workshop: Workshop) -> None:
    workshop.slimectl(*TRAINING, "-s", "run.num_epoch=2", code=2)
    assert "run.num_epoch: needs a run folder for checkpoints and records. Add --name NAME" in workshop.stderr
    assert len(workshop.slimectl(*TRAINING).splitlines()) == 2
    assert "run.save_interval, eval.data of slimectl.toml had no effect: a run folder is needed" in workshop.stderr
    assert not (workshop.folder / "runs").exists()


SCHEDULE = ("--algorithm", "sft", "-s", "train.global_batch_size=2", "-s", "run.num_rollout=none")


@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        (("train.lr_decay_style=linear",), [1, 0.75, 0.5, 0.25]),
        (("train.lr_decay_style=cosine",), [1, (2 + 2**0.5) / 4, 0.5, (2 - 2**0.5) / 4]),
        (("train.lr_decay_style=constant", "train.lr_warmup_fraction=0.5"), [0, 0.5, 1, 1]),
        (
            ("train.lr_decay_style=WSD", "train.lr_wsd_decay_iters=2", "train.lr_wsd_decay_style=linear"),
            [1, 1, 1, 0.5],
        ),
        (("train.lr_decay_style=inverse-square-root", "train.lr_warmup_iters=1"), [0, 1, 0.5**0.5, 3**-0.5]),
    ],
)
def test_a_schedule_of_a_stage_ends_with_its_file(workshop: Workshop, settings: tuple[str, ...], rates: list[float]):
    """Eight demonstrations are four steps of two."""
    words = [word for setting in ("train.lr=1.0", *settings) for word in ("-s", setting)]
    lines = workshop.slimectl("train", "prompts.jsonl", "-c", "slimectl.toml", *SCHEDULE, *words).splitlines()
    assert [json.loads(line)["metrics"]["train/lr"] for line in lines] == pytest.approx(rates)


def test_a_schedule_of_samples_that_cannot_be_counted_is_refused_with_what_it_needs(workshop: Workshop) -> None:
    prompts = (workshop.folder / "prompts.jsonl").read_bytes()
    workshop.slimectl("train", "-", "-c", "slimectl.toml", *SCHEDULE, stdin=prompts, code=2)
    assert workshop.stderr.endswith(
        "train.lr_decay_style: linear depends on the number of steps, but the steps of a pipe (-) cannot be counted. "
        "Set train.lr_decay_iters.\n"
    )
    constant = ("-s", "train.lr_decay_style=constant", "-s", "train.lr_warmup_fraction=0.1")
    workshop.slimectl("run", "-c", "slimectl.toml", "-s", "run.num_rollout=none", *constant, code=2)
    assert (
        "train.lr_warmup_fraction: 0.1 needs a number of steps. Set run.num_rollout or train.lr_decay_iters"
        in workshop.stderr
    )


@pytest.mark.slow
def test_a_killed_training_goes_on_to_the_bytes_of_an_undisturbed_one(workshop: Workshop) -> None:
    (workshop.folder / "sft.toml").write_text(SUPERVISED)
    started = ("train", "prompts.jsonl", "-c", "slimectl.toml", "-c", "sft.toml")
    assert workshop.slimectl(*started) == b"runs/sft\n"  # named in the file that names its algorithm
    broken = workshop.folder / "runs" / "broken"
    process = workshop.start(*started, "--name", "broken", stderr=subprocess.DEVNULL)
    while not (broken / "step_000003").exists():
        assert process.poll() is None
        time.sleep(0.002)
    process.kill()
    process.wait()
    workshop.slimectl("train", "--resume", "runs/broken")
    workshop.slimectl("run", "--resume", "runs/broken", code=2)
    assert "runs/broken: was started by `slimectl train`. Continue with: slimectl train --resume" in workshop.stderr
    whole = workshop.folder / "runs" / "sft"
    shown = workshop.slimectl("inspect", "runs/sft").decode()
    assert "runs/sft: 6 rounds" in shown
    assert re.search(r"\nloss +\d", shown)
    assert len(workshop.metrics("sft")) == 6 + 4  # two passes over eight rows, and evaluations at 0, 2, 4 and the end
    for name in ("metrics.jsonl", "latest/policy/model.safetensors", "latest/trainer/policy/optimizer.safetensors"):
        assert (broken / name).read_bytes() == (whole / name).read_bytes()


def test_samples_of_another_model_are_named_and_their_log_probs_compared(workshop: Workshop) -> None:
    config = ("-c", "slimectl.toml", "-s", "train.lr_decay_style=constant", "-s", "run.max_logprob_mismatch=0.001")
    workshop.slimectl("rollout", *config, "-o", "samples.jsonl")
    workshop.slimectl("score", "samples.jsonl", *config, "-o", "scored.jsonl")
    workshop.slimectl("train", "scored.jsonl", *config)
    assert "sampled from" not in workshop.stderr
    assert "of the samples and the model differ by" not in workshop.stderr
    other = shutil.copytree(workshop.model, workshop.folder / "other")
    weights = load_file(other / "model.safetensors")
    save_file({name: 1.5 * tensor for name, tensor in weights.items()}, other / "model.safetensors", {"format": "pt"})
    (other / "generation_config.json").write_text('{"temperature": 0.5}')
    workshop.slimectl("train", "scored.jsonl", *config, "--model", "other", "--name", "warned")
    assert f"scored.jsonl: sampled from {workshop.model}, but other has different files or weights" in workshop.stderr
    assert workshop.stderr.count("the log-probabilities of the samples and the model differ by") == 1
    stop = ("-s", "run.on_logprob_mismatch=stop")
    workshop.slimectl("train", "scored.jsonl", *config, "--model", "other", "--save", "out", *stop, code=1)
    assert "per token on average, more than run.max_logprob_mismatch = 0.001. Sample with the model" in workshop.stderr
    assert not (workshop.folder / "out").exists()
