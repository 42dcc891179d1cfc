"""Penalties of [rollout]: what their log-probabilities are, and what training is told about them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, RepetitionPenaltyLogitsProcessor
from workshop import Workshop

from slimectl import load_settings
from slimectl.errors import SettingsError
from slimectl.hooks import FlatSettings
from slimectl.migrate.slime.generation import GenerateState
from slimectl.settings import Settings
from slimectl.stages.mismatch import LogProbCheck
from slimectl.types import StepReport

PENALTIES = ["-s", "rollout.repetition_penalty=1.5", "-s", "rollout.frequency_penalty=0.5"]


def test_log_probabilities_of_a_rollout_are_those_of_the_penalized_distribution(workshop: Workshop):
    model, reward = ["--model", str(workshop.model)], ["--custom-rm-path", "reward.py:reward"]
    workshop.slimectl("rollout", "--data", "prompts.jsonl", *model, *PENALTIES, "--out", "s.jsonl")
    reference = AutoModelForCausalLM.from_pretrained(workshop.model, dtype=torch.float32)
    for line in (workshop.folder / "s.jsonl").read_text().splitlines()[:8]:
        row = json.loads(line)
        start = len(row["tokens"]) - row["response_length"]
        with torch.no_grad():
            logits = reference(torch.tensor([row["tokens"]])).logits[0]
        for place, log_prob in enumerate(row["rollout_log_probs"]):
            response = row["tokens"][start : start + place]
            logits_1V = logits[start + place - 1][None].clone()
            for token in response:
                logits_1V[0, token] -= 0.5  # once for each occurrence
            if response:
                logits_1V = RepetitionPenaltyLogitsProcessor(1.5)(torch.tensor([response]), logits_1V)  # type: ignore[arg-type]
            expected = logits_1V.log_softmax(-1)[0, row["tokens"][start + place]].item()
            assert log_prob == pytest.approx(expected, abs=1e-4)
    workshop.slimectl("score", "s.jsonl", *reward, "--out", "r.jsonl")
    whole = ["-s", "run.rollout_batch_size=8", "-s", "train.max_tokens_per_gpu=4096"]
    workshop.slimectl("train", "r.jsonl", *model, *whole, *PENALTIES, "--save", "biased")
    assert "Set algorithm.use_tis = true" in workshop.stderr
    out = workshop.slimectl(
        "train", "r.jsonl", *model, *whole, *PENALTIES, "-s", "algorithm.use_tis=true", "--save", "b"
    )
    assert "penalized" not in workshop.stderr
    assert json.loads(out.splitlines()[0])["metrics"]["train/tis"] != pytest.approx(1.0, abs=1e-3)


def warnings(caplog: pytest.LogCaptureFixture, **sections: Any) -> list[str]:
    caplog.clear()
    LogProbCheck(Settings.model_validate({"algorithm": {"name": "grpo"}, **sections}))
    return [record.getMessage() for record in caplog.records]


def test_training_on_penalized_responses_warns_unless_something_corrects_for_it(caplog: pytest.LogCaptureFixture):
    penalty = {"rollout": {"repetition_penalty": 1.1}}
    (line,) = warnings(caplog, **penalty)
    assert line == (
        "rollout.repetition_penalty = 1.1: responses come from the penalized distribution, but the policy is trained "
        "without penalties. Set algorithm.use_tis = true to correct for it."
    )
    for key in ("use_tis", "use_rollout_logprobs"):
        assert warnings(caplog, **penalty, algorithm={"name": "grpo", key: True}) == []
    (line,) = warnings(caplog, **penalty, algorithm={"name": "grpo", "use_tis": True}, engine={"backend": "vllm"})
    assert line.endswith("so algorithm.use_tis cannot correct it.")
    assert warnings(caplog, **penalty, algorithm={"name": "sft"}) == []
    assert warnings(caplog) == []


def test_a_difference_that_a_penalty_explains_stops_no_run():
    report = StepReport(1, 0, "1", {"train/train_rollout_logprob_abs_diff": 0.7})
    sections: dict[str, Any] = {"algorithm": {"name": "grpo"}, "run": {"on_logprob_mismatch": "stop"}}
    with pytest.raises(Exception, match=r"differ by 0\.700"):
        LogProbCheck(Settings.model_validate(sections)).check(report)
    LogProbCheck(Settings.model_validate({**sections, "rollout": {"presence_penalty": 0.5}})).check(report)


def test_a_resumed_response_excludes_penalties():
    with pytest.raises(SettingsError, match=r"rollout\.partial_rollout and rollout\.presence_penalty cannot be"):
        load_settings("quickstart", {"rollout.partial_rollout": True, "rollout.presence_penalty": 0.5})


def test_functions_written_for_slime_get_the_penalties_that_act(workshop: Workshop):
    rollout = {"presence_penalty": 0.5, "frequency_penalty": 0.0}
    settings = Settings.model_validate(
        {"algorithm": {"name": "grpo"}, "model": {"path": str(workshop.model)}, "rollout": rollout}
    )
    params = GenerateState(FlatSettings(settings)).sampling_params
    assert params["presence_penalty"] == 0.5
    assert "frequency_penalty" not in params
