"""The decorator that gives commands the options they share."""

from __future__ import annotations

import inspect
import json
import re
import tomllib
from typing import Annotated

import pytest
import typer
from workshop import Workshop

from slimectl.cli.options import CLUSTER, CommonOptions, with_options


def test_a_command_gets_the_options_that_it_names_in_their_order():
    calls = []

    @with_options("model rounds", CLUSTER, "dry_run")
    def command(options: CommonOptions, rounds: Annotated[int, typer.Option("--rounds")] = 3) -> None:
        """Help."""
        calls.append((options.flags(), options.dry_run, rounds))

    assert list(inspect.signature(command).parameters) == ["model", "rounds", "executor", "ray_address", "dry_run"]
    assert (command.__name__, command.__doc__) == ("command", "Help.")
    app = typer.Typer()
    app.command()(command)
    app(["--ray-address", "head:6379", "--rounds", "5", "--dry-run"], standalone_mode=False)
    [(flags, dry_run, rounds)] = calls
    given = {name: value for name, value in flags.items() if value is not None}
    assert given == {"cluster.executor": "ray", "cluster.ray_address": "head:6379"}
    assert (dry_run, rounds) == (True, 5)


def test_the_first_of_two_options_of_one_name_counts():
    calls = []

    @with_options("engine engine_url")
    def command(options: CommonOptions, engine: Annotated[bool, typer.Option("--engine")] = False) -> None:
        calls.append((options.engine, options.engine_url, engine))

    app = typer.Typer()
    app.command()(command)
    app(["--engine", "--engine-url", "a"], standalone_mode=False)
    assert calls == [(None, ["a"], True)]


@pytest.mark.slow
def test_the_settings_file_of_this_folder_is_named_where_no_other_was_given(workshop: Workshop):
    said = "reading settings from slimectl.toml in this folder\n"
    shown = workshop.slimectl("run", "--dry-run", "-s", "score.rm_type=exact")
    assert workshop.stderr == said
    # What is said on the command line goes before the other reward of the file.
    rewards = [line.split() for line in shown.decode().splitlines() if line.startswith("score.")]
    values = {words[0]: words[1] for words in rewards}
    assert values == {"score.rm_type": '"exact"'}
    workshop.slimectl("run", "-s", "run.num_rollout=1", "-s", "eval.interval=none")
    assert workshop.stderr.startswith(said)
    workshop.slimectl("run", "slimectl.toml", "--name", "another", "--dry-run")
    assert workshop.stderr == ""


@pytest.mark.slow
def test_a_resume_names_the_settings_that_changed(workshop: Workshop):
    short = ("-s", "eval.interval=none")
    workshop.slimectl("run", "-s", "run.num_rollout=1", *short)
    workshop.slimectl("run", "--resume", "runs/a", "-s", "run.num_rollout=2", "-s", "train.lr=2e-3")
    assert workshop.stderr.startswith(
        "resuming with changed settings: train.lr = 0.002 (was 0.001), run.num_rollout = 2 (was 1)\n"
    )
    [run] = map(json.loads, workshop.slimectl("runs", "--json").splitlines())
    assert (run["state"], run["rounds"], run["planned"]) == ("finished", 2, 2)
    workshop.slimectl("run", "--resume", "runs/a", "-s", "run.num_rollout=3")
    assert workshop.stderr.startswith("resuming with changed settings: run.num_rollout = 3 (was 2)\n")
    kept = tomllib.loads((workshop.folder / "runs" / "a" / "run.toml").read_text())
    assert (kept["train"]["lr"], kept["run"]["num_rollout"], kept["run"]["dir"]) == (2e-3, 3, "runs")


@pytest.mark.slow
def test_a_resume_notes_the_settings_that_changed_in_the_file_of_the_run(workshop: Workshop):
    short = ("-s", "eval.interval=none")
    workshop.slimectl("run", "-s", "run.num_rollout=1", *short)
    file = workshop.folder / "runs" / "a" / "run.toml"
    before = file.read_text()
    workshop.slimectl("run", "--resume", "runs/a")
    assert file.read_text() == before
    workshop.slimectl("run", "--resume", "runs/a", "-s", "run.num_rollout=2", "-s", "train.lr=2e-3")
    settings, _, note = file.read_text().partition("\n# ")
    expected = tomllib.loads(before)
    expected["train"]["lr"], expected["run"]["num_rollout"] = 0.002, 2
    assert tomllib.loads(settings) == expected
    heading, *changes = note.splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ, slimectl \S+: resumed at round 2 with", heading)
    assert changes == ["#   train.lr = 0.002 (was 0.001)", "#   run.num_rollout = 2 (was 1)"]
    workshop.slimectl("run", "--resume", "runs/a", "-s", "train.lr=1e-3")
    _, first, second = re.split(r"\n# (?=\d)", file.read_text())
    assert first.splitlines()[1:] == changes
    assert second.splitlines()[1:] == ["#   train.lr = 0.001 (was 0.002)"]
    after = file.read_text()
    # The checkpoint has no adapter: the resume fails when it loads the policy.
    workshop.slimectl("run", "--resume", "runs/a", "-s", "run.num_rollout=3", "-s", "train.lora_rank=2", code=1)
    assert "train.lora_rank = 2 (was none)" in workshop.stderr
    assert file.read_text() == after


def test_a_run_takes_answers_and_learning_rate_as_rollout_and_train_do(workshop: Workshop):
    shown = workshop.slimectl("run", "--dry-run", "-n", "2", "--lr", "3e-4", "-s", "score.rm_type=exact").decode()
    values = {words[0]: words[1] for line in shown.splitlines() if len(words := line.split()) > 1}
    assert (values["rollout.n_samples_per_prompt"], values["train.lr"]) == ("2", "0.0003")
