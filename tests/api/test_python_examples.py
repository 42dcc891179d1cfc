"""The examples, and the code of docs/python.md, do what they say."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import forkserver
import pytest
from workshop import Workshop

from slimectl.types import Status

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


TEMPLATES = Path("slimectl/recipes/templates")


def example(name: str, folder: Path = Path("examples")) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_grpo_by_hand_learns(folder: Path):
    rewards = example("grpo_loop").main(folder=str(folder / "loop"), rounds=6)
    assert len(rewards) == 6
    assert sum(rewards[-2:]) > 1.3 * sum(rewards[:2])
    assert (folder / "loop" / "trained" / "model.safetensors").exists()


def test_a_reward_of_ones_own_grades_three_answers():
    # "acb" has one letter of three in its place, "I cannot sort." the third of fourteen.
    assert example("reward", TEMPLATES / "reward").main() == [1.0, 1 / 3, 1 / 14]


def test_what_an_agent_says_is_not_trained_on():
    sample = example("agent", TEMPLATES / "agent").main()
    assert sample.status is not Status.FAILED
    assert "That is wrong. Again:" in sample.response
    assert sample.loss_mask.count(0) == len(" That is wrong. Again: ")  # one token a byte


def test_demonstrations_then_rewards_on_megatron_and_back(
    folder: Path, model_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
):
    workshop, outputs, words = Workshop(folder, model_dir("llama")), [], {}

    def forked(line: str) -> str:
        outputs.append(workshop.slimectl(*shlex.split(line)).decode())
        words[line.split()[0]] = workshop.stderr
        return outputs[-1]

    module = example("sft_then_rl")
    monkeypatch.setattr(module, "slimectl", forked)  # a process that need not import torch
    accuracy = module.main(str(workshop.model), demonstrations=32, rounds=1, held_out=8)
    tuned, learned = workshop.metrics("sft"), workshop.metrics("rl")
    epochs = [line["step"] for line in tuned if "train/loss" in line["metrics"]]
    assert epochs == [1, 2, 3, 4]  # two of two steps
    assert [line["step"] for line in learned if "train/loss" in line["metrics"]] == [1]
    assert words["run"].count("runs/sft is a run. Using its newest checkpoint, step_000004.\n") == 1
    # Evaluated before and after; the model that came back answers as the one that the run ended with.
    assert [line["step"] for line in tuned if "eval/held_out" in line["metrics"]] == [0, 4]
    last = learned[-1]["metrics"]
    measured = json.loads(outputs[-1])
    assert measured == {name: last[name] for name in measured}
    assert accuracy == last["eval/held_out_accuracy"]
    for run in ("sft", "rl"):
        assert (folder / "runs" / run / "latest" / "policy" / ".metadata").exists()
        [events] = (folder / "runs" / run / "tensorboard").iterdir()
        assert all(name in events.read_bytes() for name in (b"train/loss", b"eval/held_out"))
    assert (folder / "models" / "better" / "model.safetensors").exists()


SMALL = (
    '"run.num_rollout": 2, "run.rollout_batch_size": 4, "sft_warmup.max_steps": 2, "sft_warmup.check_interval": 5, '
    '"rollout.data": ["slimectl.recipes.spelling:prompts?size=50"], '
    '"sft_warmup.data": ["slimectl.recipes.spelling:prompts?size=50"], '
    '"eval.data.held_out": "slimectl.recipes.spelling:prompts?split=held_out&size=4"'
)
"""Settings of a run of seconds, in place of the number of rounds."""


def printed_lines(code: str, folder: Path, *, forked: bool = False) -> list[str]:
    """What code prints in a process of its own, a new interpreter or a forked one; it may write nothing to stderr."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if forked:
        done = forkserver.run_python(code, cwd=folder, env=environment)
    else:
        done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_the_code_of_the_python_page_runs(folder: Path):
    code = re.sub(r'"run.num_rollout": \d+, "sft_warmup.max_steps": \d+', SMALL, "\n".join(blocks("docs/python.md")))
    lines = printed_lines(code, folder, forked=True)
    assert [line.split()[0] for line in lines[:2]] == ["1", "2"]  # two rounds of a step each
    assert lines[2].startswith("16 abc> ")
    assert [line.split()[0] for line in lines[3:5]] == ["1", "2"]
    assert lines[5:] == [re.search(r"print\(error\)  # (.*)", code)[1]]
    assert (folder / "better" / "config.json").exists()


def test_the_python_of_the_readme_runs(folder: Path):
    [block] = blocks("README.md")
    code = re.sub(r'"run.num_rollout": \d+', SMALL, block)
    assert [line.split()[0] for line in printed_lines(code, folder)] == ["1", "2"]
