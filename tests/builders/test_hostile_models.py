"""Model folders of a stranger, opened as rollout, train and eval do: a line each, and nothing of theirs is run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from slimectl.checkpoints.create import byte_tokenizer
from slimectl.cli import inspect_views
from slimectl.data import template_check
from slimectl.data.template_check import check_template
from slimectl.errors import CheckpointError
from slimectl.policies.fsdp.build import empty_model
from slimectl.runtime import builders
from slimectl.runtime.builders.models import version_of
from slimectl.settings import Settings

ModelDir = Callable[[str], Path]


@pytest.fixture
def model(tmp_path: Path, model_dir: ModelDir) -> Path:
    return copytree(model_dir("llama"), tmp_path / "model")


def edit(file: Path, **changes: Any) -> None:
    facts = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**facts, **changes}))


def opened(folder: Path) -> None:
    text = builders.tokenizer(builders.model_folder(str(folder)))
    builders.engine(Settings(), folder, text)


def refusal(folder: Path, act: Callable[[Path], Any] = opened) -> str:
    with pytest.raises(CheckpointError) as error:
        act(folder)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("model_type", ["llama", "nonsense"])
def test_code_of_a_model_is_neither_run_nor_asked_about(model_type: str, model: Path, tmp_path: Path):
    proof = tmp_path / "proof"
    (model / "modeling_x.py").write_text(f"open({str(proof)!r}, 'w')\nclass C: pass\n")
    maps = dict.fromkeys(("AutoConfig", "AutoModel", "AutoModelForCausalLM"), "modeling_x.C")
    edit(model / "config.json", auto_map=maps, model_type=model_type)
    edit(
        model / "tokenizer_config.json",
        auto_map={"AutoTokenizer": ["modeling_x.C", "modeling_x.C"]},
        tokenizer_class="C",
    )
    for act in (opened, empty_model):
        try:
            act(model)
        except CheckpointError as error:
            assert "\n" not in str(error)  # noqa: PT017
    assert not proof.exists()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "[" * 100_000, "\0", '{"model": 7}', '{"version": "1.0", "model": {}}']
)
def test_a_broken_tokenizer_is_a_line(text: str, model: Path):
    (model / "tokenizer.json").write_text(text)
    line = refusal(model)
    assert "the tokenizer cannot be loaded" in line or line.startswith(f"{model}/tokenizer.json: not ")
    assert "\n" not in line


@pytest.mark.parametrize("value", [-5, "x", {}, [[]], True, 10**12, 2.5])
def test_a_generation_config_without_tokens_is_a_line(value: Any, model: Path):
    edit(model / "generation_config.json", eos_token_id=value)
    assert refusal(model).startswith(f"{model}/generation_config.json: eos_token_id is not a token")


@pytest.mark.parametrize("text", ["{", "[]", "7", "[" * 100_000])
def test_broken_files_beside_the_weights_are_a_line(text: str, model: Path):
    (model / "generation_config.json").write_text(text)
    assert "generation_config.json: not " in refusal(model)
    (model / "generation_config.json").unlink()
    (model / "trainer.json").write_text(text)
    assert "trainer.json: not " in refusal(model, version_of)


def test_a_config_that_transformers_cannot_build_is_a_line(model: Path):
    edit(model / "config.json", hidden_act="nonsense")
    assert "cannot build a causal language model of model_type 'llama' ('nonsense')" in refusal(model)
    assert "cannot build this model" in refusal(model, empty_model)


def test_inspect_says_what_is_wrong_with_a_folder_in_a_line(model: Path):
    edit(model / "config.json", hidden_size="64")
    assert "hidden_size '64', not a number" in refusal(model, inspect_views.show_folder)
    (model / "config.json").unlink()
    os.mkfifo(model / "config.json")
    assert "config.json: a FIFO, not a file" in refusal(model, inspect_views.show_folder)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "does not end"),
        ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "does not end"),
        ("{{ 'a' * 10**11 }}", "takes too much memory"),
        ("{{ 'x'|center(10**11) }}", "takes too much memory"),
        ("{{ '%1000000000000d' % 1 }}", "takes too much memory"),
    ],
)
def test_a_template_without_end_or_bounds_is_refused(
    template: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(template_check, "MAX_CPU_S", 0.3)
    text = byte_tokenizer()
    text.chat_template = template
    with pytest.raises(CheckpointError, match=reason) as error:
        check_template(text, tmp_path)
    assert str(error.value).startswith(f"{tmp_path}: the chat template {reason}. Replace it")


@pytest.mark.parametrize(
    "template", ["{{ ''.__class__.__mro__ }}", "{{ cycler.__init__.__globals__.os.system('touch proof') }}", "{% if %}"]
)
def test_a_template_that_reaches_out_or_is_broken_fails_where_a_chat_is_rendered(
    template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from slimectl.data.chat import render
    from slimectl.errors import RecordError
    from slimectl.types import Prompt

    monkeypatch.chdir(tmp_path)
    text = byte_tokenizer()
    text.chat_template = template
    check_template(text, tmp_path)
    with pytest.raises(RecordError, match="the chat template refuses this chat") as error:
        render(Prompt([{"role": "user", "content": "x"}]), text)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "proof").exists()


def test_a_panic_of_the_tokenizers_library_is_a_line_and_silent(model: Path, capfd: pytest.CaptureFixture[str]):
    edit(model / "tokenizer.json", normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"})
    line = refusal(model)
    assert "the tokenizer cannot be loaded" in line or line.startswith(f"{model}/tokenizer.json: not ")
    assert "\n" not in line
    assert capfd.readouterr().err == ""
