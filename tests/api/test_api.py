"""The Python interface: names, layers of settings, stages and runs."""

from __future__ import annotations

import ast
import asyncio
import json
import re
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
from workshop import Workshop

import slimectl
from slimectl import (
    Prompt,
    Sample,
    Sampler,
    Settings,
    SlimectlError,
    Trainer,
    create_model,
    evaluate,
    load_settings,
    prompts,
    rollout,
    run,
    score,
    train,
)
from slimectl.errors import RecordError, SettingsError

NO_EVAL = {"eval.data": {}, "eval.interval": None}


@pytest.fixture
def settings(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.chdir(workshop.folder)
    return load_settings("slimectl.toml")


def small(sample: Sample) -> float:
    answer = sample.tokens[len(sample.tokens) - sample.response_length :]
    return sum(token < 64 for token in answer) / len(answer)


def test_importing_the_package_imports_nothing_else():
    code = (
        "import sys, slimectl; print([m for m in sys.modules if m.split('.')[0] in ('slimectl', 'torch', 'pydantic')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['slimectl']"


def test_the_names_for_type_checkers_are_those_that_can_be_imported():
    stub = ast.parse(Path(slimectl.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    typed = {alias.asname for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert typed == {*slimectl.__all__} - {"__version__"}
    assert all(getattr(slimectl, name) is not None for name in slimectl.__all__)
    assert typed <= {*dir(slimectl)}
    with pytest.raises(AttributeError, match="module 'slimectl' has no attribute 'trian'"):
        slimectl.trian  # noqa: B018


def test_settings_have_the_layers_of_the_commands(
    settings: Settings, workshop: Workshop, monkeypatch: pytest.MonkeyPatch
):
    (workshop.folder / "more.toml").write_text("[train]\nlr = 0.5\nmin_lr = 0.25\n")
    monkeypatch.setenv("SLIMECTL_TRAIN_MIN_LR", "0.125")
    layered = load_settings("slimectl.toml", {"run.num_rollout": 3}, files=["more.toml"])
    assert (layered.train.lr, layered.train.min_lr, layered.run.num_rollout) == (0.5, 0.125, 3)
    assert (settings.train.lr, settings.run.num_rollout) == (1e-3, 6)
    monkeypatch.delenv("SLIMECTL_TRAIN_MIN_LR")
    assert (settings.track.with_, load_settings(values={"track.with": ["stdout"]}).track.with_) == ([], ["stdout"])


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"train.clip_hihg": 0.3}, r"train.clip_hihg: unknown setting \(values\)\. Did you mean train.clip_grad\?"),
        ({"lr": 0.3}, "lr: write a setting as section.key, e.g. train.lr"),
        ({"train.lr": "fast"}, r"train.lr: input should be a valid number.*, not 'fast' \(values\)"),
    ],
)
def test_wrong_settings_are_one_line(values: dict[str, object], words: str):
    with pytest.raises(SettingsError, match=words):
        load_settings(values=values)


def test_stages_by_hand_are_the_stages(settings: Settings, workshop: Workshop):
    questions = list(prompts(settings))
    assert sorted(prompt.label for prompt in questions)[:3] == ["eight", "five", "four"]
    samples = list(score(rollout(questions[:4], settings), settings, reward=small))
    assert [sample.group_index for sample in samples] == [prompt.index for prompt in questions[:4] for _ in range(4)]
    [report] = train(iter(samples), settings, save="better")
    assert report.metrics["rollout/raw_reward"] == pytest.approx(sum(map(small, samples)) / 16)
    assert (workshop.folder / "better" / "config.json").exists()
    with pytest.raises(SettingsError, match="better: already exists"):
        next(train(iter(samples), settings, save="better"))


def test_a_trainer_goes_on_where_another_was_saved(settings: Settings):
    samples = list(score(rollout(islice(prompts(settings), 4), settings), settings))
    with Trainer(settings) as one:
        assert [report.step for report in one.train(samples)] == [1]
        one.save("one")
        expected = [report.metrics["train/grad_norm"] for report in one.train(samples)]
    with Trainer(settings, load=Path("one")) as other:
        reports = list(other.train(samples))
    assert [report.step for report in reports] == [2]
    assert [report.metrics["train/grad_norm"] for report in reports] == expected


def test_a_new_model_replaces_a_new_one_but_no_trained_one(settings: Settings, tmp_path: Path):
    folder = create_model("tiny", tmp_path / "model", seed=1)
    first = (folder / "model.safetensors").read_bytes()
    assert (create_model("tiny", folder, seed=2) / "model.safetensors").read_bytes() != first
    with Trainer(settings) as trainer:
        trainer.save(folder, force=True)
    trained = (folder / "model.safetensors").read_bytes()
    with pytest.raises(SettingsError, match=r"model: contains a trained or converted model\. Use another folder"):
        create_model("tiny", folder)
    assert (folder / "model.safetensors").read_bytes() == trained


def test_pushed_weights_answer(settings: Settings):
    questions = list(islice(prompts(settings), 4))
    with Sampler(settings) as sampler, Trainer(settings) as trainer:
        before = list(sampler.rollout(questions))
        list(trainer.train(score(before, settings, reward=small)))
        trainer.push(sampler)
        after = list(sampler.rollout(questions))
    assert {version for sample in before for version in sample.weight_versions} == {"0"}
    assert {version for sample in after for version in sample.weight_versions} == {"1"}


def test_demonstrations_are_prompts_with_labels(settings: Settings):
    words = [Prompt(f"{word}>", label=word[::-1], index=i) for i, word in enumerate(("ab", "cd"))]
    sft = load_settings("slimectl.toml", {"algorithm.name": "sft"})
    [report] = train(iter(words), sft)
    assert report.metrics["train/loss"] > 0
    with pytest.raises(SettingsError, match=r"algorithm.name: grpo trains on scored samples, but these are prompts"):
        next(train(iter(words), settings))
    epochs = {"algorithm.name": "sft", "run.num_epoch": 2, "run.save_interval": None}
    job = run(load_settings("slimectl.toml", NO_EVAL | epochs), samples="prompts.jsonl")
    assert [report.step for report in job] == [1, 2, 3, 4]
    assert Path("runs/a/latest/policy/model.safetensors").exists()


def test_an_evaluation_measures_every_dataset(settings: Settings):
    metrics = evaluate(settings)
    with Sampler(settings) as sampler:
        tracked = load_settings("slimectl.toml", {"track.with": ["jsonl"], "track.samples": 1})
        assert evaluate(tracked, sampler=sampler) == metrics
    [line, table] = map(json.loads, Path("runs/a-eval/tracked.jsonl").read_text().splitlines())
    assert line == {"step": 0, "metrics": metrics | {"eval/step": 0.0}}
    assert (table["table"], table["rows"][0]["label"]) == ("eval/small/samples", "one")
    assert 0 <= metrics["eval/small_accuracy"] <= 1
    with pytest.raises(SettingsError, match=r"eval.data: no datasets are given. Add eval.data.NAME"):
        evaluate(load_settings())


def test_a_run_that_is_left_goes_on_with_the_same_metrics(settings: Settings, workshop: Workshop):
    def named(name: str) -> Settings:
        return load_settings("slimectl.toml", NO_EVAL | {"run.name": name, "run.num_rollout": 3})

    assert [report.step for report in run(named("whole"))] == [1, 2, 3]
    for report in run(named("left")):
        if report.step == 2:
            break
    assert [report.step for report in run(named("left"), resume=True)] == [3]
    assert workshop.metrics("left") == workshop.metrics("whole")
    with pytest.raises(SlimectlError, match="left"):
        next(run(named("left")))
    assert json.loads((workshop.folder / "runs" / "left" / "manifest.json").read_text())["counts"]["steps"] == 3


def test_a_run_ends_when_it_is_asked_to(workshop: Workshop, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(workshop.folder)
    settings = load_settings("slimectl.toml", NO_EVAL | {"run.name": "ended"})
    steps = [report.step for report in run(settings, interrupted=lambda: True)]
    assert steps == [1]
    assert (workshop.folder / "runs" / "ended" / "step_000001").is_dir()


async def every_stage(settings: Settings) -> dict[str, object]:
    """Call each function from a coroutine, as a cell of a notebook does: synchronous, while the loop runs."""
    questions = list(islice(prompts(settings), 2))
    one, *_ = rollout(questions, settings)
    abandoned = rollout(questions, settings)
    next(abandoned)
    abandoned.close()
    with Sampler(settings) as sampler:
        samples = list(sampler.rollout(questions))
        accuracy = evaluate(settings, sampler=sampler)

    async def reward(sample: Sample) -> float:
        return small(sample)

    scored = list(score(samples, settings, reward=reward))
    return {
        "first": one.tokens,
        "rewards": [sample.reward for sample in scored] == list(map(small, samples)),
        "steps": [report.step for report in train(scored, settings)],
        "accuracy": accuracy,
        "run": [report.step for report in run(settings)],
    }


def test_every_stage_works_where_an_event_loop_runs(settings: Settings):
    questions = list(islice(prompts(settings), 2))
    metrics = evaluate(settings)
    [first, *_] = rollout(questions, settings)
    named = load_settings("slimectl.toml", {"run.name": "in-a-loop", "run.num_rollout": 1})
    assert asyncio.run(every_stage(named)) == {
        "first": first.tokens, "rewards": True, "steps": [1], "accuracy": metrics, "run": [1]
    }  # fmt: skip


def test_servers_get_no_weights_by_hand(settings: Settings):
    served = load_settings("slimectl.toml", {"engine.url": ["http://127.0.0.1:9"]})
    refused = pytest.raises(SettingsError, match="push needs an engine in this process")
    with Sampler(settings) as sampler, Trainer(served) as trainer, refused:
        trainer.push(sampler)


@pytest.mark.parametrize(
    ("stage", "line"),
    [
        (
            lambda settings: rollout(["say one"], settings),
            "item 0 is a str, not of type Prompt; create it with slimectl.P",
        ),
        (
            lambda settings: rollout([{"prompt": "say one"}], settings),
            "item 0 is a dict, not of type Prompt; create it",
        ),
        (
            lambda settings: score([Sample(), "one"], settings, reward=lambda _: 1.0),
            "item 1 is a str, not of type Sample",
        ),
        (
            lambda settings: train([{"tokens": [1]}], settings),
            "item 0 is a dict, not of type Sample; train on samples",
        ),
    ],
)
def test_items_of_another_type_are_refused_with_what_to_pass(stage, line: str, settings: Settings):
    with pytest.raises(RecordError, match=re.escape(line)):
        list(stage(settings))
