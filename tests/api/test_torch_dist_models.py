"""A torch_dist folder is a model: for every stage, for a run on Megatron that saves such folders, and back."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from workshop import set_up

from slimectl import Settings, convert, evaluate, load_settings, prompts, rollout, run, score, train
from slimectl.data.run_dir import RunDir
from slimectl.errors import CheckpointError, SettingsError
from slimectl.policies.megatron import parallel
from slimectl.runtime import builders
from slimectl.runtime.builders.servers import start_engines
from slimectl.runtime.initial_model import prepare_model

NO_EVAL = {"eval.data": {}, "eval.interval": None}


@pytest.fixture(scope="module")
def folder(model_dir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with settings, a reward, and the models `hf` and `dist`, a conversion of the former."""
    workshop, before = set_up(tmp_path_factory.mktemp("models"), model_dir("llama")), Path.cwd()
    os.chdir(workshop.folder)
    Path("hf").symlink_to(workshop.model)
    convert("hf", "dist", to="torch_dist", logits=0)
    yield workshop.folder
    os.chdir(before)
    parallel.stop()


def settings_of(model: str, **values: Any) -> Settings:
    return load_settings("slimectl.toml", {"model.path": model, **values})


def results(model: str) -> list[Any]:
    """What rollout, score with a reference, train and eval make of a model."""
    settings = settings_of(model)
    reference = builders.frozen(settings, builders.model_folder(model))
    samples = list(score(rollout(islice(prompts(settings), 4), settings), settings, reference=reference))
    assert all(sample.ref_log_probs for sample in samples)
    return [samples, [report.metrics for report in train(iter(samples), settings)], evaluate(settings)]


@pytest.mark.usefixtures("folder")
def test_every_stage_reads_it_as_the_model_that_it_was_converted_from():
    assert results("dist") == results("hf")


@pytest.mark.usefixtures("folder")
def test_a_run_on_megatron_saves_such_folders_and_goes_on_from_them():
    def reports(name: str, model: str, *, resume: bool = False, **values: Any) -> Iterator[Any]:
        common = {"run.name": name, "run.num_rollout": 3, "run.keep_samples": False, "train.backend": "megatron"}
        return run(settings_of(model, **NO_EVAL, **common, **values), resume=resume)

    whole = [report.metrics for report in reports("whole", "hf")]
    own = {"megatron.save_format": "torch_dist", "run.keep_checkpoints": 1}
    left = [report.metrics for report in islice(reports("left", "dist", **own), 2)]
    assert [path.name for path in Path("runs/left").glob("step_*")] == ["step_000002"]
    left += [report.metrics for report in reports("left", "dist", resume=True, **own)]
    assert left == whole
    [step] = Path("runs/left").glob("step_*")
    assert step.name == "step_000003"
    assert (step / "policy" / ".metadata").exists()
    convert(step, "back", logits=0)
    assert evaluate(settings_of("back")) == evaluate(settings_of("runs/left")) == evaluate(settings_of("runs/whole"))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"train.backend": "fsdp"},
            r'megatron.save_format has no effect with train.backend = "fsdp". Set train.backend =',
        ),
        ({"train.lora_rank": 4}, "megatron.save_format: torch_dist cannot store adapters. Set hf with train.lora_rank"),
        (
            {"algorithm.name": "reward_model"},
            "torch_dist cannot store the value head that reward_model trains in the same mod",
        ),
    ],
)
def test_what_torch_dist_cannot_hold_is_refused_before_anything_is_loaded(values: dict[str, Any], words: str):
    with pytest.raises(SettingsError, match=words):
        load_settings(values={"train.backend": "megatron", "megatron.save_format": "torch_dist"} | values)


def test_what_is_missing_in_one_is_a_line_that_says_how_to_get_it(folder: Path, tmp_path: Path):
    copy = shutil.copytree(folder / "dist", tmp_path / "copy")
    for file in [copy / "manifest.json", *copy.glob("tokenizer*")]:
        file.unlink()
    with pytest.raises(CheckpointError, match=r"copy: no tokenizer; copy tokenizer.json and tokenizer_config.json of"):
        builders.tokenizer(builders.model_folder(str(copy)))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"vocab_size": 300_000, "num_hidden_layers": 100}))
    with pytest.raises(
        CheckpointError, match=r"vocab_size 300000 x hidden_size 64 is too large for \d+ bytes of weights"
    ):
        builders.model_folder(str(copy))
    (copy / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config.json. This is a torch_dist checkpoint. Copy config.json, "):
        builders.model_folder(str(copy))


def test_the_folder_of_megatron_s_iterations_is_a_model_with_a_config_and_tokenizer_in_it(folder: Path, tmp_path: Path):
    shutil.copytree(folder / "dist", tmp_path / "saved" / "iter_0000007")
    saved = tmp_path / "saved"
    for file in (saved / "iter_0000007").glob("*.json"):
        if file.name not in ("manifest.json", "metadata.json"):
            file.rename(saved / file.name)
    (saved / "iter_0000007" / "manifest.json").unlink()
    (saved / "latest_checkpointed_iteration.txt").write_text("7")
    settings = settings_of(str(saved))
    [sample, *_] = rollout(islice(prompts(settings), 1), settings)
    [expected, *_] = rollout(islice(prompts(settings), 1), settings_of("hf"))
    assert sample.tokens == expected.tokens


@pytest.mark.usefixtures("folder")
def test_engines_that_do_not_read_it_get_a_conversion():
    settings = settings_of("dist", **{"engine.backend": "vllm"})
    converted = prepare_model(settings, RunDir(Path("runs/served")))
    assert converted == Path("runs/served/model")
    assert evaluate(settings_of(str(converted))) == evaluate(settings_of("hf"))
    elsewhere = settings_of(
        "dist", **{"engine.backend": "vllm", "cluster.executor": "ray", "cluster.ray_address": "auto"}
    )
    expected = pytest.raises(SettingsError, match=r"dist: vllm cannot read torch_dist\. Convert it: slimectl")
    with expected, start_engines(elsewhere, Path("dist"), None):
        pass
