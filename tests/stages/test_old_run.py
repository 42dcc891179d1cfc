"""A run of slimectl before its settings were renamed: it goes on, and its samples are read.

tests/runs/before_0_2 was written by slimectl 0.1.0 at commit a2a6f4d, by `slimectl run` in that folder: one round of
PPO after a step of warm-up, of a two-layer model (hidden size 8, seed 7).
"""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path

import pytest
from workshop import Workshop

BEFORE = Path(__file__).parent.parent / "runs" / "before_0_2"


@pytest.fixture
def old(tmp_path: Path) -> Workshop:
    folder = tmp_path / "old"
    shutil.copytree(BEFORE, folder, symlinks=True)
    return Workshop(folder, folder / "model")


def lines(workshop: Workshop) -> list[dict]:
    return [json.loads(line) for line in (workshop.folder / "run" / "metrics.jsonl").read_text().splitlines()]


def test_it_goes_on_by_its_old_run_toml(old: Workshop):
    keys = tomllib.loads((old.folder / "run" / "run.toml").read_text())
    assert (keys["run"]["ahead"], keys["eval"]["skip_before_train"], keys["algorithm"]["critic"]) == (1, True, "own")
    before = lines(old)
    shown = old.slimectl("settings", "show", "-c", "run/run.toml").decode()
    values = {line.split()[0]: line.split()[1] for line in shown.splitlines()}
    expected = {
        "run.async_level": "1",
        "run.max_logprob_mismatch": "0.25",
        "run.on_logprob_mismatch": '"stop"',
        "sft_warmup.target_accuracy": "0.5",
        "eval.before_train": "false",
        "train.backend": '"fsdp"',
        "train.share_prompt_prefix": "false",
        "engine.backend": '"embedded"',
        "algorithm.critic": '"separate"',
    }
    assert {name: values[name] for name in expected} == expected
    old.slimectl("run", "--resume", "run", "-s", "run.num_rollout=2")
    assert "resuming" in old.stderr
    assert "warm" not in old.stderr  # the warm-up's folder counts
    after = lines(old)
    assert after[: len(before)] == before
    assert [line["rollout_id"] for line in after if "train/step" in line["metrics"]] == [1, 2]
    step = old.folder / "run" / "step_000002"
    model = {path.name for path in old.model.iterdir()}
    for part in ("policy", "critic"):
        assert {path.name for path in (step / part).iterdir()} - {"README.md"} == model  # the policy has a card
        assert {path.name for path in (step / "trainer" / part).iterdir()} == {"optimizer.safetensors", "trainer.json"}


def test_vllm_does_not_get_an_optimizer_beside_the_weights(old: Workshop):
    options = ("--engine", "vllm", "--model", "run", "--data", "prompts.jsonl", "--dry-run")
    shown = old.slimectl("rollout", *options, code=1).decode()
    assert "step_000001/policy/optimizer.safetensors: written by an earlier version of slimectl next" in shown


def test_inspect_and_score_read_its_samples(old: Workshop):
    samples = "run/step_000001/samples.jsonl"
    assert old.slimectl("inspect", "run")
    assert old.slimectl("inspect", samples)
    scored = old.slimectl("score", samples, "--rm-type", "exact").splitlines()
    assert [json.loads(line)["reward"] for line in scored] == [0.0] * 4
