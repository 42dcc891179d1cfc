"""Rows become the tokens of the family's own template, and what is taught ends where the engine stops."""

from __future__ import annotations

import json
from typing import Any

import pytest
from chat_families.families import ARGUMENTS, CHAT, FAMILIES, TOOL, Family, call_chat, rendered, tokenizer

from slimectl.data.chat import render
from slimectl.data.supervised import sft_sample
from slimectl.errors import RecordError, SettingsError
from slimectl.types import Chat, Prompt

NAMES = [name for name, family in FAMILIES.items() if family.ends_turns]
ENDLESS = [name for name in FAMILIES if name not in NAMES]
CALLING = [name for name in NAMES if FAMILIES[name].calls]
KINDS = [(name, kind) for name in NAMES for kind in ("chat", "calls", "thoughts") if getattr(FAMILIES[name], kind)]


def chat_of(family: Family, kind: str) -> Chat:
    return {
        "chat": lambda: family.conversation,
        "calls": lambda: family.call_conversation,
        "thoughts": lambda: family.thinking_conversation,
    }[kind]()


def spans_of(family: Family, prompt: Prompt) -> list[list[int]]:
    """The runs of tokens that supervised training counts."""
    given: Any = tokenizer(family.name)
    stops = given.convert_tokens_to_ids([*family.stops])
    tokens, length, mask = sft_sample(prompt, given, template_kwargs=family.template_kwargs, end_tokens=stops)
    runs: list[list[int]] = []
    for token, counts, before in zip(tokens[-length:], mask, [0, *mask], strict=False):
        if counts and not before:
            runs.append([])
        if counts:
            runs[-1].append(token)
    return runs


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_prompt_has_the_tokens_of_the_template(name: str, kind: str):
    family, given = FAMILIES[name], tokenizer(name)
    chat = chat_of(family, kind)[:-1]
    tools = [TOOL] if kind == "calls" else None
    tokens = render(Prompt(chat, tools=tools), given, template_kwargs=family.template_kwargs)
    text = rendered(name, chat, tools=kind == "calls", header=True)
    assert tokens == given.encode(text, add_special_tokens=False)
    assert given.decode(tokens) == family.rendering(kind).prompt


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_taught_are_the_turns_and_their_ends(name: str, kind: str):
    family, given = FAMILIES[name], tokenizer(name)
    prompt = Prompt(chat_of(family, kind), tools=[TOOL] if kind == "calls" else None)
    taught = spans_of(family, prompt)
    assert [given.decode(span) for span in taught] == family.rendering(kind).taught
    ends = {*given.convert_tokens_to_ids([*family.stops])}
    assert {span[-1] for span in (taught[-1:] if family.earlier_end else taught)} <= ends


def prompt_text(name: str, chat: Chat) -> str:
    given = tokenizer(name)
    return str(given.decode(render(Prompt(chat), given, template_kwargs=FAMILIES[name].template_kwargs)))


@pytest.mark.parametrize("content", [None, ""])
@pytest.mark.parametrize("arguments", [ARGUMENTS, json.dumps(ARGUMENTS)], ids=["object", "text"])
@pytest.mark.parametrize("name", CALLING)
def test_calls_are_taught_in_every_form_of_a_row(name: str, arguments: Any, content: str | None):
    taught = spans_of(FAMILIES[name], Prompt(call_chat(arguments, content, FAMILIES[name].call_id), tools=[TOOL]))
    assert [tokenizer(name).decode(span) for span in taught] == FAMILIES[name].rendering("calls").taught


@pytest.mark.parametrize("name", NAMES)
def test_parts_of_text_are_one_text(name: str):
    parts = [{"type": "text", "text": "1+1?"}, {"type": "text", "text": " Think."}]
    one = prompt_text(name, [{"role": "user", "content": "1+1? Think."}])
    assert prompt_text(name, [{"role": "user", "content": parts}]) == one


@pytest.mark.parametrize("name", NAMES)
def test_a_developer_is_the_system_where_the_template_knows_none(name: str):
    family = FAMILIES[name]
    chat = [{"role": "developer", "content": "Heed."}, CHAT[1]]
    if family.developer != "shown" and family.system in ("refused", "ignored"):
        with pytest.raises(RecordError):
            prompt_text(name, chat)
        return
    role = "developer" if "developer" in family.template else "system"
    assert prompt_text(name, chat) == rendered(name, [{**chat[0], "role": role}, CHAT[1]], header=True)


@pytest.mark.parametrize("name", NAMES)
def test_reasoning_that_the_template_does_not_show_is_refused(name: str):
    family = FAMILIES[name]
    if not family.reasoning:
        with pytest.raises(RecordError):
            spans_of(family, Prompt([CHAT[1], {**CHAT[2], "reasoning_content": "Hard."}]))
    tagged = Prompt([CHAT[1], {**CHAT[2], "content": "<think>\nHard.\n</think>\n\nTwo."}])
    if family.think_tags == "dropped":
        with pytest.raises(RecordError):
            spans_of(family, tagged)
    else:
        assert "Hard." in tokenizer(name).decode(spans_of(family, tagged)[0])


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("name", [name for name in NAMES if FAMILIES[name].reasoning])
def test_reasoning_under_every_name_is_taught(name: str, key: str):
    family = FAMILIES[name]
    chat = [CHAT[1], {**CHAT[2], key: "Easy."}, CHAT[3], {**CHAT[4], key: "Hard."}]
    taught = spans_of(family, Prompt(chat))
    assert [tokenizer(name).decode(span) for span in taught] == family.rendering("thoughts").taught


@pytest.mark.parametrize("name", [name for name in NAMES if FAMILIES[name].system in ("ignored", "in prompts only")])
def test_a_system_message_that_vanishes_is_refused(name: str):
    with pytest.raises(RecordError):
        spans_of(FAMILIES[name], Prompt(CHAT))


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_whose_turns_do_not_end_is_refused(name: str):
    with pytest.raises((RecordError, SettingsError)):
        spans_of(FAMILIES[name], Prompt(CHAT))
