"""Datasets in a file of their own."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from slimectl.errors import SettingsError
from slimectl.settings.keys import settings_toml
from slimectl.settings.layers import Layer, from_assignments, from_eval_config
from slimectl.settings.loading import resolve

YAML = """
eval:
  defaults:
    n_samples_per_eval_prompt: 2
    temperature: 0.7
    top_k: null
  datasets:
    - name: aime
      path: aime.jsonl
      rm_type: deepscaler
      n_samples_per_eval_prompt: 16
    - name: gpqa
      path: gpqa.jsonl
      rollout_max_response_len: 512
"""
TOML = """
[defaults]
n_samples_per_prompt = 2
temperature = 0.7
[datasets.aime]
path = "aime.jsonl"
rm_type = "deepscaler"
n_samples_per_prompt = 16
[datasets.gpqa]
path = "gpqa.jsonl"
max_response_len = 512
"""


@pytest.mark.parametrize(("name", "text"), [("eval.yaml", YAML), ("eval.toml", TOML)])
def test_yaml_and_toml_say_the_same(tmp_path: Path, name: str, text: str):
    (tmp_path / name).write_text(text)
    given = resolve([from_eval_config(tmp_path / name)]).settings.eval
    assert (given.n_samples_per_prompt, given.temperature, given.top_k) == (2, 0.7, None)
    assert given.sources == {"aime": "aime.jsonl", "gpqa": "gpqa.jsonl"}
    aime, gpqa = given.datasets["aime"], given.datasets["gpqa"]
    assert (aime.rm_type, aime.n_samples_per_prompt, aime.max_response_len) == ("deepscaler", 16, None)
    assert (gpqa.rm_type, gpqa.n_samples_per_prompt, gpqa.max_response_len) == (None, None, 512)


def test_a_setting_of_one_dataset_may_be_changed_on_the_command_line(tmp_path: Path):
    (tmp_path / "eval.toml").write_text(TOML)
    layers = [from_eval_config(tmp_path / "eval.toml"), from_assignments(["eval.data.aime.temperature=0.1"])]
    aime = resolve(layers).settings.eval.datasets["aime"]
    assert (aime.temperature, aime.path, aime.rm_type) == (0.1, "aime.jsonl", "deepscaler")


def test_tables_written_down_resolve_to_themselves(tmp_path: Path):
    (tmp_path / "eval.toml").write_text(TOML)
    given = resolve([from_eval_config(tmp_path / "eval.toml"), from_assignments(["eval.data.b=b.jsonl"])]).settings
    text = settings_toml(given)
    assert resolve([Layer("run.toml", tomllib.loads(text))]).settings.eval == given.eval
    assert "top_p" not in text.partition("[eval.data.aime]")[2].partition("[")[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("datasets: [", "not valid YAML"),
        ("- a", "needs `defaults` and `datasets`"),
        ("eval: 3", "needs `defaults` and `datasets`"),
        ("defaults: {temperature: 1}", "no datasets"),
        ("default_: {}\ndatasets: [{name: a, path: b}]", "default_: unknown key"),
        ("datasets: [{name: a}]", "each must be a table with `name` and `path`"),
        ("datasets: [aime.jsonl]", "each must be a table with `name` and `path`"),
    ],
)
def test_what_is_no_evaluation_file_is_refused(tmp_path: Path, text: str, words: str):
    (tmp_path / "eval.yaml").write_text(text)
    with pytest.raises(SettingsError, match=words) as refused:
        from_eval_config(tmp_path / "eval.yaml")
    assert "\n" not in str(refused.value)


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(SettingsError, match="no such evaluation file"):
        from_eval_config(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("temprature: 1", r"eval\.data: a\.temprature: unknown setting\. Did you mean temperature\?"),
        ("temperature: hot", r"eval\.data: a\.temperature: .*number"),
        ("n_samples_per_prompt: 0", r"eval\.data: a\.n_samples_per_prompt: .*greater than or equal to 1"),
    ],
)
def test_a_wrong_key_of_a_dataset_is_named(tmp_path: Path, given: str, words: str):
    (tmp_path / "eval.yaml").write_text(f"datasets: [{{name: a, path: b, {given}}}]")
    with pytest.raises(SettingsError, match=words) as refused:
        resolve([from_eval_config(tmp_path / "eval.yaml")])
    assert "\n" not in str(refused.value)
