"""The sampling temperature travels with the samples, so that no stage takes their log-probabilities at another."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from workshop import Workshop

from slimectl import Prompt, Trainer, load_settings
from slimectl.errors import RecordError
from slimectl.settings import Settings
from slimectl.stages.training_batch import require_temperature
from slimectl.types import Sample


def settings_of(**changes: Any) -> Settings:
    return Settings.model_validate({"algorithm": {"name": "grpo"}, **changes})


@pytest.mark.slow
def test_rollout_score_and_train_agree_on_it_or_name_both(workshop: Workshop):
    model, reward = ["--model", str(workshop.model)], ["--custom-rm-path", "reward.py:reward"]
    cool = ["-s", "rollout.temperature=0.5"]
    workshop.slimectl("rollout", "--data", "prompts.jsonl", *model, "--temperature", "0.5", "--out", "s.jsonl")
    first = json.loads((workshop.folder / "s.jsonl").read_text().splitlines()[0])
    assert first["rollout_temperature"] == 0.5
    reference = ["--reference", str(workshop.model), "--out", "r.jsonl"]
    both = "was sampled at temperature 0.5, but rollout.temperature is 1. Add -s rollout.temperature=0.5"
    workshop.slimectl("score", "s.jsonl", *reward, *reference, code=3)
    assert workshop.stderr == f"slimectl: s.jsonl:1: sample 0: {both}\n"
    workshop.slimectl("score", "s.jsonl", *reward, *cool, *reference)
    whole = ["-s", "run.rollout_batch_size=8", "-s", "algorithm.kl_loss_coef=0.1"]
    workshop.slimectl("train", "r.jsonl", *model, *whole, "--save", "refused", code=3)
    assert both in workshop.stderr
    out = workshop.slimectl("train", "r.jsonl", *model, *whole, *cool, "--save", "saved")
    metrics = json.loads(out.splitlines()[0])["metrics"]
    assert metrics["train/train_rollout_logprob_abs_diff"] < 1e-4
    assert metrics["train/kl_loss"] < 1e-6  # the reference is the policy


def test_a_reference_for_pairs_has_temperature_one_whatever_the_answers_had(workshop: Workshop):
    row = {"prompt": "ab", "tokens": [97, 98, 99], "response_length": 1, "response": "c", "rollout_temperature": 0.5}
    (workshop.folder / "s.jsonl").write_text(json.dumps(row) + "\n")
    pairs = ["-s", "algorithm.name=dpo", "-s", "score.rm_type=random"]
    out = workshop.slimectl("score", "s.jsonl", *pairs, "--reference", str(workshop.model))
    assert json.loads(out)["ref_temperature"] == 1.0


@pytest.mark.parametrize(
    ("changes", "sample", "message"),
    [
        ({"rollout": {"temperature": 0.5}}, {"rollout_temperature": 0.5}, None),
        ({"rollout": {"temperature": 0.5}}, {}, None),  # of another program
        ({"algorithm": {"name": "dpo"}}, {"rollout_temperature": 0.5, "ref_temperature": 1.0}, None),
        (
            {"algorithm": {"name": "dpo"}, "rollout": {"temperature": 0.5}},
            {"ref_temperature": 0.5},
            r"0\.5, but dpo uses them at 1\. Run `slimectl score --reference` with -s algorithm\.name=dpo$",
        ),
        (
            {"algorithm": {"name": "grpo", "kl_loss_coef": 0.1}},
            {"rollout_temperature": 1.0, "ref_temperature": 0.5},
            r"ref_log_probs are at temperature 0\.5, but rollout\.temperature is 1\.",
        ),
    ],
)
def test_samples_of_another_temperature_are_refused(
    changes: dict[str, Any], sample: dict[str, float], message: str | None
):
    samples, settings = [Sample(index=3, **sample)], settings_of(**changes)  # type: ignore[arg-type]
    if message is None:
        require_temperature(samples, settings)
        return
    with pytest.raises(RecordError, match=message):
        require_temperature(samples, settings)


def test_labels_are_imitated_at_temperature_one_whatever_the_rollout_has(
    model_dir: Callable[[str], Path], tmp_path: Path
):
    losses = []
    for temperature in (1.0, 0.5):
        changes = {"algorithm.name": "sft", "rollout.temperature": temperature, "model.path": str(model_dir("llama"))}
        with Trainer(load_settings(None, changes)) as trainer:
            (report,) = trainer.train([Prompt("say one", label="one"), Prompt("say two", label="two", index=1)])
        losses.append(report.metrics["train/sft_loss"])
    assert losses[0] == losses[1]
