"""The examples, and the code of docs/python.md, do what they say."""

from __future__ import annotations

import importlib.util
import re
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


def test_the_code_of_the_python_page_runs(folder: Path, capsys: pytest.CaptureFixture[str]):
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "docs/python.md", "exec"), names)
    printed = capsys.readouterr()
    assert printed.err == ""
    lines = printed.out.splitlines()
    assert [line.split()[0] for line in lines[:2]] == ["1", "2"]  # two rounds of a step each
    assert lines[2].startswith("16 abc> ")
    assert [line.split()[0] for line in lines[3:5]] == ["1", "2"]
    assert lines[-1] == re.search(r"print\(error\)  # (.*)", page)[1]
    assert (folder / "models" / "better" / "config.json").exists()


def test_the_python_of_the_readme_runs(folder: Path, capsys: pytest.CaptureFixture[str]):
    [block] = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    fewer = re.sub(r'"run.num_rollout": \d+', '"run.num_rollout": 1, "sft_warmup.max_steps": 1, "eval.data": {}', block)
    exec(compile(fewer, "README.md", "exec"), {})
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["1"]
