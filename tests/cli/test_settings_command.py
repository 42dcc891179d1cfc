"""`slimectl settings explain` and the flags know old names, and answer by the new ones."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from slimectl.cli.app import app


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
        2, "", "slimectl: run.on_disagreemnt: unknown setting; did you mean run.on_logprob_mismatch?\n"
    )  # fmt: skip


@pytest.mark.parametrize("flag", ["--backend", "--policy"])
def test_the_flag_of_the_backend_has_an_old_name(flag: str):
    code, out, _ = answer("run", "-s", "run.num_rollout=1", flag, "megatron", "--dry-run")
    assert code == 0
    assert 'train.backend "megatron" # flag' in " ".join(out.split())
