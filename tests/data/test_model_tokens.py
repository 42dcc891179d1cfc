"""Tokens of a model: where the engine stops, what is taught, which files are copied, and which rows are left out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from chat_families.families import FAMILIES
from chat_families.families import tokenizer as tokenizer_of

from slimectl.chats.model_tokens import end_tokens, missing_ends, write_end_tokens
from slimectl.data.jsonl import read_samples
from slimectl.data.preferences import Preference
from slimectl.data.supervised import sft_sample, stop_tokens
from slimectl.errors import RecordError
from slimectl.policies.checkpoint import copy_companions
from slimectl.runtime import builders
from slimectl.settings import Settings
from slimectl.settings.rollout import RolloutSettings
from slimectl.stages import long_prompts
from slimectl.stages.generation import GroupGenerator
from slimectl.stages.preferences import preferred
from slimectl.stages.prompt_groups import PromptSource
from slimectl.stages.rollout import demonstrations, rollout
from slimectl.system.model_files import end_token_ids
from slimectl.types import Prompt

END, IM_END = 256, 258  # <|end|> and <|im_end|> behind the 256 bytes
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok"}]


@pytest.fixture
def base(tmp_path: Path, model_dir: Callable[[str], Path]) -> Path:
    """A base model with the template of its instruct model: its files name <|end|>, the template writes <|im_end|>."""
    folder = copytree(model_dir("llama"), tmp_path / "base")
    (folder / "generation_config.json").unlink()
    (folder / "manifest.json").unlink(missing_ok=True)
    return folder


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.ends_turns])
def test_a_family_that_stops_needs_no_other_end(name: str):
    tokenizer: Any = tokenizer_of(name)
    assert missing_ends(tokenizer, tokenizer.convert_tokens_to_ids([*FAMILIES[name].stops])) == []


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("qwen2.5", ["<|im_end|>"]), ("llama3.1", ["<|eot_id|>"]), ("gemma3", ["<end_of_turn>"]),
        ("glm4", ["<|user|>"]), ("cohere2", ["<|END_OF_TURN_TOKEN|>"]), ("phi3", ["<|end|>"]),
        ("gpt-oss", ["<|return|>", "<|call|>"]),
        ("gemma4", ["<turn|>", "<|tool_response>"]), ("ling-lite", []), ("mistral-v3", ["</s>"]),
    ],
)  # fmt: skip
def test_the_template_shows_where_turns_end(name: str, ends: list[str]):
    tokenizer: Any = tokenizer_of(name)
    assert missing_ends(tokenizer, []) == tokenizer.convert_tokens_to_ids(ends)


def test_a_base_model_ends_at_the_token_of_its_template_which_is_said_once(
    base: Path, caplog: pytest.LogCaptureFixture
):
    tokenizer = builders.tokenizer(base)
    for _ in range(2):
        assert end_tokens(base, tokenizer) == [END, IM_END]
    (line,) = [record.message for record in caplog.records]
    assert "ends a turn with <|im_end|>, which is not an end token" in line


def test_the_end_of_the_template_is_taught(base: Path):
    tokenizer = builders.tokenizer(base)
    tokens, length, mask = sft_sample(Prompt(CHAT), tokenizer, end_tokens=stop_tokens(tokenizer))
    assert tokens[-length:] == [*b"ok", IM_END]
    assert mask == [1, 1, 1]


def test_engines_stop_where_the_template_ends_a_turn(base: Path):
    tokenizer = builders.tokenizer(base)
    embedded = builders.engine(Settings(), base, tokenizer, load=False)
    assert embedded._end_tokens == {END, IM_END}
    client = builders.client(Settings(), base, tokenizer, ["http://127.0.0.1:9"], ["http://127.0.0.1:9"])
    assert set(client.model.stops.ends) == {END, IM_END}


def test_a_trained_model_lists_the_end_that_it_was_taught(base: Path, tmp_path: Path):
    copy = tmp_path / "copy"
    copy.mkdir()
    copy_companions(base, copy, torch.float32)
    assert json.loads((copy / "generation_config.json").read_text())["eos_token_id"] == [END, IM_END]
    assert not (base / "generation_config.json").exists()


def test_an_end_is_added_to_the_values_of_the_file(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"eos_token_id": 3}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 3], "temperature": 0.6}')
    write_end_tokens(tmp_path, [2, 7])
    values = json.loads((tmp_path / "generation_config.json").read_text())
    assert values == {"eos_token_id": [3, 2, 7], "temperature": 0.6}
    assert end_token_ids(tmp_path) == [3, 3, 2, 7]


def test_all_templates_and_vocabularies_travel_with_a_copy(base: Path, tmp_path: Path):
    names = [
        "additional_chat_templates/tool_use.jinja", "chat_template.jinja", "added_tokens.json", "tokenizer.model",
        "special_tokens_map.json", "qwen.tiktoken", "spiece.model", "tekken.json", "vocab.json", "merges.txt",
    ]  # fmt: skip
    for name in names:
        (base / name).parent.mkdir(exist_ok=True)
        (base / name).write_text("{}")
    copy = tmp_path / "copy"
    copy.mkdir()
    copy_companions(base, copy, torch.float32)
    assert {name for name in names if (copy / name).read_text() == "{}"} == set(names)


@pytest.fixture
def short(base: Path) -> Path:
    """A model whose tokenizer has a token more than its embedding."""
    values = json.loads((base / "tokenizer.json").read_text())
    values["added_tokens"].append({**values["added_tokens"][-1], "id": 259, "content": "<|new|>"})
    (base / "tokenizer.json").write_text(json.dumps(values))
    return base


def test_demonstrations_and_preferences_with_an_unknown_token_are_left_out(
    short: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(long_prompts, "_named", set())  # a process logs only the first few skipped prompts
    tokenizer, skipped = builders.tokenizer(short), list[Prompt]()
    rows = [Prompt("a", label=label, index=i, source_location=f"s:{i}") for i, label in enumerate(["b", "<|new|>"])]
    samples = list(demonstrations(rows, tokenizer, RolloutSettings(), on_skipped=skipped.append))
    assert [sample.label for sample in samples] == ["b"]
    pairs = [Preference(rows[0], rows[1], 0), Preference(rows[0], rows[0], 0)]
    assert len(list(preferred(pairs, tokenizer, RolloutSettings(), on_skipped=skipped.append))) == 2
    assert [prompt.index for prompt in skipped] == [1, 0]
    assert "s:1: skipped: token 259 ('<|new|>') is not in the model's vocabulary of 259" in caplog.messages


def test_a_prompt_with_an_unknown_token_is_left_out_of_a_rollout(short: Path):
    tokenizer, skipped = builders.tokenizer(short), list[Prompt]()
    engine = builders.engine(Settings(), short, tokenizer)
    rows = [Prompt(text, index=i, source_location=f"p:{i}") for i, text in enumerate(["a <|new|>", "a"])]
    options = RolloutSettings(n_samples_per_prompt=1, max_response_len=2)
    source = PromptSource(rows, GroupGenerator(engine, tokenizer, options, on_skipped=skipped.append))
    assert [sample.prompt for sample in rollout(source)] == ["a"]
    assert [prompt.text for prompt in skipped] == ["a <|new|>"]


def test_a_sample_with_an_unknown_token_is_a_bad_line(tmp_path: Path):
    file, errors = tmp_path / "s.jsonl", list[RecordError]()
    row = {"group_index": 0, "index": 0, "prompt": "a", "response": "b", "response_length": 1, "status": "completed"}
    file.write_text("".join(json.dumps({**row, "group_index": i, "tokens": [97, 256 + i]}) + "\n" for i in range(4)))
    samples = read_samples(file, vocabulary=259, on_error="skip", report=errors.append)
    assert [sample.tokens[-1] for sample in samples] == [256, 257, 258]
    (error,) = errors
    assert ":4: tokens: token 259 is not in the model's vocabulary of 259 tokens" in str(error)
