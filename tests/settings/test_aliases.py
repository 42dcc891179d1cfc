"""Old names of settings mean what they meant, in every layer, and nothing writes them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from slimectl.errors import SettingsError
from slimectl.hooks.args import FlatSettings
from slimectl.settings import Layer, Settings, aliases, resolve
from slimectl.settings.keys import flat, keys_of, settings_toml
from slimectl.settings.layers import from_assignments, from_environment, from_eval_config, from_file

RENAMED: list[tuple[str, Any, str, Any]] = [
    ("run.ahead", 2, "run.async_level", 2),
    ("run.on_disagreement", "stop", "run.on_logprob_mismatch", "stop"),
    ("run.max_logprob_abs_diff", 0.5, "run.max_logprob_mismatch", 0.5),
    ("run.max_logprob_abs_diff", "none", "run.max_logprob_mismatch", None),
    ("warmup.data", ["p.jsonl"], "sft_warmup.data", ["p.jsonl"]),
    ("warmup.max_steps", 7, "sft_warmup.max_steps", 7),
    ("warmup.until_accuracy", 0.5, "sft_warmup.target_accuracy", 0.5),
    ("eval.skip_before_train", True, "eval.before_train", False),
    ("eval.skip_before_train", False, "eval.before_train", True),
    ("eval.skip_before_train", "yes", "eval.before_train", False),
    ("train.policy", "megatron", "train.backend", "megatron"),
    ("engine.kind", "sglang", "engine.backend", "sglang"),
    ("train.share_prompts", False, "train.share_prompt_prefix", False),
    ("train.train_policy", "megatron", "train.backend", "megatron"),
    ("run.run_ahead", 1, "run.async_level", 1),
    ("warmup.warmup_lr", 0.5, "sft_warmup.lr", 0.5),
    ("sft_warmup.until_accuracy", 0.5, "sft_warmup.target_accuracy", 0.5),
]


@pytest.mark.parametrize(("old", "value", "new", "meaning"), RENAMED)
def test_an_old_key_sets_the_new_one_and_is_found_under_it(old: str, value: Any, new: str, meaning: Any):
    section, _, key = old.partition(".")
    beside = {"sft_warmup": {"data": "p.jsonl"}} if "warmup" in section and key != "data" else {}
    resolution = resolve([Layer("new.toml", beside), Layer("old.toml", {section: {key: value}})])
    values = dict(flat(resolution.settings))
    assert values[new] == meaning
    assert resolution.origins[new] == "old.toml"
    assert old not in values


@pytest.mark.parametrize(
    ("algorithm", "key", "old", "new"),
    [("ppo", "critic", "own", "separate"), ("dpo", "pairs", "extremes", "best_worst")],
)
def test_an_old_value_means_the_new_one(algorithm: str, key: str, old: str, new: str):
    settings = resolve([from_assignments([f"algorithm.name={algorithm}", f"algorithm.{key}={old}"])]).settings
    assert getattr(settings.algorithm, key) == new
    assert f'{key} = "{new}"' in settings_toml(settings)


def test_files_environment_and_assignments_take_old_names_and_later_layers_win(tmp_path: Path):
    file = tmp_path / "old.toml"
    file.write_text(
        '[run]\nahead = 1\n[warmup]\ndata = "p"\nlr = 0.5\nmax_steps = 3\n[engine]\nkind = "sglang"\n'
        '[sglang]\ngroups = [{ name = "a" }]\n'
    )
    environment = from_environment({"SLIMECTL_WARMUP_MAX_STEPS": "4", "SLIMECTL_RUN_ON_DISAGREEMENT": "stop"})
    resolution = resolve([from_file(file), environment, from_assignments(["run.async_level=2"])])
    settings = resolution.settings
    assert (settings.run.async_level, resolution.origins["run.async_level"]) == (2, "command line")
    assert (settings.sft_warmup.max_steps, settings.sft_warmup.lr) == (4, 0.5)
    assert resolution.origins["sft_warmup.max_steps"] == "environment"
    assert settings.run.on_logprob_mismatch == "stop"
    assert settings.sglang.server_groups == [{"name": "a"}]


def test_the_environment_names_a_section_with_an_underscore():
    values = from_environment(
        {"SLIMECTL_SFT_WARMUP_TARGET_ACCURACY": "0.5", "SLIMECTL_TRAIN_LR": "1", "SLIMECTL_X": "1"}
    )
    assert values.values == {"sft_warmup": {"target_accuracy": 0.5}, "train": {"lr": 1}}


def test_an_evaluation_file_takes_old_names(tmp_path: Path):
    file = tmp_path / "eval.yaml"
    file.write_text("eval:\n  defaults: {skip_before_train: true}\n  datasets: [{name: a, path: a.jsonl}]\n")
    assert resolve([from_eval_config(file)]).settings.eval.before_train is False


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        (
            ["run.ahead=1", "run.async_level=1"],
            "run.ahead and run.async_level are the same setting (command line). Set only run.async_level.",
        ),
        (
            ["warmup.data=p", "warmup.lr=1", "sft_warmup.lr=2"],
            "warmup.lr and sft_warmup.lr are the same setting (command line). Set only sft_warmup.lr.",
        ),
        (
            ["warmup.data=p", "warmup.until_accuracy=1", "sft_warmup.until_accuracy=1"],
            "warmup.until_accuracy and sft_warmup.until_accuracy are the same setting (command line). Set only "
            "sft_warmup.target_accuracy.",
        ),
        (["run.ahead=-1"], "run.async_level: input should be greater than or equal to 0, not -1 (command line)"),
        (
            ["eval.skip_before_train=perhaps"],
            "eval.before_train: input should be a valid boolean, unable to interpret input, not 'perhaps' "
            "(command line)",
        ),
        (["run.ahed=1"], "run.ahed: unknown setting (command line). Did you mean run.async_level?"),
        (["warmup.max_step=1"], "warmup.max_step: unknown setting (command line). Did you mean sft_warmup.max_steps?"),
        (["warmpu.until_accuracy=1"],
         "warmpu.until_accuracy: unknown setting (command line). Did you mean sft_warmup.target_accuracy?"),
    ],
)  # fmt: skip
def test_errors_name_the_new_key(assignments: list[str], message: str):
    with pytest.raises(SettingsError) as refused:
        resolve([from_assignments(assignments)])
    assert str(refused.value) == message


def test_run_toml_has_no_old_name():
    settings = resolve([from_assignments(["run.ahead=1", "warmup.data=p", "eval.skip_before_train=true"])]).settings
    text = settings_toml(settings)
    assert "[sft_warmup]" in text
    assert "before_train = false" in text
    assert all(word not in text for word in ("[warmup]", "\nahead", "skip_before_train"))


def test_every_alias_leads_to_a_setting_and_hides_none():
    for section, keys in aliases.KEYS.items():
        known = keys_of(section)
        assert all(new in known and old not in known for old, new in keys.items())
        assert type(getattr(Settings(), section)).section_name == section
    for old, section in aliases.SECTIONS.items():
        assert section in Settings.model_fields
        assert old not in Settings.model_fields
    for name, values in aliases.VALUES.items():
        section, _, key = name.partition(".")
        assert key in keys_of(section)
        assert values
    assert {f"{section}.{old}" for section, keys in aliases.KEYS.items() for old in keys} >= set(aliases.INVERTED)


def test_hooks_read_old_attributes():
    settings = resolve(
        [from_assignments(["run.async_level=2", "eval.before_train=false", "warmup.data=p", "sft_warmup.lr=0.5"])]
    ).settings
    args = FlatSettings(settings)
    assert (args.ahead, args.run_ahead, args.run.ahead, args.run.async_level) == (2, 2, 2, 2)
    assert (args.eval.skip_before_train, args.eval_skip_before_train, args.eval.before_train) == (True, True, False)
    assert (args.warmup.lr, args.warmup_lr, args.sft_warmup_lr, args.sft_warmup.until_accuracy) == (0.5, 0.5, 0.5, 0.25)
    assert (args.policy, args.train.policy, args.kind, args.engine.kind) == ("fsdp", "fsdp", "auto", "auto")
    assert (args.sglang.groups, args.groups, args.share_prompts) == ([], [], None)
    with pytest.raises(AttributeError, match=r"args.backend: backend is in several sections. Use args.SECTION.KEY"):
        args.backend  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'polcy'"):
        args.train.polcy  # noqa: B018
    assert pickle.loads(pickle.dumps(settings)).run.ahead == 2


ROLL_FILE = """
track_with: tensorboard
tracker_kwargs:
  log_dir: curves
