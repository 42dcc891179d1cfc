"""Scoring, settings and inspection need none of the libraries that run a model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from slimectl.errors import LIBRARIES_OF_MODELS

ROOT = Path(__file__).parents[2]
PROGRAM = """
import contextlib, io, json, sys
sys.modules.update(dict.fromkeys({libraries}))
from typer.testing import CliRunner
from slimectl.cli.app import app
for line in sys.stdin:
    result = CliRunner().invoke(app, line.split())
    print(json.dumps([result.exit_code, result.stdout, result.stderr, repr(result.exception)]))
"""
SAMPLE = {"group_index": 0, "index": 0, "prompt": "1+1", "tokens": [1, 2], "response": r"\boxed{2}",
          "response_length": 1, "label": "2", "status": "completed"}  # fmt: skip


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list]:
    """Exit code, stdout, stderr and exception of every command, in a process that cannot import the libraries."""
    folder = tmp_path_factory.mktemp("light")
    (folder / "s.jsonl").write_text(json.dumps(SAMPLE) + "\n")
    (folder / "runs" / "a").mkdir(parents=True)
    (folder / "runs" / "a" / "run.toml").touch()
    lines = [
        "score s.jsonl --rm-type math --workers 0 --out scored.jsonl",
        "score s.jsonl --rm-type math --dry-run",
        "settings show",
        "settings validate -s score.rm_type=math",
        "settings explain lr",
        "settings schema",
        "inspect s.jsonl",
        "inspect runs/a",
        "metrics rollout/raw",
        "models show tiny",
        "doctor",
        "run quickstart",
        "rollout --model m --data p.jsonl --out x.jsonl",
    ]
    program = PROGRAM.format(libraries=LIBRARIES_OF_MODELS)
    made = subprocess.run(
        [sys.executable, "-c", program], input="\n".join(lines), cwd=folder, capture_output=True, text=True, check=True
    )
    return dict(zip(lines, map(json.loads, made.stdout.splitlines()), strict=True))


def test_commands_that_run_no_model_work_without_its_libraries(answers: dict[str, list]):
    for line, (code, _, stderr, exception) in answers.items():
        if not line.startswith(("run", "rollout")):
            assert code == 0, (line, stderr, exception)
    assert "1 sample, mean reward 1" in answers["score s.jsonl --rm-type math --workers 0 --out scored.jsonl"][2]


@pytest.mark.parametrize("command", ["run quickstart", "rollout --model m --data p.jsonl --out x.jsonl"])
def test_others_name_the_extra_in_one_line(answers: dict[str, list], command: str):
    code, out, err, _ = answers[command]
    assert (code, out) == (4, "")
    pattern = r"slimectl: `slimectl \w+` needs \w+, which is not installed\. Run: pip install 'slimectl\[torch\]'\n"
    assert re.fullmatch(pattern, err)


def test_the_libraries_are_an_extra_and_every_extra_that_runs_models_has_it():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    names = [re.match(r"[\w-]+", requirement)[0] for requirement in project["dependencies"]]
    assert not {*names} & {*LIBRARIES_OF_MODELS}
    assert all("<" in requirement for requirement in extras["torch"] if not requirement.startswith("safetensors"))
    for extra in ("quickstart", "gguf", "megatron", "sglang"):
        assert "slimectl[torch]" in extras[extra]
