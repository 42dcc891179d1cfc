"""Every hook that returns or sets numbers takes numpy's as it takes Python's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slimectl.runtime.run import TrainingRun
from slimectl.runtime.stage_functions import load_settings

FUNCTIONS = """
import numpy as np
from slimectl.types import Sample

def rows():
    for i in range(4):
        metadata = {"k": np.float32(0.5), "a": np.arange(2), "flag": np.bool_(True)}
        yield {"prompt": f"say {i}", "label": np.int64(i), "metadata": metadata, "difficulty": np.float32(0.25)}

async def generate(sample, sampling_params, generate):
    params = {**sampling_params, "max_new_tokens": np.int64(3), "temperature": np.float32(0.5)}
    answer = await generate(sample.tokens, params)
    log_probs = np.array(answer.log_probs, dtype=np.float32)
    sample.append_response_tokens(np.array(answer.tokens), log_probs=log_probs, text=answer.text)
    sample.status, sample.reward, sample.metadata["n"] = "completed", np.float32(0.5), np.int64(3)
    return sample

def set_all(sample):
    sample.tokens, sample.response, sample.response_length = np.array([*sample.tokens, 65, 66]), "AB", np.int64(2)
    sample.loss_mask = np.array([True, False])
    sample.rollout_log_probs = np.array([-1.0, -2.0], dtype=np.float32)
    sample.status, sample.reward = "completed", {"score": np.bool_(True)}
    return sample

def change(sample):
    sample.metadata["n"], sample.loss_mask = np.int64(3), [np.int64(1)] * sample.response_length

def keep(samples):
    return np.bool_(True), "reason"

def leave_out(data):
    for group in data:
        for sample in group:
            sample.remove_sample = np.bool_(False)

def shape(samples):
    return [np.float32(0.5)] * len(samples), [np.bool_(True)] * len(samples)

def log(samples, rollout_extra_metrics):
    rollout_extra_metrics["rollout/mine"] = np.float32(0.5)
    return np.bool_(False)

def log_eval(extra_metrics):
    extra_metrics["eval/mine"] = np.float32(0.5)
    return np.bool_(False)

def advantages(rollout_data):
    rollout_data["advantages"] = [[np.float32(0.5)] * length for length in rollout_data["response_lengths"]]

def change_rows(rollout_data):
    rollout_data["loss_masks"] = [[np.bool_(True)] * length for length in rollout_data["response_lengths"]]

def convert(samples):
    return {
        "tokens": [np.array(sample.tokens) for sample in samples],
        "response_lengths": np.array([sample.response_length for sample in samples]),
        "rewards": [np.float32(0.5)] * len(samples),
        "loss_masks": [[np.int64(1)] * sample.response_length for sample in samples],
    }

def round_of(rollout_id, data_source, evaluation):
    groups = data_source.get_samples(2)
    for sample in (sample for group in groups for sample in group):
        set_all(sample)
        sample.reward = np.float32(rollout_id)
    return groups, {"mine": np.float32(0.5)}

class Source:
    def __init__(self, args):
        self.n = np.int64(0)
    def get_samples(self, n):
        self.n += 1
        return [[Sample(prompt=f"say {self.n}", label=np.int64(self.n)) for _ in range(2)]]
    def add_samples(self, groups): ...
    def save(self, rollout_id):
        return {"n": self.n}
    def load(self, rollout_id, state):
        self.n = np.int64(state["n"])
    def __len__(self):
        return 8
"""
MINE = "{folder}/functions_of_numpy.py:"
CASES: dict[str, dict[str, Any]] = {
    "rows": {"rollout.data": ["functions_of_numpy:rows"]},
    "generate": {"rollout.custom_generate_function_path": f"{MINE}generate", "score.rm_type": None},
    "set_all": {
        "rollout.custom_generate_function_path": f"{MINE}set_all", "score.rm_type": None, "score.reward_key": "score",
    },
    "change": {"rollout.sample_hook_path": [f"{MINE}change"]},
    "keep": {"rollout.dynamic_sampling_filter_path": f"{MINE}keep"},
    "leave_out": {"rollout.sample_filter_path": f"{MINE}leave_out"},
    "shape": {"score.custom_reward_post_process_path": f"{MINE}shape"},
    "log": {"track.custom_rollout_log_function_path": f"{MINE}log"},
    "log_eval": {
        "track.custom_eval_rollout_log_function_path": f"{MINE}log_eval",
        "eval.data": {"small": "{folder}/prompts.jsonl"},
    },
    "advantages": {"train.custom_advantage_function_path": f"{MINE}advantages"},
    "change_rows": {"rollout.data_postprocess_path": f"{MINE}change_rows"},
    "convert": {"train.custom_convert_samples_to_train_data_path": f"{MINE}convert"},
    "round_of": {"rollout.function_path": f"{MINE}round_of", "score.rm_type": None},
    "Source": {"rollout.data_source_path": f"{MINE}Source", "rollout.data": []},
}  # fmt: skip
RESULTS = {
    "rows": ("samples", ("metadata", {"k": 0.5, "a": [0, 1], "flag": True})),
    "generate": ("samples", ("reward", 0.5)),
    "set_all": ("samples", ("loss_mask", [1, 0])),
    "change": ("samples", ("metadata", {"n": 3})),
    "log": ("tracked", ("rollout/mine", 0.5)),
    "log_eval": ("tracked", ("eval/mine", 0.5)),
    "shape": ("metrics", ("rollout/raw_reward", 0.5)),
    "round_of": ("metrics", ("rollout/mine", 0.5)),
    "Source": ("samples", ("label", 1)),
}
"""Where a number of the function's stands in the first line of a file of the run."""


@pytest.mark.parametrize("name", CASES)
def test_numbers_and_bools_of_numpy_count(
    tmp_path: Path, model_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, name: str
):
    (tmp_path / "functions_of_numpy.py").write_text(FUNCTIONS)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "say one", "label": "one"}\n')
    monkeypatch.syspath_prepend(tmp_path)
    values = {
        "model.path": str(model_dir("llama")), "rollout.data": ["{folder}/prompts.jsonl"],
        "score.rm_type": "contains", "run.dir": "{folder}/runs", "run.num_rollout": 1, "run.rollout_batch_size": 2,
        "run.keep_samples": True, "rollout.n_samples_per_prompt": 2, "rollout.max_response_len": 4,
        "rollout.apply_chat_template": False, "track.with": ["jsonl"], "eval.before_train": False,
    }  # fmt: skip
    settings = load_settings(None, json.loads(json.dumps(values | CASES[name]).replace("{folder}", str(tmp_path))))
    assert TrainingRun(settings).execute()
    if name in RESULTS:
        kind, (key, value) = RESULTS[name]
        run = tmp_path / "runs" / "run"
        files = {"samples": run / "step_000001" / "samples.jsonl", "tracked": run / "tracked.jsonl"}
        lines = [json.loads(line) for line in files.get(kind, run / "metrics.jsonl").read_text().splitlines()]
        rows = [line if kind == "samples" else line["metrics"] for line in lines]
        assert next(row[key] for row in rows if key in row) == value
