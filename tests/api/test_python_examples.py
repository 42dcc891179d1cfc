"""The examples, and the code of docs/python.md, do what they say."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from slimectl.types import Status

ROOT = Path(__file__).parents[2]


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_grpo_by_hand_learns(folder: Path):
    rewards = example("grpo_loop").main(folder=str(folder / "loop"), rounds=8)
    assert len(rewards) == 8
    assert sum(rewards[-2:]) > 1.3 * sum(rewards[:2])
    assert (folder / "loop" / "trained" / "model.safetensors").exists()


def test_a_reward_of_ones_own_grades_three_answers():
    assert example("custom_reward").main() == [1.0, 0.5, 0.0]


def test_what_an_agent_says_is_not_trained_on():
    sample = example("custom_agent").main()
    assert sample.status is not Status.FAILED
    assert "That is wrong. Again:" in sample.response
    assert sample.loss_mask.count(0) == len(" That is wrong. Again: ")  # one token a byte


SMALL = (
    '"run.num_rollout": 2, "run.rollout_batch_size": 4, "sft_warmup.max_steps": 2, "sft_warmup.check_interval": 5, '
    '"rollout.data": ["slimectl.recipes.spelling:prompts?size=50"], '
    '"sft_warmup.data": ["slimectl.recipes.spelling:prompts?size=50"], '
    '"eval.data.held_out": "slimectl.recipes.spelling:prompts?split=held_out&size=4"'
)
"""Settings of a run of seconds, in place of the number of rounds."""


def printed_lines(code: str, folder: Path) -> list[str]:
    """What code prints in an interpreter of its own; it may write nothing to stderr."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_the_code_of_the_python_page_runs(folder: Path):
    code = re.sub(r'"run.num_rollout": \d+, "sft_warmup.max_steps": \d+', SMALL, "\n".join(blocks("docs/python.md")))
    lines = printed_lines(code, folder)
    assert [line.split()[0] for line in lines[:2]] == ["1", "2"]  # two rounds of a step each
    assert lines[2].startswith("16 abc> ")
    assert [line.split()[0] for line in lines[3:5]] == ["1", "2"]
    assert lines[5:] == [re.search(r"print\(error\)  # (.*)", code)[1]]
    assert (folder / "better" / "config.json").exists()


def test_the_python_of_the_readme_runs(folder: Path):
    [block] = blocks("README.md")
    code = re.sub(r'"run.num_rollout": \d+', SMALL, block)
    assert [line.split()[0] for line in printed_lines(code, folder)] == ["1", "2"]
