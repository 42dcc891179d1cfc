"""`slimectl settings explain` and the flags know old names, and answer by the new ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from slimectl.cli.app import app
from slimectl.settings.keys import settings_toml
from slimectl.settings.layers import from_custom_config, from_file
from slimectl.settings.loading import resolve


def answer(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(words))
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("run.ahead", "run.async_level", "run.ahead is now run.async_level"),
        ("warmup.until_accuracy", "sft_warmup.target_accuracy",
         "warmup.until_accuracy is now sft_warmup.target_accuracy"),
        ("eval.skip_before_train", "eval.before_train",
         "eval.skip_before_train is now eval.before_train, with the opposite meaning"),
        ("warmup", "sft_warmup", "warmup is now sft_warmup"),
    ],
)  # fmt: skip
def test_an_old_name_is_explained_by_the_new_one(old: str, new: str, words: str):
    explained = answer("settings", "explain", new)
    assert explained[0] == 0
    assert explained[1].startswith(f"{new}")
    assert answer("settings", "explain", old) == (0, explained[1], words + "\n")


def test_a_misspelt_old_name_leads_to_the_new_one():
    assert answer("settings", "explain", "run.on_disagreemnt") == (
        2, "", "slimectl: run.on_disagreemnt: unknown setting. Did you mean run.on_logprob_mismatch?\n"
    )  # fmt: skip


@pytest.mark.parametrize("flag", ["--backend", "--policy"])
def test_the_flag_of_the_backend_has_an_old_name(flag: str):
    code, out, _ = answer("run", "-s", "run.num_rollout=1", flag, "megatron", "--dry-run")
    assert code == 2  # there is no model
    assert 'train.backend "megatron" # flag' in " ".join(out.split())


@pytest.mark.parametrize(
    ("word", "keys"),
    [
        ("lr", ["train.lr", "sft_warmup.lr"]),
        ("temperature", ["rollout.temperature", "eval.temperature"]),
        ("learning_rate", ["train.lr"]),
        ("nucleus", ["rollout.top_p"]),
    ],
)
def test_a_key_is_explained_by_its_last_part_by_the_name_of_another_program_or_by_a_word(word: str, keys: list[str]):
    code, out, _ = answer("settings", "explain", word)
    explained = [line.split(" = ")[0] for line in out.splitlines() if not line.startswith(" ")]
    assert code == 0
    assert explained[: len(keys)] == keys


@pytest.mark.parametrize(
    ("name", "key", "lines"),
    [
        ("--rollout-batch-size", "run.rollout_batch_size", ["slime: --rollout-batch-size is run.rollout_batch_size"]),
        ("rollout_batch_size", "run.rollout_batch_size", ["ROLL: rollout_batch_size is run.rollout_batch_size"]),
        ("eps-clip", "algorithm.eps_clip", ["slime: --eps-clip is algorithm.eps_clip: 0.2 there if it is not given"]),
        (
            "--disable-grpo-std-normalization",
            "algorithm.grpo_std_normalization",
            ["slime: --disable-grpo-std-normalization is algorithm.grpo_std_normalization: the opposite"],
        ),
        (
            "ppo_mini_batch_size",
            "train.global_batch_size",
            ["verl: actor_rollout_ref.actor.ppo_mini_batch_size is train.global_batch_size: times rollout.n"],
        ),
        ("actor_train.training_args.learning_rate", "train.lr", ["ROLL: actor_train.training_args.learning_rate is"]),
        ("--actor_learning_rate", "train.lr", ["OpenRLHF: --actor_learning_rate is train.lr"]),
        ("num_generations", "rollout.n_samples_per_prompt", ["TRL: num_generations is rollout.n_samples_per_prompt"]),
        (
            "--sglang-mem-fraction-static",
            "",
            ["slime: --sglang-mem-fraction-static is sglang.args.mem_fraction_static"],
        ),
        ("--optimizer", "train.optimizer", ["slime: --optimizer is train.optimizer: adam is adamw"]),
    ],
)
def test_a_name_of_another_stack_is_explained_by_its_setting(name: str, key: str, lines: list[str]):
    code, out, err = answer("settings", "explain", name)
    assert (code, err) == (0, "")
    explained = [line.split(" = ")[0] for line in out.splitlines() if " = " in line and not line.startswith(" ")]
    assert explained == ([key] if key else [])
    for line in lines:
        assert line in out


def test_an_unknown_flag_names_the_nearest_ones():
    assert answer("settings", "explain", "--n-samples-per-promt") == (
        2, "", "slimectl: n_samples_per_promt: unknown setting. Did you mean n_samples_per_prompt?\n"
    )  # fmt: skip
    assert answer("settings", "explain", "--zzz") == (
        2, "", "slimectl: zzz: unknown setting. `slimectl settings show` lists all\n"
    )  # fmt: skip


def test_a_word_of_no_setting_is_an_error():
    assert answer("settings", "explain", "xyzzy") == (
        2, "", "slimectl: xyzzy: unknown setting. `slimectl settings show` lists all\n"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("assignment", "hint"),
    [
        ("train.learning_rate=1e-5", "Did you mean train.lr?"),
        ("rollout.num_generations=4", "Did you mean rollout.n_samples_per_prompt?"),
        ("train.max_new_tokens=4", "Did you mean rollout.max_response_len?"),
        ("learning_rate=1e-5", "e.g. -s train.lr=1e-5"),
        ("lr=2e-4", "e.g. -s train.lr=2e-4"),
    ],
)
def test_a_name_of_another_program_leads_to_the_setting(assignment: str, hint: str):
    code, out, err = answer("run", "-s", assignment, "--dry-run")
    assert (code, out) == (2, "")
    assert err.rstrip().endswith(hint)


def test_every_suggested_setting_exists_and_no_name_of_a_setting_leads_elsewhere():
    from slimectl.settings.keys import OTHER_NAMES, setting_names

    assert set(OTHER_NAMES) <= set(setting_names())
    others = [other for names in OTHER_NAMES.values() for other in names]
    assert len(set(others)) == len(others)


def test_validate_names_every_error_of_keys_values_verifiers_and_files(tmp_path: Path):
    file = tmp_path / "bad.toml"
    file.write_text(
        '[train]\nlr = "fast"\nlearning_rate = 1\n[score]\nrm_type = "maht"\n[rollout]\ndata = ["none.jsonl"]\n'
        'custom_generate_function_path = "none.py:f"\n[eval]\ndata = { aime = "aime.jsonl" }\n'
        '[run]\nnum_rollout = 3\nnum_epoch = 2\n[model]\npath = "nowhere"\n'
    )
    code, out, err = answer("settings", "validate", "-c", str(file), "-s", "lr=1")
    assert (code, out) == (2, "")
    assert [line.split(": ")[1] for line in err.splitlines()] == [
        "-s lr=1", "train.learning_rate", "train.lr",
        "run.num_rollout and run.num_epoch cannot be combined. Set only one.",
        "rollout.custom_generate_function_path", "nowhere", "score.rm_type", "none.jsonl", "aime.jsonl",
    ]  # fmt: skip


def test_validate_is_silent_where_all_is_well(tmp_path: Path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "1+1=", "label": "2"}\n')
    words = ("-s", "score.rm_type=math", "-s", f"rollout.data=['{prompts}']")
    assert answer("settings", "validate", *words) == (0, "", "")


def test_validate_notes_that_neither_a_model_nor_data_is_set():
    line = "neither model.path nor rollout.data is set. `slimectl run` needs both\n"
    assert answer("settings", "validate", "-s", "score.rm_type=math") == (0, "", line)
    assert answer("settings", "validate", "-s", "model.card=tiny")[2] == ""


def test_settings_of_ones_own_come_from_a_file_and_are_explained(tmp_path: Path):
    file = tmp_path / "own.yaml"
    file.write_text("max_turns: 4\ntool: {name: calc, limit: null}\nempty: null\n")
    code, out, _ = answer("settings", "show", "--custom-config", str(file), "-s", "custom.more=[1]")
    assert code == 0
    rows = {line.split()[0]: line.split("#")[1].strip() for line in out.splitlines() if line.startswith("custom.")}
    assert rows == {"custom.max_turns": str(file), "custom.tool": str(file), "custom.empty": str(file),
                    "custom.more": "command line"}  # fmt: skip
    settings = resolve([from_custom_config(file)]).settings
    (tmp_path / "run.toml").write_text(settings_toml(settings))
    again = resolve([from_file(tmp_path / "run.toml")]).settings
    assert again.custom.entries() == {"max_turns": 4, "tool": {"name": "calc"}, "empty": None}
    assert answer("settings", "explain", "custom.max_turns")[1].startswith("custom.NAME = VALUE")
    file.write_text("- 1\n")
    assert answer("settings", "show", "--custom-config", str(file))[2].endswith("such as `max_turns: 4`\n")


def test_validate_names_what_the_trainer_and_the_trackers_refuse():
    code, _, err = answer(
        "settings", "validate", "-s", "model.card=tiny", "-s", "train.freeze_params_name_list=['nothing']",
        "-s", "track.with=['jsonl']", "-s", "track.kwargs={jsonl={bogus=1}}",
    )  # fmt: skip
    assert code == 2
    assert [line.split(". ")[0] for line in err.splitlines()] == [
        "slimectl: track.kwargs.jsonl.bogus: no such argument",
        "slimectl: 'nothing' matches no parameter",
    ]
