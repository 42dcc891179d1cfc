"""`slimectl models`: what it prints, what it refuses, and how fast the list is."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from transformers import AutoTokenizer
from typer.testing import CliRunner

from slimectl.architectures import cards
from slimectl.cli.app import app


def models(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["models", *words])
    return result.exit_code, result.stdout, result.stderr


def checkpoint(folder: Path, name: str, **changes: object) -> str:
    (folder / "config.json").write_text(json.dumps({**cards.load(name)["config"], **changes}))
    return str(folder)


def test_the_list_is_a_table_of_all_cards():
    code, out, _ = models()
    lines = out.splitlines()
    assert code == 0
    assert lines[0].split() == ["name", "family", "parameters", "activated", "layers", "hidden"]
    assert [line.split()[0] for line in lines[1:]] == cards.names()
    assert next(line.split() for line in lines if line.startswith("qwen3-30B-A3B")) == [
        "qwen3-30B-A3B", "qwen3_moe", "30.5", "B", "3.35", "B", "48", "2048",
    ]  # fmt: skip


def test_the_list_needs_no_heavy_library():
    code = "import sys; from slimectl.cli.models import models; models(); print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "False"


def test_show_prints_the_card_as_toml():
    code, out, _ = models("show", "moonlight")
    assert code == 0
    assert tomllib.loads(out)["parameters"] == 15_960_108_544


def test_check_is_silent_on_stdout_where_all_agrees(tmp_path: Path):
    folder = checkpoint(tmp_path, "qwen3-0.6B")
    assert models("check", "qwen3-0.6B", folder) == (0, "", f"{folder}: matches the card qwen3-0.6B\n")


def test_check_prints_a_line_for_each_difference(tmp_path: Path):
    folder = checkpoint(tmp_path, "qwen3-0.6B", rope_theta=10000.0, num_hidden_layers=27)
    code, out, _ = models("check", "qwen3-0.6B", folder)
    assert code == 1
    assert out.splitlines() == [
        "rope_theta is 10000.0, but 1000000.0 in the card",
        "num_hidden_layers is 27, but 28 in the card",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["show", "qwen3-5B"], "slimectl: model.card: no card 'qwen3-5B'. Did you mean qwen3-"),
        (["check", "qwen3-8B", "nowhere"], "slimectl: nowhere: no such model directory"),
        (["check", "qwen3-8B"], "slimectl: models: use `slimectl models`"),
    ],
)
def test_what_cannot_be_done_is_one_line(words: list[str], message: str):
    code, out, err = models(*words)
    assert (code != 0, out, err.count("\n")) == (True, "", 1)
    assert err.startswith(message)


def test_a_new_model_ends_its_texts_and_its_turns_and_is_that_of_its_seed(tmp_path: Path):
    for name in ("new", "again"):
        assert models("create", "tiny", str(tmp_path / name), "--seed", "3")[0] == 0
    assert (tmp_path / "new/model.safetensors").read_bytes() == (tmp_path / "again/model.safetensors").read_bytes()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "new")
    chat = [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}]
    *_, end_of_turn, newline = tokenizer.apply_chat_template(chat, return_dict=False)
    assert newline == ord("\n")
    ends = json.loads((tmp_path / "new/generation_config.json").read_text())["eos_token_id"]
    assert sorted(ends) == sorted({tokenizer.eos_token_id, end_of_turn})