rollout:
  temperature: 0.5
"""
SLIME_FILE = """
use_wandb = true
wandb_project = "maths"
wandb_team = "us"
wandb_key = "env:OUR_KEY"
wandb_host = "https://wandb.example"
wandb_dir = "curves"
wandb_run_id = "first"
wandb_mode = "offline"
wandb_always_use_train_step = true
disable_wandb_random_suffix = true
use_tensorboard = true
tb_project_name = "maths"
tb_experiment_name = "first"
[track]
wandb_group = "ablation"
"""


def test_a_settings_file_of_either_language_takes_the_tracker_options_of_roll(tmp_path: Path):
    (tmp_path / "roll.yaml").write_text(ROLL_FILE)
    (tmp_path / "roll.toml").write_text('track_with = "tensorboard"\ntracker_kwargs = { log_dir = "curves" }\n')
    for file in ("roll.yaml", "roll.toml"):
        track = resolve([from_file(tmp_path / file)]).settings.track
        assert (track.with_, track.kwargs) == (["tensorboard"], {"tensorboard": {"log_dir": "curves"}})
    assert resolve([from_file(tmp_path / "roll.yaml")]).settings.rollout.temperature == 0.5


def test_a_settings_file_takes_the_tracker_options_of_slime(tmp_path: Path):
    (tmp_path / "slime.toml").write_text(SLIME_FILE)
    settings = resolve([from_file(tmp_path / "slime.toml")]).settings
    track = settings.track
    assert track.with_ == ["stdout", "wandb", "tensorboard"]
    assert (track.project, track.entity, track.group, track.random_suffix) == ("maths", "us", "ablation", False)
    assert (track.host, track.dir, track.run_id, track.mode) == ("https://wandb.example", "curves", "first", "offline")
    assert (track.always_use_train_step, track.api_key.get_secret_value()) == (True, "env:OUR_KEY")
    assert track.kwargs == {"tensorboard": {"log_dir": "tensorboard_log/maths/first"}}
    args = FlatSettings(settings)
    assert (args.wandb_project, args.track_with, args.disable_wandb_random_suffix) == ("maths", track.with_, True)


def test_another_key_above_the_sections_is_refused(tmp_path: Path):
    (tmp_path / "a.toml").write_text("temperature = 1")
    with pytest.raises(SettingsError, match="temperature: settings belong in sections"):
        from_file(tmp_path / "a.toml")
