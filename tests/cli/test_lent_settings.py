"""A run given as a model lends its template, its sampling and its verifier; what the user gives comes first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slimectl.data.lent_settings import MEASURED, ROLLOUT, lent_layer
from slimectl.settings.layers import Layer, nested

SETTINGS = """
[rollout]
data = ["{data}"]
temperature = 0.7
max_response_len = 12
n_samples_per_prompt = 4
[score]
custom_rm_path = "reward.py:reward"
[eval]
temperature = 0.0
[run]
name = "a"
[train]
lr = 1e-3
"""
TEXTS, CHATS = '{"prompt": "cat>"}\n', '{"prompt": [{"role": "user", "content": "cat"}]}\n'


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run in runs/a, whose prompts are texts that have no chat template around them."""
    step = tmp_path / "runs" / "a" / "step_000003"
    (step / "policy").mkdir(parents=True)
    (step.parent / "manifest.json").write_text('{"slimectl": "0.2.0", "stage": "run"}')
    (step.parent / "run.toml").write_text(SETTINGS.format(data="texts.jsonl"))
    (step.parent / "latest").symlink_to(step.name)
    for name, text in {"texts.jsonl": TEXTS, "chats.jsonl": CHATS, "reward.py": ""}.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def lent(model: str, keys: Any = MEASURED, **given: Any) -> dict[str, Any]:
    """What the run of a model lends beside `given`, where a__b is the setting a.b."""
    values = {name.replace("__", "."): value for name, value in given.items()}
    layer = lent_layer([Layer("flag", nested({"model.path": model, **values}))], keys)
    return {} if layer is None else {f"{s}.{key}": v for s, keys in layer.values.items() for key, v in keys.items()}


SAMPLING = {"rollout.apply_chat_template": False, "rollout.temperature": 0.7, "rollout.max_response_len": 12}
WHOLE = {**SAMPLING, "score.custom_rm_path": "reward.py:reward", "eval.temperature": 0.0}


@pytest.mark.parametrize("model", ["runs/a", "runs/a/latest", "runs/a/step_000003", "runs/a/step_000003/policy"])
def test_a_run_and_its_checkpoints_lend_how_it_was_trained(project: Path, model: str):
    assert lent(model) == WHOLE
    assert lent(model, ROLLOUT) == SAMPLING


@pytest.mark.parametrize(
    ("given", "dropped"),
    [
        ({"rollout__max_response_len": 5}, {"rollout.max_response_len"}),
        ({"rollout__temperature": 0.1}, {"rollout.temperature", "eval.temperature"}),
        ({"eval__temperature": 0.1}, {"eval.temperature"}),
        ({"score__rm_type": "math"}, {"score.custom_rm_path"}),
        ({"rollout__apply_chat_template": True}, {"rollout.apply_chat_template"}),
    ],
)
def test_what_is_given_replaces_its_counterparts(project: Path, given: dict[str, Any], dropped: set[str]):
    assert lent("runs/a", **given) == {name: value for name, value in WHOLE.items() if name not in dropped}


def test_a_run_on_chats_does_not_turn_the_template_off(project: Path):
    (project / "runs" / "a" / "run.toml").write_text(SETTINGS.format(data="chats.jsonl"))
    assert lent("runs/a", ROLLOUT) == {"rollout.temperature": 0.7, "rollout.max_response_len": 12}


def test_paths_start_from_the_folder_of_the_run(project: Path, monkeypatch: pytest.MonkeyPatch):
    (project / "elsewhere").mkdir()
    monkeypatch.chdir(project / "elsewhere")
    assert lent("../runs/a") == {**WHOLE, "score.custom_rm_path": f"{project}/reward.py:reward"}


def test_a_model_of_no_run_gets_nothing(project: Path):
    (project / "model").mkdir()
    assert lent("model") == lent("no/such") == {}
