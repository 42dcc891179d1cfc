"""Chats as tokens, and loss masks taken from the template itself."""

from __future__ import annotations

from typing import Any

import pytest

from slimectl.checkpoints.create import CHATML, byte_tokenizer
from slimectl.data.chat import render, sft_sample
from slimectl.errors import RecordError, SettingsError
from slimectl.types import Chat, Prompt

TURNS: Chat = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "x?"},
    {"role": "assistant", "content": "xyz"},
    {"role": "user", "content": "assistant\n"},
    {"role": "assistant", "content": "yes, 2"},
]
# Like CHATML, with the assistant's text marked in the way that transformers understands.
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}\n"
    "{% else %}{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As reasoning models do: only the answer to the last question keeps its thinking.
THINKING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% set c = m['content'].split('</think>') %}"
    "{% if loop.index0 > ns.last %}<think>\n"
    "{{ c[0].replace('<think>', '').strip() if c | length > 1 else '' }}\n</think>\n\n{% endif %}{{ c[-1].strip() }}"
    "{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
BRACKETS = (
    "{% for m in messages %}{% if m['role'] == 'user' %}[Q] {{ m['content'] }} [/Q]"
    "{% else %} {{ m['content'] | trim }} <|end|>{% endif %}{% endfor %}"
)
NO_END = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}"
)
TOOLS = (
    "{% if tools %}tools {{ tools | length }}\n{% endif %}{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{{ m['content'] or '' }}{% for call in m['tool_calls'] or [] %}<call>{{ call['name'] }}</call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer(template: str | None = CHATML) -> Any:
    made = byte_tokenizer()
    made.chat_template = template
    return made


def learned(chat: Chat, template: str, **options: Any) -> str:
    """The tokens that count, as text, turns apart."""
    given = tokenizer(template)
    prompt = Prompt(chat, **{key: options.pop(key) for key in ("tools", "label") if key in options})
    tokens, length, mask = sft_sample(prompt, given, **options)
    assert len(mask) == length <= len(tokens)
    assert mask[0] == mask[-1] == 1
    text = ""
    for token, counts, before in zip(tokens[-length:], mask, [1, *mask], strict=False):
        text += given.decode([token]) if counts else "|" * before
    return text


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
    given = tokenizer(TOOLS)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert given.decode(render(Prompt(TURNS[:2], tools=tools), given)).startswith("tools 1\n")


def test_missing_or_refusing_template_is_explained():
    with pytest.raises(SettingsError, match="no chat template; give string prompts"):
        render(Prompt(TURNS[:2]), tokenizer(None))
    with pytest.raises(RecordError, match="refuses this chat: no system please"):
        render(Prompt(TURNS[:2]), tokenizer("{{ raise_exception('no system please') }}"))


def test_string_and_label_are_prompt_answer_and_end_token():
    given = tokenizer(None)
    assert sft_sample(Prompt("1+1=", label=2), given) == ([49, 43, 49, 61, 50, given.eos_token_id], 2, [1, 1])
    with pytest.raises(RecordError, match="label: missing"):
        sft_sample(Prompt("1+1="), given)


def test_assistant_turns_count_with_their_end_tokens():
    assert learned(TURNS, CHATML) == "xyz<|im_end|>|yes, 2<|im_end|>"
    assert learned([*TURNS, TURNS[1]], CHATML) == "xyz<|im_end|>|yes, 2<|im_end|>"  # what follows is cut
    assert learned([TURNS[2], TURNS[1]], CHATML) == "xyz<|im_end|>"


def test_label_is_one_more_turn():
    assert learned(TURNS[:2], CHATML, label=7) == "7<|im_end|>"
    tokens, length, _ = sft_sample(Prompt("x?", label="7"), tokenizer(), apply_chat_template=True)
    assert tokens[:-length] == render(Prompt("x?"), tokenizer(), apply_chat_template=True)
    with pytest.raises(RecordError, match="nothing to imitate"):
        sft_sample(Prompt(TURNS[:2]), tokenizer())


@pytest.mark.parametrize(
    "chat",
    [TURNS, TURNS[1:], TURNS[:3], [*TURNS, *TURNS[1:]],
     [TURNS[1], {"role": "assistant", "content": "<|im_start|>assistant\n"}, *TURNS[1:]],
     [TURNS[1], {"role": "assistant", "content": ""}, *TURNS[1:3]],
     [TURNS[1], *TURNS[2:3] * 2]],
)  # fmt: skip
def test_mask_is_that_of_a_marked_template(chat: Chat):
    given = tokenizer(MARKED)
    marked = given.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
    tokens, length, mask = sft_sample(Prompt(chat), given)
    whole = [0] * (len(tokens) - length) + mask
    assert tokens == list(marked["input_ids"])[: len(tokens)]
    assert whole == list(marked["assistant_masks"])[: len(tokens)]
    assert not any(list(marked["assistant_masks"])[len(tokens) :])


def test_template_that_drops_earlier_thinking():
    chat: Chat = [
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": "<think>easy</think>2"},
        {"role": "user", "content": "2+2"},
        {"role": "assistant", "content": "<think>hard</think>4"},
    ]
    assert learned(chat, THINKING) == "2<|im_end|>|<think>\nhard\n</think>\n\n4<|im_end|>"
    assert learned([*chat[:3], chat[1]], THINKING) == "2<|im_end|>|<think>\neasy\n</think>\n\n2<|im_end|>"
    # A tool's answer in between: both turns keep their thinking, until the next question.
    steps = [chat[0], chat[1], {"role": "tool", "content": "2"}, chat[3]]
    kept = "<think>\neasy\n</think>\n\n2<|im_end|>|<think>\nhard\n</think>\n\n4<|im_end|>"
    assert learned(steps, THINKING) == kept
    assert learned([*steps, *chat[2:]], THINKING) == "2<|im_end|>|4<|im_end|>|<think>\nhard\n</think>\n\n4<|im_end|>"


def test_thinking_switched_off_belongs_to_the_header():
    chat = [*TURNS[1:4], {"role": "assistant", "content": "4"}]
    assert learned(chat, THINKING, template_kwargs={"enable_thinking": False}) == "xyz<|im_end|>|4<|im_end|>"


def test_template_without_header_or_end_token():
    assert learned(TURNS[1:], BRACKETS) == "xyz <|end|>|yes, 2 <|end|>"
    assert learned(TURNS[1:], NO_END) == "xyz|yes, 2"


def test_tool_calls_are_the_assistants_words():
    chat = [TURNS[1], {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]},
            {"role": "tool", "content": "9"}, TURNS[2]]  # fmt: skip
    assert learned(chat, TOOLS) == "<call>f</call><|im_end|>|xyz<|im_end|>"


def test_template_that_hides_the_assistant_is_refused():
    with pytest.raises(RecordError, match="does not show what message 2"):
        sft_sample(Prompt(TURNS[:3]), tokenizer("{% for m in messages %}{{ loop.index }},{% endfor %}"))
