"""Functions that settings name are called from Python too, where nobody hands them over."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import slimectl
from slimectl.settings import Settings
from slimectl.types import Sample, Status

FUNCTIONS = """
def advantages(args, rollout_data):
    rollout_data["advantages"] = [[7.0] * length for length in rollout_data["response_lengths"]]

def look(args, sample, rollout_id, evaluation):
    sample.metadata["seen"] = [rollout_id, evaluation]

def reward(sample):
    return float(sample.metadata["seen"] == [0, True])
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(FUNCTIONS)
    return f"{tmp_path}/own.py"


def settings(model: Path, **sections: dict[str, object]) -> Settings:
    sizes: dict[str, dict[str, object]] = {
        "model": {"path": str(model)},
        "run": {"rollout_batch_size": 2},
        "rollout": {"n_samples_per_prompt": 2, "max_response_len": 4},
    }
    return Settings.model_validate({name: sizes.get(name, {}) | sections.get(name, {}) for name in sizes | sections})


def test_train_calls_the_function_that_estimates_advantages(model_dir: Callable[..., Path], own: str):
    given = settings(model_dir(), train={"custom_advantage_function_path": f"{own}:advantages"})
    samples = [
        Sample(i // 2, i, tokens=[65, 66, 70 + i], response_length=1, reward=float(i % 2), status=Status.COMPLETED)
        for i in range(4)
    ]
    (report,) = slimectl.train(samples, given)
    assert report.metrics["rollout/advantages"] == 7.0


def test_evaluate_calls_the_hook_of_samples(model_dir: Callable[..., Path], own: str, tmp_path: Path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a", "label": "b"}\n' * 2)
    given = settings(
        model_dir(),
        rollout={"sample_hook_path": [f"{own}:look"]},
        score={"custom_rm_path": f"{own}:reward"},
        eval={"data": {"mine": str(tmp_path / "prompts.jsonl")}},
    )
    assert slimectl.evaluate(given)["eval/mine_accuracy"] == 1.0
