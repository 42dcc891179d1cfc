"""Prompts: one order, any position, and rows that are refused."""

from __future__ import annotations

import io
import itertools
import json
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from ten_prompts import expected, texts

from slimectl.data.columns import PromptOptions
from slimectl.data.prompts import open_prompts
from slimectl.errors import RecordError
from slimectl.types import Prompt


def test_index_runs_over_epochs_and_sources(jsonl: Path):
    prompts = list(open_prompts([f"{jsonl}@[0:2]", f"{jsonl}@[-1:]"], PromptOptions(epochs=2)))
    assert [prompt.index for prompt in prompts] == [0, 1, 2, 3, 4, 5]
    assert [prompt.text for prompt in prompts] == expected(0, 1, 9, 0, 1, 9)
    assert prompts[2] == Prompt(text="9+1=", label="10", index=2, metadata={"i": 9})


def test_bad_rows_are_left_out_and_the_others_keep_their_numbers(tmp_path: Path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "0+1="}\n{bad\n{"label": "3"}\n{"prompt": "3+1="}\n')
    bad: list[str] = []
    for seed, epochs, weights in ((None, 2, None), (5, 2, None), (5, 2, [1.0])):
        bad.clear()
        options = {"shuffle_seed": seed, "epochs": epochs, "weights": weights}
        prompts = list(
            open_prompts([str(path)], PromptOptions(**options), on_bad_row=lambda error: bad.append(str(error)))
        )
        assert sorted(prompt.text for prompt in prompts) == ["0+1=", "0+1=", "3+1=", "3+1="]
        if seed is None:
            assert [prompt.index for prompt in prompts] == [0, 3, 4, 7]
        assert [sum(f"bad.jsonl:{line}: " in text for text in bad) for line in (1, 2, 3, 4)] == [0, 2, 2, 0]
    with pytest.raises(RecordError, match=r"bad\.jsonl:2: not JSON"):
        texts(str(path))


@pytest.mark.parametrize("seed", [None, 11])
@pytest.mark.parametrize("epochs", [3, None])
def test_a_resumed_run_meets_the_same_prompts(jsonl: Path, seed: int | None, epochs: int | None):
    sources = [f"{jsonl}@[:7]", str(jsonl)]
    whole = list(itertools.islice(open_prompts(sources, PromptOptions(shuffle_seed=seed, epochs=epochs)), 51))
    for start in (1, 6, 7, 16, 17, 18, 33, 34, 50):
        again = itertools.islice(
            open_prompts(sources, PromptOptions(shuffle_seed=seed, epochs=epochs, start=start)), 51 - start
        )
        assert list(again) == whole[start:]


def test_each_epoch_is_shuffled_anew_and_complete(jsonl: Path):
    order = texts(jsonl, shuffle_seed=3, epochs=2)
    assert sorted(order[:10]) == sorted(order[10:]) == expected(*range(10))
    assert order[:10] != order[10:]
    assert order[:10] != texts(jsonl, shuffle_seed=4)
    assert order == texts(jsonl, shuffle_seed=3, epochs=2)


def test_the_order_of_a_seed_never_changes(jsonl: Path):
    """Runs resume across versions: this order is a promise."""
    assert texts(jsonl, shuffle_seed=42) == expected(7, 5, 9, 4, 3, 2, 8, 0, 6, 1)


@pytest.mark.parametrize("seed", [None, 1])
def test_large_file_needs_positions_not_rows(tmp_path: Path, seed: int | None):
    path = tmp_path / "large.jsonl"
    path.write_bytes(b'{"prompt": "' + b"x" * 1000 + b'"}\n' * 1)
    with path.open("ab") as file:
        file.writelines([b'{"prompt": "' + b"x" * 1000 + b'"}\n'] * 19_999)
    tracemalloc.start()
    prompts = open_prompts([str(path)], PromptOptions(shuffle_seed=seed))
    assert next(prompts).index == 0
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < (300_000 if seed is None else 2_000_000)  # of 20 MB


def test_stdin_streams_once_and_is_kept_for_more(monkeypatch: pytest.MonkeyPatch, jsonl: Path):
    def piped() -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(jsonl.read_bytes())))

    piped()
    prompts = open_prompts(["-"])
    assert next(prompts).text == "0+1="
    piped()
    assert texts("-", epochs=2) == expected(*range(10), *range(10))
    piped()
    assert texts("-", shuffle_seed=2) == texts(jsonl, shuffle_seed=2)


def test_keys_are_named_by_settings(tmp_path: Path):
    path = tmp_path / "p.jsonl"
    tool = {"type": "function", "function": {"name": "add"}}
    row = {"q": [{"role": "user", "content": "1+1"}], "a": 2, "m": {"k": 1}, "t": [tool]}
    path.write_text(json.dumps(row) + "\n")
    given = open_prompts([str(path)], PromptOptions(input_key="q", label_key="a", metadata_key="m", tool_key="t"))
    (prompt,) = given
    assert prompt == Prompt(text=row["q"], label=2, metadata={"k": 1}, tools=[tool])
    assert prompt.source_location == f"{path}:1"


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"words": "q", "info": {"answer": 1}}, {},
         "no key 'prompt'. Its keys are words, info.answer. Choose one with --input-key or rollout.input_key"),
        ({"prompt": "q"}, {"label_key": "answer"},
         "no key 'answer'. Its keys are prompt. Choose one with --label-key or rollout.label_key"),
        ({"prompt": 7}, {}, "prompt: expected a string or a chat list of {role, content}, got 7"),
        ({"prompt": ""}, {}, "prompt: empty"),
        ({"prompt": [{"text": "hi"}]}, {}, "prompt: message 0 of the chat: expected {role, content}, got an object"),
        ({"prompt": "q", "label": True}, {}, "label: expected a string or a number, got true. Put anything else"),
        ({"prompt": "q", "metadata": "x"}, {}, "metadata: expected an object or its JSON, got 'x'"),
        ({"prompt": "q", "metadata": 0}, {}, "metadata: expected an object, got 0"),
        ({"prompt": "q", "tools": {"a": 1}}, {}, "tools: expected a list of tool schemas, got an object"),
    ],
)  # fmt: skip
def test_row_that_is_no_prompt_says_where_and_what_next(
    tmp_path: Path, row: dict[str, Any], options: dict[str, Any], message: str
):
    path = tmp_path / "p.jsonl"
    keys = {options.get("label_key", "label"): 1}
    path.write_text(json.dumps({"prompt": "fine", **keys}) + "\n" + json.dumps(row) + "\n")
    prompts = open_prompts([str(path)], PromptOptions(**options))
    next(prompts)
    with pytest.raises(RecordError) as error:
        next(prompts)
    assert str(error.value).startswith(f"{path}:2: {message}")
