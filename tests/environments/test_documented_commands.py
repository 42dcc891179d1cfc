"""Command lines of docs/environments.md run as they stand."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from workshop import Workshop

ROOT = Path(__file__).parents[2]
SMALL = [
    "-n",
    "1",
    "-s",
    "rollout.env_turn_tokens=2",
    "-s",
    "rollout.env_max_turns=3",
    "-s",
    "rollout.max_response_len=150",
]


def documented_commands() -> Iterator[list[str]]:
    """Yield the words of each command in a block of the page, without those that it leaves to the reader."""
    blocks = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8").split("```")[1::2]
    for line in "".join(blocks).splitlines():
        if line.startswith("slimectl "):
            yield shlex.split(line.partition(" > ")[0].replace("…", ""))[1:]


@pytest.mark.slow
def test_the_commands_are_complete_but_for_model_and_data(workshop: Workshop):
    (workshop.folder / "questions.jsonl").write_text((workshop.folder / "prompts.jsonl").read_text())
    commands = list(documented_commands())
    assert len(commands) >= 6
    for words in commands:
        if "--model" in words:
            words[words.index("--model") + 1] = str(workshop.model)
        output = workshop.slimectl(*words, "-c", "slimectl.toml", "--dry-run")
        assert f"rollout.env = {words[words.index('--env') + 1]}".encode() in output


def test_the_command_of_gymnasium_plays(workshop: Workshop):
    pytest.importorskip("gymnasium")
    [words] = [words for words in documented_commands() if any("is_slippery" in word for word in words)]
    only = ["-s", "score.custom_rm_path=none", "--data", "env@[:2]"]
    output = workshop.slimectl(*words, "-c", "slimectl.toml", *only, *SMALL)
    samples = [json.loads(line) for line in output.splitlines()]
    assert len(samples) == 2
    for sample in samples:
        assert (1 <= sample["metadata"]["env"]["turns"] <= 3, sample["reward"]) == (True, 0.0)
