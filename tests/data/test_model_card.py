"""Model cards: metadata that the hub reads, nothing that must not be published, and a user's card stays."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard

from slimectl.data.manifest import check_integrity, integrity_error
from slimectl.data.model_card import TrainingProgress, base_model, convert_card, model_card, read_metadata, write_cards
from slimectl.data.ownership import own_files, own_run_files
from slimectl.data.run_dir import RunDir, write_folder
from slimectl.errors import SettingsError
from slimectl.settings import Layer, Settings, resolve

BASE = "---\nlicense: apache-2.0\nlanguage:\n- en\n- de\nbase_model: org/older\n---\n# Base\n"
METRICS = {
    "eval/gsm8k_accuracy": 0.75, "eval/gsm8k_accuracy_stderr": 0.02, "eval/gsm8k-pass@4": 0.9,
    "eval/own_avg_reward": 0.5,
}  # fmt: skip


def settings(**sections: object) -> Settings:
    return resolve([Layer("test", sections)]).settings  # type: ignore[arg-type]


@pytest.fixture
def cached(tmp_path: Path) -> Path:
    """The snapshot of a model in a Hugging Face cache."""
    folder = tmp_path / "models--org--base-1B" / "snapshots" / "0"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "README.md").write_text(BASE)
    return folder


PROGRESS = TrainingProgress(
    30, 60, [(number, number / 30) for number in range(1, 31)],
    [(0, {"eval/gsm8k_accuracy": 0.25}), (30, METRICS)],
)  # fmt: skip


def test_the_hub_reads_the_metadata_of_a_card(cached: Path):
    wanted = settings(
        model={"path": str(cached)}, rollout={"data": ["openai/gsm8k/main/train*", "own.jsonl"]},
        eval={"data": {"gsm8k": "openai/gsm8k/main/test*", "own": "test.jsonl"}},
    )  # fmt: skip
    card = ModelCard(model_card(wanted, PROGRESS))
    data = card.data
    assert (data.base_model, data.license, data.language) == ("org/base-1B", "apache-2.0", ["en", "de"])
    assert (data.library_name, data.pipeline_tag, data.datasets) == (
        "transformers",
        "text-generation",
        ["openai/gsm8k"],
    )
    assert data.model_name == "base-1B trained with grpo"
    results = {(result.dataset_type, result.metric_type): result for result in data.eval_results or []}
    assert results.keys() == {("openai/gsm8k", "accuracy"), ("openai/gsm8k", "pass@4"), ("own", "mean_reward")}
    accuracy = results["openai/gsm8k", "accuracy"]
    assert (accuracy.metric_value, accuracy.metric_args) == (0.75, {"standard_error": 0.02})
    assert "[arXiv:2402.03300](https://arxiv.org/abs/2402.03300)" in card.text
    assert "Before you publish" not in card.text
    assert "| `gsm8k` | accuracy | 0.25 | 0.75 ± 0.02 |" in card.text
    rows = [line for line in card.text.splitlines() if line.startswith("| ") and "`" not in line]
    assert rows[2:4] == ["| 1 | 0.03333 |", "| 4 | 0.1333 |"]
    assert rows[12] == "| 30 | 1 |"


def test_an_adapter_names_its_base_and_its_library(cached: Path):
    wanted = settings(model={"path": str(cached)}, train={"lora_rank": 8}, rollout={"data": ["a.jsonl"]})
    card = ModelCard(model_card(wanted, PROGRESS, adapter=True))
    assert (card.data.library_name, card.data.base_model) == ("peft", "org/base-1B")
    assert card.data.to_dict()["base_model_relation"] == "adapter"
    assert "LoRA adapter of rank 8" in card.text
    assert "> - set `base_model_name_or_path` in adapter_config.json" in card.text


def test_a_reward_model_is_a_classifier_whatever_its_base_is(cached: Path):
    (cached / "README.md").write_text(BASE.replace("language", "pipeline_tag: text-generation\nlanguage"))
    wanted = settings(model={"path": str(cached)}, algorithm={"name": "reward_model"})
    card = ModelCard(model_card(wanted, TrainingProgress(1, 1)))
    assert card.data.pipeline_tag == "text-classification"
    assert 'rm_options = { path = "THIS_MODEL" }' in card.text


def test_what_is_not_known_is_named_and_not_guessed(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    card = ModelCard(model_card(settings(model={"path": str(tmp_path)}), TrainingProgress(1, 1)))
    assert (card.data.license, card.data.base_model, card.data.eval_results) == (None, None, None)
    assert "> - add `license:` to the block at the top" in card.text
    assert "> - add `base_model:` to the block at the top" in card.text
    assert "## Evaluation" not in card.text
    scratch = model_card(settings(model={"card": "tiny"}), TrainingProgress(1, 1))
    assert "random weights (`tiny`)" in scratch
    assert "`base_model:`" not in scratch


def test_a_model_that_is_trained_further_keeps_the_base_of_its_card(cached: Path, tmp_path: Path):
    first = tmp_path / "runs" / "a" / "step_000030"
    (first / "policy").mkdir(parents=True)
    (first / "policy" / "config.json").write_text("{}")
    write_cards(first / "policy", settings(model={"path": str(cached)}), PROGRESS)
    again = base_model(str(first))
    assert (again.name, again.value("license")) == ("org/base-1B", "apache-2.0")


def test_folders_addresses_secrets_and_names_of_runs_are_not_published(tmp_path: Path):
    wanted = settings(
        model={"path": str(tmp_path)}, run={"name": "private-name", "dir": "/home/me/runs"},
        rollout={"data": ["/home/me/data.jsonl@[:9]"], "agent": "python /home/me/agent.py"},
        score={"rm_type": "remote_rm", "rm_url": "http://10.0.0.7:8000/grade?token=abcdefgh"},
        engine={"api_key": "secret-key"}, custom={"password": "hunter22", "note": "```"},
    )  # fmt: skip
    text = model_card(wanted, PROGRESS)
    for private in (
        str(tmp_path),
        "private-name",
        "/home/me",
        "10.0.0.7",
        "secret-key",
        "hunter22",
        "abcdefgh",
        "SECRET",
    ):
        assert private not in text, private
    assert 'data = ["data.jsonl@[:9]"]' in text
    assert 'agent = "python agent.py"' in text
    assert "\n````toml\n" in text


@pytest.mark.parametrize(
    "card",
    ["no front matter", "---\n[1, 2\n---\n", "---\n- a\n---\n", "---\nlicense: [{a: b}]\nlanguage: '<script>'\n---\n",
     "---\nlicense: " + "[" * 5000 + "\n---\n", "\x00\xff"],
)  # fmt: skip
def test_a_broken_or_hostile_card_of_the_base_model_adds_nothing(tmp_path: Path, card: str):
    (tmp_path / "README.md").write_text(card)
    base = base_model(str(tmp_path))
    assert [base.value(key) for key in ("license", "language", "pipeline_tag")] == [None, None, None]
    (tmp_path / "README.md").unlink()
    os.mkfifo(tmp_path / "README.md")
    assert read_metadata(tmp_path / "README.md") == {}


def test_a_conversion_keeps_the_card_of_its_source_and_writes_one_where_there_is_none(tmp_path: Path, cached: Path):
    target = tmp_path / "target"
    target.mkdir()
    convert_card(cached, target)
    assert (target / "README.md").read_text() == BASE
    (cached / "README.md").unlink()
    convert_card(cached, target, quantize="fp8")
    written = ModelCard.load(target / "README.md")
    assert (written.data.base_model, written.data.to_dict()["base_model_relation"]) == ("org/base-1B", "quantized")
    assert "> - add `license:`" in written.text
    iteration = tmp_path / "megatron" / "iter_0000007"
    iteration.mkdir(parents=True)
    (iteration.parent / "README.md").write_text(BASE)
    convert_card(iteration, target)
    assert (target / "README.md").read_text() == BASE


def write(folder: Path, text: str) -> None:
    def fill(staged: Path) -> None:
        (staged / "README.md").write_text(text)
        (staged / "config.json").write_text("{}")

    write_folder(folder, fill)


def test_an_edited_card_is_the_users_and_stays(tmp_path: Path):
    folder = tmp_path / "model"
    write(folder, "ours")
    assert json.loads((folder / "manifest.json").read_text())["files"]["README.md"]["bytes"] == 4
    assert "README.md" in own_files(folder)
    write(folder, "ours, newer")
    assert (folder / "README.md").read_text() == "ours, newer"
    (folder / "README.md").write_text("mine")
    assert "README.md" not in own_files(folder)
    assert (check_integrity(folder, full=True), integrity_error(folder)) == (True, None)
    write(folder, "ours, newest")
    assert (folder / "README.md").read_text() == "mine"
    assert integrity_error(folder) is None
    other = tmp_path / "other"
    other.mkdir()
    (other / "README.md").write_text("mine")
    with pytest.raises(SettingsError, match="slimectl did not create it"):
        write(other, "ours")


CARDS = ("policy/README.md", "policy/adapter/README.md")


def test_pruning_a_run_removes_its_cards_but_not_those_that_were_edited(tmp_path: Path):
    run = RunDir(tmp_path / "run")
    run.start("")
    for number in (1, 2, 3):

        def fill(staged: Path) -> None:
            (staged / "policy" / "adapter").mkdir(parents=True)
            for name in ("policy/config.json", *CARDS, "state.json", "samples.jsonl"):
                (staged / name).write_text("{}")

        run.save(number, fill)
    (run.step(2) / "policy" / "README.md").write_text("mine")
    assert "step_000002/policy/README.md" not in own_run_files(run.path)
    assert "step_000003/policy/adapter/README.md" in own_run_files(run.path)
    run.prune(1)
    kept = sorted(str(path.relative_to(run.path)) for path in run.path.glob("step_*/policy/**/README.md"))
    assert (run.step(2) / "state.json").exists()
    assert kept == [
        "step_000002/policy/README.md",
        "step_000003/policy/README.md",
        "step_000003/policy/adapter/README.md",
    ]
    assert run.checkpoints() == [3]


def test_the_metadata_is_valid_yaml_whatever_a_name_contains(tmp_path: Path):
    wanted = settings(model={"path": str(tmp_path / "a: b # [c]")}, eval={"data": {"gsm8k": "own.jsonl"}})
    text = model_card(wanted, PROGRESS)
    metadata = yaml.safe_load(text.split("---\n")[1])
    assert metadata["model-index"][0]["name"] == "a: b # [c] trained with grpo"
