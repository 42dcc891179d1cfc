"""`--json` has the facts of the text, for programs: an object, or one a line."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slimectl.architectures import cards
from slimectl.cli.app import app
from slimectl.data.metrics_catalogue import CATALOGUE
from slimectl.settings.keys import setting_names

SAMPLE = {"group_index": 0, "index": 0, "prompt": "1+1", "tokens": [1, 2], "response": "b", "response_length": 1,
          "label": "2", "reward": 0.5, "status": "completed"}  # fmt: skip


def output(*words: str) -> str:
    result = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout


def lines(*words: str) -> list[dict]:
    return [json.loads(line) for line in output(*words, "--json").splitlines()]


def test_lists_are_an_object_a_line():
    assert [metric["name"] for metric in lines("metrics")] == [metric.name for metric in CATALOGUE]
    assert [card["name"] for card in lines("models")] == cards.names()
    assert lines("models", "show", "tiny")[0]["parameters"] == 886_272
    assert {"check": "python", "fine": True}.items() <= lines("doctor")[0].items()


def test_a_word_of_no_metric_is_an_error():
    result = CliRunner().invoke(app, ["metrics", "nothing_like_it"], catch_exceptions=False)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "nothing_like_it: no metric name contains this" in result.stderr


def test_settings_have_their_value_and_origin_and_no_secret(monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in os.environ if name.startswith("SLIMECTL_")]:
        monkeypatch.delenv(name)
    words = ["-s", "train.lr=0.5", "-s", "rollout.seed=42"]
    shown = json.loads(output("settings", "show", "--json", *words))
    assert shown["train.lr"] == {"value": 0.5, "origin": "command line"}
    assert shown["train.clip_grad"] == {"value": 1.0, "origin": "default"}
    assert {key for key in shown if not key.startswith("algorithm.")} <= set(setting_names())
    assert list(json.loads(output("settings", "show", "--json", "--changed", *words))) == ["train.lr"]
    secret = CliRunner().invoke(app, ["settings", "show", "--json", "-s", "engine.api_key=hunter2-correct"])
    assert "hunter2" not in secret.stdout


def test_inspect_says_what_a_run_a_model_a_folder_and_samples_are(tmp_path: Path):
    (tmp_path / "samples.jsonl").write_text(2 * (json.dumps(SAMPLE) + "\n"))
    samples = json.loads(output("inspect", str(tmp_path / "samples.jsonl"), "--json", "--rows", "1"))
    assert (samples["kind"], samples["samples"], samples["prompts"], samples["mean_reward"]) == ("samples", 2, 1, 0.5)
    assert [row["response"] for row in samples["rows"]] == ["b"]
    assert json.loads(output("inspect", str(tmp_path), "--json"))["entries"] == ["samples.jsonl"]
    run = tmp_path / "run"
    (run / "step_000002").mkdir(parents=True)
    (run / "run.toml").touch()
    metrics = [{"rollout/raw_reward": 0.25}, {"eval/a_accuracy": 0.5}, {"rollout/raw_reward": 0.75}]
    written = [json.dumps({"step": i, "rollout_id": i, "metrics": each}) for i, each in enumerate(metrics)]
    (run / "metrics.jsonl").write_text("\n".join(written) + '\n{"rollout_id": 3')
    found = json.loads(output("inspect", str(run), "--json"))
    assert (found["kind"], found["rounds"], found["points"]) == ("run", 2, [[0, 0.25], [2, 0.75]])
    assert found["evaluations"] == [{"round": 1, "name": "a_accuracy", "value": 0.5}]
    assert (found["checkpoints"], found["manifest"]) == ({"step_000002": []}, None)


def test_a_mask_is_shown_to_people_only(tmp_path: Path):
    refused = CliRunner().invoke(app, ["inspect", str(tmp_path), "--mask", "--json"])
    assert refused.exit_code == 2
    assert refused.stderr.startswith("slimectl: --mask and --json cannot be combined")


@pytest.mark.parametrize("command", ["metrics", "models"])
def test_without_it_they_are_text(command: str):
    assert not output(command).startswith("{")
