"""docs/algorithms.md: the table is the settings' own, and its examples run."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slimectl.cli.app import app
from slimectl.settings.algorithm import ALGORITHMS

TEXT = (Path(__file__).parent.parent / "docs" / "algorithms.md").read_text()
TABLE = TEXT.partition("\n## ")[0].splitlines()
ROWS = {cells[1].strip("` "): cells for line in TABLE if (cells := line.split("|"))[1:] and "`" in cells[1]}
SMALL = {"ROLLOUT_MAX_RESPONSE_LEN": "6", "RUN_ROLLOUT_BATCH_SIZE": "2", "ROLLOUT_N_SAMPLES_PER_PROMPT": "2",
         "TRACK_PLOT": "false"}  # fmt: skip


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def test_every_algorithm_is_in_the_table():
    assert list(ROWS) == list(ALGORITHMS)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_papers_and_defaults_are_those_of_the_settings(name: str):
    cells, cls = ROWS[name], ALGORITHMS[name]
    papers = re.findall(r"arXiv:[\d.]+\d", cells[4])
    assert papers == re.findall(r"arXiv:[\d.]+\d", cls.__doc__ or "")
    for key, value in (pair.split(" = ") for pair in re.findall(r"`([^`]+)`", cells[5])):
        assert cls.model_fields[key].default == tomllib.loads(f"value = {value}")["value"], key


def test_the_examples_run(model_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for name, value in SMALL.items():
        monkeypatch.setenv(f"SLIMECTL_{name}", value)
    Path("base").symlink_to(model_dir("llama"))
    Path("teacher").symlink_to(model_dir("llama_untied"))
    Path("preferences.jsonl").write_text("".join(blocks("jsonl")))
    Path("prompts.jsonl").write_text('{"prompt": "2+3=", "label": "5"}\n{"prompt": "1+1=", "label": "2"}\n')
    commands = [line for block in blocks("sh example") for line in block.replace("\\\n", " ").splitlines()]
    assert len(commands) == 6
    for command in commands:
        program, *arguments = shlex.split(command)
        assert program == "slimectl"
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, (command, result.output, result.exception)
    assert Path("judge/model.safetensors").exists()
    assert len(Path("scored.jsonl").read_text().splitlines()) == 8
    assert all(Path(f"runs/{name}/latest/policy").is_dir() for name in ("distilled", "ppo"))
