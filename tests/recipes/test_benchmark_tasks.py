"""Tasks of `slimectl bench` are frozen: their files, their settings and their held-out prompts."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from slimectl.errors import SettingsError
from slimectl.recipes import benchmark
from slimectl.settings.effects import DEPENDENCIES
from slimectl.settings.keys import settings_toml
from slimectl.types import Prompt

DIGESTS = {
    "quickstart 1": "4a245033a2c0b5e6ceb0c6d6278085f3ccece3835c6725438156063e871467f8",
    "smollm2 2": "2789d7d7cb8ae14f93e8b7e1b4a93c88c84c81cec1e5be0593576eb76b6de631",
}
"""SHA-256 of the files by name and version. After a change of one, raise its version and give its figures anew in
benchmarks/RESULTS.md; where a setting was only renamed, the version stays."""

TASK = """
[benchmark]
name = "tiny"
dataset = "small"
accuracy = 0.5
[eval.data]
small = "prompts.jsonl"
[run]
num_rollout = 2
"""


def task(tmp_path: Path, text: str = TASK) -> benchmark.BenchmarkTask:
    file = tmp_path / "tiny.toml"
    file.write_text(text)
    return benchmark.load(str(file))


@pytest.mark.parametrize("name", benchmark.names())
def test_the_files_of_a_version_do_not_change(name: str):
    content = (benchmark.FOLDER / f"{name}.toml").read_bytes()
    assert hashlib.sha256(content).hexdigest() == DIGESTS[benchmark.load(name).title]


@pytest.mark.parametrize("name", benchmark.names())
def test_a_task_sets_no_key_without_an_effect(name: str):
    """Such a key would be refused as soon as its default changes."""
    task = benchmark.load(name)
    settings, values = task.settings(), task.layer.values
    for dependency in DEPENDENCIES:
        fields = type(getattr(settings, dependency.section)).model_fields
        keys = set(dependency.keys or fields) & set(fields) & set(values.get(dependency.section, {}))
        assert not keys or dependency.acts(settings), sorted(keys)


def test_a_task_has_the_settings_of_its_file_whatever_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    before = settings_toml(benchmark.load("quickstart").settings())
    monkeypatch.setenv("SLIMECTL_TRAIN_LR", "0.1")
    monkeypatch.chdir(tmp_path)
    Path("slimectl.toml").write_text("[train]\nlr = 0.2\n")
    assert settings_toml(benchmark.load("quickstart").settings()) == before
    assert benchmark.load("quickstart").settings({"run.seed": 7}).run.seed == 7


def test_a_task_of_a_file_has_defaults_for_what_it_leaves_out(tmp_path: Path):
    tiny = task(tmp_path)
    assert (tiny.title, tiny.metric, tiny.target.seeds, tiny.target.threads) == (
        "tiny 1", "eval/small_accuracy", [1, 2, 3], 1,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("[benchmark]", "[bench]", r"tiny\.toml: no \[benchmark\] table"),
        (
            'dataset = "small"',
            'dataset = "large"',
            r"benchmark\.dataset: 'large' is not a dataset in eval\.data \(small\)",
        ),
        ("num_rollout = 2", "", r"run\.num_rollout is not set"),
        ("num_rollout = 2", "num_rollout = 2\nasync_level = 1", r"run\.async_level must be 0"),
        ("accuracy = 0.5", "accuracy = 50", r"benchmark\.accuracy: Input should be less than or equal to 1"),
        ("accuracy = 0.5", "accuracy = 0.5\nsteps = 3", r"benchmark\.steps: Extra inputs are not permitted"),
        ("num_rollout = 2", "num_rolout = 2", r"Did you mean run\.num_rollout"),
    ],
)
def test_a_file_that_is_no_task_is_refused(tmp_path: Path, before: str, after: str, words: str):
    with pytest.raises(SettingsError, match=words):
        task(tmp_path, TASK.replace(before, after))


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(SettingsError, match=r"unknown task 'quickstrat'\. Did you mean quickstart\?"):
        benchmark.load("quickstrat")


def test_the_digest_is_of_texts_and_labels_in_their_order():
    prompts = [Prompt("a", "b", metadata={"c": 1}), Prompt("d", None)]
    assert benchmark.digest(prompts) == hashlib.sha256(b'["a", "b"]\n["d", null]\n').hexdigest()
    assert benchmark.digest(prompts[::-1]) != benchmark.digest(prompts)
