"""The chat templates of the tests render what the published formats show, worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chat_families.families import ARGUMENTS, CHAT, FAMILIES, build_model, call_chat, rendered, table, tokenizer

from slimectl.types import Chat

DOCS = Path(__file__).parents[2] / "docs" / "chat-templates.md"
NAMES = [*FAMILIES]
CALLING = [name for name, family in FAMILIES.items() if family.calls]
USER, ASSISTANT = CHAT[1:3]


def fate(name: str, chat: Chat, text: str, **options: Any) -> str:
    """What became of a text in a chat: shown, ignored, or refused."""
    try:
        return "shown" if text in rendered(name, chat, **options) else "ignored"
    except Exception:  # whatever the template raises
        return "refused"


@pytest.mark.parametrize("name", NAMES)
def test_conversation_and_prompt(name: str):
    family = FAMILIES[name]
    expected, chat = family.rendering("chat"), family.conversation
    assert rendered(name, chat) == expected.text
    assert rendered(name, chat[:-1], header=True) == expected.prompt


@pytest.mark.parametrize("name", CALLING)
def test_calls(name: str):
    family = FAMILIES[name]
    expected, chat = family.rendering("calls"), family.call_conversation
    assert rendered(name, chat, tools=True) == expected.text
    assert rendered(name, chat[:-1], tools=True, header=True) == expected.prompt


@pytest.mark.parametrize("name", CALLING)
def test_form_of_arguments(name: str):
    family = FAMILIES[name]
    content = family.call_conversation[1]["content"]
    for form, arguments in (("object", ARGUMENTS), ("text", json.dumps(ARGUMENTS))):
        try:
            right = (
                rendered(name, call_chat(arguments, content, family.call_id), tools=True)
                == family.rendering("calls").text
            )
        except Exception:  # whatever the template raises
            right = False
        assert right == (form in family.arguments), form


@pytest.mark.parametrize("name", CALLING)
def test_null_content_beside_calls(name: str):
    family = FAMILIES[name]
    arguments = family.call_conversation[1]["tool_calls"][0]["function"]["arguments"]
    outcome = []
    for content in (None, ""):
        try:
            text = rendered(name, call_chat(arguments, content, family.call_id), tools=True)
            outcome.append("right" if text == family.rendering("calls").text else "None" if "None" in text else "wrong")
        except Exception:  # whatever the template raises
            outcome.append("refused")
    assert (
        outcome
        == {
            "empty": ["right", "right"],
            "None": ["None", "right"],
            "refused": ["refused", "right"],
            "required": ["right", "wrong"],
        }[family.null_content]
    )


@pytest.mark.parametrize("name", NAMES)
def test_what_the_template_reads(name: str):
    family = FAMILIES[name]
    chat = [{"role": "system", "content": "Heed."}, USER]
    system = fate(name, chat, "Heed.", header=True)
    if system == "shown" and fate(name, [*chat, ASSISTANT], "Heed.") == "ignored":
        system = "in prompts only"
    assert system == family.system
    assert fate(name, [{"role": "developer", "content": "Heed."}, USER], "Heed.", header=True) == family.developer
    parts = [{**USER, "content": [{"type": "text", "text": "Heed."}]}]
    read = fate(name, parts, "Heed.", header=True)
    if read == "shown":
        read = "repr" if "type" in rendered(name, parts, header=True) else "read"
    assert read == family.parts
    assert fate(name, [USER], "Look up", tools=True, header=True) == family.tools


@pytest.mark.parametrize("name", NAMES)
def test_thinking(name: str):
    family = FAMILIES[name]
    tagged = [USER, {**ASSISTANT, "content": "<think>\nHard.\n</think>\n\nFour."}]
    if family.think_tags == "text":
        assert "<think>\nHard.\n</think>\n\nFour." in rendered(name, tagged)
    else:
        assert fate(name, tagged, "Hard.") == {"read": "shown", "dropped": "ignored"}[family.think_tags]
    if family.reasoning:
        expected, chat = family.rendering("thoughts"), family.thinking_conversation
        assert rendered(name, chat) == expected.text
        assert rendered(name, chat[:-1], header=True) == expected.prompt
        assert ("Easy." in expected.text) == (family.earlier == "kept")
    for key in {"reasoning_content", "reasoning", "thinking"} - {family.reasoning}:
        assert fate(name, [USER, {**ASSISTANT, key: "Hard."}], "Hard.") != "shown", key


@pytest.mark.parametrize("name", NAMES)
def test_tokens(name: str):
    family, given = FAMILIES[name], tokenizer(name)
    for token in (*family.stops, *family.special, *family.added, family.eos):
        assert len(given.encode(token, add_special_tokens=False)) == 1, token
    assert given.encode("a") == ([given.bos_token_id] if family.adds_bos else []) + [ord("a")]
    taught = family.rendering("chat").taught
    for span in taught[-1:] if family.earlier_end else taught:
        assert any(span.endswith(stop) for stop in family.stops) == family.ends_turns


def test_model_stops_where_the_family_says(tmp_path: Path):
    from transformers import AutoTokenizer, GenerationConfig

    folder = build_model("glm4.5", tmp_path)
    loaded = AutoTokenizer.from_pretrained(folder)
    stops = GenerationConfig.from_pretrained(folder).eos_token_id
    assert loaded.convert_ids_to_tokens(stops) == ["<|endoftext|>", "<|user|>", "<|observation|>"]
    assert loaded.chat_template == FAMILIES["glm4.5"].template
    assert loaded.encode("<|user|>a") == tokenizer("glm4.5").encode("<|user|>a")


def page() -> str:
    """Return the page of the docs with the table of today."""
    before, heading, _ = DOCS.read_text(encoding="utf-8").partition("\n| family |")
    assert heading
    return f"{before}\n{table()}"


def test_docs_have_the_table():
    """Run `python tests/chats/test_families.py` to write it again."""
    assert DOCS.read_text(encoding="utf-8") == page()


if __name__ == "__main__":
    DOCS.write_text(page(), encoding="utf-8")
