"""Templates of `slimectl init` are written whole, describe every setting, and train."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result
from workshop import Workshop

from slimectl.cli.app import app
from slimectl.recipes import templates
from slimectl.settings.reference import entries

NAMES = ["verifier", "agent", "dpo", "environment", "reward", "sft"]


def init(*words: str | Path, code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["init", *map(str, words)])
    assert result.exit_code == code, result.output
    return result


@pytest.fixture(scope="module")
def projects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a project of each template, in a folder whose name has a space."""
    folder = tmp_path_factory.mktemp("init") / "my projects"
    for name in NAMES:
        init(folder / name, "--from", name)
    return folder


def test_the_list_has_every_template_and_so_has_the_help():
    assert templates.names() == NAMES
    lines = init("--list").stdout.splitlines()
    assert [line.split()[0] for line in lines] == NAMES
    records = [json.loads(line) for line in init("--list", "--json").stdout.splitlines()]
    assert [f"{record['name']:<12} {record['title']}" for record in records] == lines
    text = " ".join(init("--help").stdout.replace("│", " ").split())
    named = re.search(r"Template: (.*?) +\[default", text)
    assert sorted(re.findall(r"\w+", named[1].replace(" or ", " "))) == sorted(NAMES)


def test_a_project_is_its_files_on_stdout_and_the_next_commands_on_stderr(tmp_path: Path):
    result = init(tmp_path / "a b")
    assert result.stdout.splitlines() == [
        str(tmp_path / "a b" / name) for name in ("slimectl.toml", "held_out.jsonl", "prompts.jsonl")
    ]
    assert all(Path(line).is_file() for line in result.stdout.splitlines())
    title, enter, first, *_ = result.stderr.splitlines()
    assert (title, enter, first.split("#")[0].split()) == (
        "next:", f"  cd {shlex.quote(str(tmp_path / 'a b'))}", ["slimectl", "run", "--dry-run"],
    )  # fmt: skip


def test_the_default_folder_is_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    result = init("--from", "reward")
    assert sorted(result.stdout.split()) == sorted(os.listdir())
    assert "cd " not in result.stderr


def test_nothing_is_replaced_and_nothing_is_half_written(tmp_path: Path):
    (tmp_path / "prompts.jsonl").write_text("mine")
    text = init(tmp_path, code=2).stderr
    assert text.splitlines() == [
        f"slimectl: {tmp_path}/prompts.jsonl: already exists and is not replaced. Give another folder: "
        "slimectl init FOLDER --from verifier"
    ]
    assert os.listdir(tmp_path) == ["prompts.jsonl"]
    assert (tmp_path / "prompts.jsonl").read_text() == "mine"


def test_a_folder_that_cannot_be_written_and_an_unknown_template_are_one_line_each(tmp_path: Path):
    (tmp_path / "file").touch()
    for place, reason in (("file", "File exists"), ("file/below", "Not a directory")):
        text = init(tmp_path / place, code=1).stderr
        assert text == f"slimectl: {tmp_path}/{place}: {reason}. Give a folder that you may write to.\n"
    assert init("--from", "rewrd", code=2).stderr == "slimectl: --from rewrd: unknown template. Did you mean reward?\n"
    assert init("--from", "x", code=2).stderr.endswith(f"Choose one of {', '.join(NAMES)}.\n")


@pytest.fixture(scope="module")
def manual() -> dict[str, str]:
    return {re.sub(r"^algorithm\.\w+\.", "algorithm.", entry.key): entry.text for entry in entries()}


@pytest.mark.parametrize("name", NAMES)
def test_every_setting_is_described_in_the_words_of_its_manual(name: str, projects: Path, manual: dict[str, str]):
    section, comment, keys = "", "", []
    for line in (projects / name / "slimectl.toml").read_text().splitlines():
        if line.startswith("#"):
            comment += line[1:]
            continue
        if header := re.match(r"\[(\w+)\]", line):
            section = header[1]
        elif key := re.match(r"(\w+) = ", line):
            keys.append(f"{section}.{key[1]}")
            assert comment.strip().endswith("."), keys[-1]
            assert manual[keys[-1]].startswith(comment.strip()), keys[-1]
        comment = ""
    assert {"model.card", "train.lr", "run.name", "eval.data"} <= set(keys)


COMMANDS = {name: ["run"] for name in NAMES} | {
    "sft": ["train", "demonstrations.jsonl", "-c", "slimectl.toml"],
    "dpo": ["train", "preferences.jsonl", "-c", "slimectl.toml"],
}


@pytest.mark.parametrize("name", NAMES)
def test_the_checks_of_every_template_pass(name: str, projects: Path):
    commands = [shlex.split(line, comments=True) for line in templates.load(name).commands]
    assert ["slimectl", *COMMANDS[name]] in commands
    place = Workshop(projects / name, Path())
    lines = place.slimectl(*COMMANDS[name], "--dry-run").decode().partition("\n\n")[0].splitlines()
    assert {line.split()[0] for line in lines} <= {"ok", "-"}
    assert len(lines) >= 7
    assert place.stderr.splitlines() in ([], ["reading settings from slimectl.toml in this folder"])


SMALL = {
    "environment": ["run.num_rollout=1", "rollout.n_samples_per_prompt=4", "eval.data={corridor='env:eval@[:2]'}"],
    "sft": ["run.num_epoch=1"],
    "dpo": ["run.num_epoch=1"],
}


@pytest.mark.parametrize("name", SMALL)
def test_a_template_trains(name: str, projects: Path):
    place, words = Workshop(projects / name, Path()), [word for each in SMALL[name] for word in ("-s", each)]
    place.slimectl(*COMMANDS[name], *words, "-s", "run.rollout_batch_size=4")
    steps = [line["metrics"] for line in place.metrics(name) if "train/grad_norm" in line["metrics"]]
    # 72 demonstrations are three steps of 24, and 40 pairs four of 10.
    assert len(steps) == {"environment": 1, "sft": 3, "dpo": 4}[name]
    if name == "sft":
        assert steps[-1]["train/loss"] < 0.9 * steps[0]["train/loss"]
    if name == "environment":
        assert 1 <= steps[0]["rollout/env/turns"] <= 6
        assert steps[0]["train/grad_norm"] > 0
    if name == "dpo":  # before the first update both responses are as likely as for the reference: ln 2
        assert steps[0]["train/loss"] == pytest.approx(0.6931, abs=1e-4)
        assert re.search(r"^step +1  loss 0\.693  ", place.stderr, re.MULTILINE)
