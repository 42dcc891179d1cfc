"""Rows of other people's data sets: what their columns are taken for is recognized, and said in one line."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from slimectl.data import columns
from slimectl.data.columns import PromptOptions
from slimectl.data.prompts import open_prompts
from slimectl.data.supervised import sft_sample
from slimectl.errors import RecordError

USER, ANSWER = {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}
SHAREGPT = [{"from": "system", "value": "Be short."}, {"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2"}]
VERL = {"prompt": [USER], "reward_model": {"style": "rule", "ground_truth": "2"}, "data_source": "gsm8k"}
SYSTEM = {"role": "system", "content": "Be short."}


@pytest.fixture
def read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Any:
    """Prompt, label and further columns of one row, and the line that was said about it."""

    def one(row: dict[str, Any], **options: Any) -> tuple[Any, Any, dict[str, Any], str]:
        file = tmp_path / "rows.jsonl"
        file.write_text(json.dumps(row) + "\n")
        columns._announced.clear()
        with caplog.at_level(logging.INFO, logger="slimectl"):
            (prompt,) = open_prompts([str(file)], PromptOptions(**options))
        lines = [record.getMessage().removeprefix(f"{file}: ") for record in caplog.records]
        caplog.clear()
        assert len(lines) <= 1
        return prompt.text, prompt.label, prompt.extra, lines[0].partition(". Set ")[0] if lines else ""

    return one


@pytest.mark.parametrize(
    ("row", "text", "label", "words"),
    [
        ({"prompt": "1+1?", "label": "2"}, "1+1?", "2", ""),
        ({"prompt": "1+1?", "completion": "2"}, "1+1?", "2", "the label is taken from completion"),
        ({"prompt": [USER], "completion": [ANSWER]}, [USER], "2", "the label is taken from completion"),
        (VERL, [USER], "2", "the label is taken from reward_model.ground_truth"),
        ({"messages": [USER, ANSWER]}, [USER], "2",
         "the prompt is taken from messages, the label from its last turn"),
        ({"messages": [USER, ANSWER], "answer": "two"}, [USER], "two",
         "the prompt is taken from messages, the label from answer"),
        ({"messages": [USER]}, [USER], None, "the prompt is taken from messages, and there is no label"),
        ({"conversations": SHAREGPT}, [SYSTEM, USER], "2",
         "the prompt is taken from conversations, the label from its last turn"),
        ({"question": "1+1?", "answer": "One and one.\n#### 2"}, "1+1?", "2",
         "the prompt is taken from question, the label from answer after ####"),
        ({"problem": "1+1?", "solution": "Add.", "answer": 2}, "1+1?", 2,
         "the prompt is taken from problem, the label from answer"),
        ({"instruction": "Add.", "input": "1 and 1", "output": "2"}, "Add.\n\n1 and 1", "2",
         "the prompt is taken from instruction and input, the label from output"),
        ({"instruction": "Add 1 and 1.", "input": "", "output": "2"}, "Add 1 and 1.", "2",
         "the prompt is taken from instruction and input, the label from output"),
        ({"messages": json.dumps([USER, ANSWER])}, [USER], "2",
         "the prompt is taken from messages, the label from its last turn"),
        ({"messages": [USER, {**ANSWER, "content": [{"type": "text", "text": "2"}]}]}, [USER], "2",
         "the prompt is taken from messages, the label from its last turn"),
        ({"conversations": [{"role": "human", "content": "1+1?"}, {"role": "gpt", "value": "2"}]}, [USER], "2",
         "the prompt is taken from conversations, the label from its last turn"),
        ({"prompt": json.dumps([USER]), "completion": ANSWER}, [USER], "2", "the label is taken from completion"),
        ({"prompt": "[1, 2]"}, "[1, 2]", None, ""),
        ({"prompt": "2?", "system_prompt": "Be short.", "history": [["1+1?", "2"]]},
         [SYSTEM, USER, ANSWER, {"role": "user", "content": "2?"}], None,
         "the prompt begins with system_prompt and history"),
        ({"prompt": [SYSTEM, USER], "system": "Be short.", "history": None}, [SYSTEM, USER], None, ""),
        ({"prompt": "2?", "history": [*SHAREGPT[1:]]}, [USER, ANSWER, {"role": "user", "content": "2?"}], None,
         "the prompt begins with history"),
        ({"prompt": "2?", "history": [1.5, 2.5]}, "2?", None, ""),
        ({"text": "Once upon"}, "Once upon", None, "the prompt is taken from text, and there is no label"),
    ],
)  # fmt: skip
def test_prompt_and_label_of_a_published_format(read: Any, row: dict[str, Any], text: Any, label: Any, words: str):
    assert read(row)[:2] == (text, label)
    assert read(row)[3] == words


def test_a_demonstration_keeps_the_whole_chat(read: Any):
    assert read({"messages": [USER, ANSWER]}, demonstrations=True)[:2] == ([USER, ANSWER], None)
    imitated = read({"messages": [USER, ANSWER], "answer": "two"}, demonstrations=True)
    assert imitated[3] == "the assistant turns in messages are trained on, and answer is not"
    assert read({"conversations": SHAREGPT}, demonstrations=True)[0] == [SYSTEM, USER, ANSWER]
    assert read({"prompt": [USER], "completion": [ANSWER]}, demonstrations=True)[0] == [USER, ANSWER]
    assert read({"question": "q", "answer": "a\n#### 2"}, demonstrations=True)[1] == "a\n#### 2"
    row = {"problem": "1+1?", "solution": "Add: 2.", "answer": "2"}
    assert (read(row)[1], read(row, demonstrations=True)[1]) == ("2", "Add: 2.")


def test_of_a_plain_text_every_token_but_the_first_is_imitated(read: Any):
    class Bytes:
        eos_token_id = 256
        is_fast = True

        def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
            return {"input_ids": list(text.encode())}

        encode = staticmethod(lambda text, **_: list(text.encode()))

    text, label, _, words = read({"text": "abc"}, demonstrations=True)
    assert (text, label, words) == ("", "abc", "the whole column text is trained on")
    (prompt,) = open_prompts_of(text, label)
    assert sft_sample(prompt, Bytes()) == ([97, 98, 99, 256], 3, [1, 1, 1])


def open_prompts_of(text: str, label: str) -> list[Any]:
    from slimectl.types import Prompt

    return [Prompt(text=text, label=label)]


def test_dotted_keys_are_paths_into_objects_and_other_columns_stay_with_the_prompt(read: Any):
    row = {"info": {"q": "1+1?", "a": {"value": 2}}, "a.b": 7, "data_source": "mine"}
    text, label, extra, words = read(row, input_key="info.q", label_key="info.a.value")
    assert (text, label, words) == ("1+1?", 2, "")
    assert extra == {"info": row["info"], "a.b": 7, "data_source": "mine"}
    assert read({"prompt": "q", "a.b": 7}, label_key="a.b")[1] == 7
    assert read(VERL)[2] == {"reward_model": VERL["reward_model"], "data_source": "gsm8k"}


def test_functions_are_tools_by_their_older_name(tmp_path: Path):
    function = {"name": "add", "parameters": {"type": "object"}}
    rows = [{"functions": [function]}, {"functions": json.dumps([function])}, {"functions": ["add"]},
            {"functions": [function], "tools": [{**function, "name": "mul"}]}]  # fmt: skip
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": "q", **row}) + "\n" for row in rows))
    assert [prompt.tools for prompt in open_prompts([str(file)])] == [
        [function], [function], None, [{**function, "name": "mul"}],
    ]  # fmt: skip


def test_a_row_of_no_known_format_names_its_columns(read: Any):
    with pytest.raises(RecordError, match=r"no key 'prompt'. Its keys are words, info.a. Choose one with --input-key"):
        read({"words": 1, "info": {"a": 1}})
    with pytest.raises(RecordError, match=r"unknown speaker 'alien'. Known speakers: human, user, gpt"):
        read({"conversations": [{"from": "alien", "value": "x"}]})
    for history in ([{"user": "1+1?", "bot": "2"}], [["1+1?", None]], [["1+1?"]]):
        with pytest.raises(RecordError, match=r"history: expected pairs \[question, answer\] or messages"):
            read({"prompt": "2?", "history": history})
    for row in ({"system": "Be long."}, {"system": "Be short.", "history": [["1+1?", "2"]]}):
        with pytest.raises(RecordError, match=r"system: the chat also begins with a system message"):
            read({"prompt": [SYSTEM, USER], **row})
    with pytest.raises(RecordError, match=r"history: the chat also begins with a system message"):
        read({"prompt": [SYSTEM, USER], "history": [["1+1?", "2"]]})
    with pytest.raises(RecordError, match=r"messages: message 1 of the chat: content is 3, expected a string"):
        read({"messages": [USER, {"role": "tool", "content": 3}]})
