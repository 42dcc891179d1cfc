"""The terminal's lines of a table of samples."""

from __future__ import annotations

import json

import pytest

from slimectl.trackers.stdout import lines_of

CHAT = [
    {"role": "system", "content": "Answer."},
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "which colour?"}]},
]


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (json.dumps(CHAT), "'<image>which colour?'"),
        ("abc>", "'abc>'"),
        ('[{"a": 1}]', "'[{\"a\": 1}]'"),
        ("[{nothing", "'[{nothing'"),
        ("[{}, 1]", "'[{}, 1]'"),
    ],
)
def test_a_chat_is_shown_by_its_last_message_and_a_text_as_it_is(prompt: str, words: str):
    (line,) = lines_of([{"prompt": prompt, "response": "red", "label": "teal", "reward": 0.0}])
    assert line.strip().split("  ") == [words, "'red'", "'teal'", "0"]
