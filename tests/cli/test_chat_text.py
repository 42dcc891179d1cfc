"""Chats on the terminal: messages under their roles, turns of a response, prompts of branches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner
from workshop import Workshop

from slimectl.cli.app import app
from slimectl.cli.chat_text import messages_text
from slimectl.cli.viewer.conversation import conversation, prompt_messages, response_turns

TURNS = "4<|im_end|>\n", "<|im_start|>user\nRight. 3+3?<|im_end|>\n<|im_start|>assistant\n", "6<|im_end|>\n"
"""What the policy wrote, what the template and the user added, and what the policy wrote then, a token a character."""


def decode(tokens: list[int]) -> str:
    return "".join(map(chr, tokens))


def record(*turns: str, group: int = 0, index: int = 0, prompt: object = "2+2?", reward: float = 1.0) -> dict:
    mask = [bit for text, bit in zip(turns, (1, 0, 1), strict=False) for _ in text]
    tokens = [*b"2+2?", *map(ord, "".join(turns))]
    return {
        "group_index": group, "index": index, "rollout_id": index, "prompt": prompt, "tokens": tokens,
        "response": "4user\nRight. 3+3?assistant\n6", "response_length": len(mask), "loss_mask": mask,
        "status": "completed", "reward": reward, "label": "4",
    }  # fmt: skip


def test_messages_have_their_roles():
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    chat = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "2+2?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "4\x1b[2J"},
    ]
    assert messages_text(prompt_messages(chat)).splitlines() == [
        "[system] Be short.",
        "[user] 2+2?",
        '[assistant] calls {"name": "add", "arguments": "{\\"a\\": 2}"}',
        "[tool] 4␛[2J",  # it cannot clear the screen
    ]
    assert messages_text(prompt_messages({"not": "a chat"})) == '{"not": "a chat"}'


def test_the_turns_of_a_response_are_apart_without_the_marks_of_the_template():
    sample = record(*TURNS)
    assert [turn["author"] for turn in response_turns(sample)] == ["policy", "environment", "policy"]
    assert messages_text(conversation(sample, decode)) == "2+2?\n>>> 4\n[user] Right. 3+3?\n>>> 6"
    plain = record("4", "<tool_response>4</tool_response>", "4")
    assert messages_text(conversation(plain, decode)).splitlines()[2] == (
        "[environment] <tool_response>4</tool_response>"
    )
    assert response_turns({"prompt": "2+2?"}) == []
    assert messages_text(conversation({"prompt": "2+2?"}, decode)) == "2+2?\n>>> "


def inspected(*words: str) -> str:
    result = CliRunner().invoke(app, ["inspect", *words])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_file_shows_chats_by_role(workshop: Workshop, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(workshop.folder)
    Path("s.jsonl").write_text(json.dumps(record(*TURNS, prompt=[{"role": "user", "content": "2+2?"}])) + "\n")
    for words in ((), ("--sort", "reward")):
        lines = inspected("s.jsonl", "--model", str(workshop.model), *words).splitlines()
        assert lines[2:6] == ["[user] 2+2?", ">>> 4", "[user] Right. 3+3?", ">>> 6"], lines
    assert lines[0] == "s.jsonl: 1 sample of 1 prompt, mean reward 1"


def test_branches_of_an_attempt_are_not_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    rows = [
        *(record("4", group=0, index=i, prompt="a") for i in (0, 1)),
        *(record("4", group=0, index=1, prompt=branch) for branch in ("a then b", "a then c")),
        *(record("4", group=1, index=i, prompt="b") for i in (2, 3)),
    ]
    Path("s.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for words in ((), ("--where", "reward > 0"), ("--sort", "reward")):
        assert "2 prompts" in inspected("s.jsonl", *words).splitlines()[0]
