"""Chats as the tokens that a model is asked to continue."""

from __future__ import annotations

from typing import Any

import pytest

from slimectl.checkpoints.create import CHATML, byte_tokenizer
from slimectl.data.chat import following, render
from slimectl.errors import RecordError, SettingsError
from slimectl.types import Chat, Prompt

TURNS: Chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "x?"}]
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def tokenizer(template: str | None = CHATML) -> Any:
    made = byte_tokenizer()
    made.chat_template = template
    return made


def test_string_is_tokenised_as_it_stands():
    assert render(Prompt("é="), tokenizer(None)) == [0xC3, 0xA9, ord("=")]


def test_string_becomes_one_user_message_where_asked():
    given = tokenizer()
    asked = given.decode(render(Prompt("hi"), given, apply_chat_template=True))
    assert asked == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert render(Prompt([{"role": "user", "content": "hi"}]), given) == given.encode(asked)


def test_template_gets_its_arguments_and_the_tools():
    given = tokenizer(THINKING)
    assert given.decode(
        render(Prompt("hi"), given, apply_chat_template=True, template_kwargs={"enable_thinking": False})
    ).endswith("assistant\n<think>\n\n</think>\n\n")
    given = tokenizer(
        "{{ tools | map(attribute='function.name') | join }}{% for m in messages %}|{{ m.content }}{% endfor %}"
    )
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert given.decode(render(Prompt(TURNS, tools=tools), given)) == "f|be brief|x?"


def test_missing_or_refusing_template_is_explained():
    with pytest.raises(SettingsError, match=r"no chat template\. Use string prompts"):
        render(Prompt(TURNS), tokenizer(None))
    with pytest.raises(RecordError, match="refuses this chat: no system please"):
        render(Prompt(TURNS), tokenizer("{{ raise_exception('no system please') }}"))


def test_an_argument_that_the_template_does_not_read_is_refused():
    def asked(**kwargs: Any) -> None:
        render(Prompt(TURNS), tokenizer(THINKING), template_kwargs=kwargs)

    with pytest.raises(SettingsError, match=r"kwargs: enable_thinkng .*Did you mean enable_thinking\?"):
        asked(enable_thinkng=False)
    with pytest.raises(SettingsError, match="kwargs: add_generation_prompt is set by slimectl"):
        asked(add_generation_prompt=False)


def test_errors_say_where_the_prompt_stands():
    with pytest.raises(RecordError, match=r"^p\.jsonl:3: prompt: the chat template refuses this chat: no"):
        render(Prompt(TURNS, source_location="p.jsonl:3"), tokenizer("{{ raise_exception('no') }}"))
    with pytest.raises(RecordError, match=r"^p\.jsonl:4: prompt: half of a surrogate pair at character 2"):
        render(Prompt("é\ud83d", source_location="p.jsonl:4"), tokenizer())


def test_what_follows_an_answer_that_the_template_hides_is_refused():
    with pytest.raises(RecordError, match=r"does not show the content of message 0 \(user\)"):
        following(tokenizer("{{ messages | length }}"), [{"role": "user", "content": "?"}])
