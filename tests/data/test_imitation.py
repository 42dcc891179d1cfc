"""Loss masks taken from the chat template itself."""

from __future__ import annotations

from typing import Any

import pytest

from slimectl.checkpoints.create import CHATML, byte_tokenizer
from slimectl.data.chat import render
from slimectl.data.supervised import sft_sample
from slimectl.errors import RecordError
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
    "{{ m['content'] or '' }}{% for call in m['tool_calls'] or [] %}<call>{{ call.function.name }}</call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The header opens thinking, which turns of the past have closed and empty.
OPENED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and '<think>' not in m['content'] %}<think></think>{% endif %}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
TWO_ENDS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>"
    "{% if m['role'] == 'assistant' %}<|end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# A tool's answer goes into the turn that called it, and nowhere without a call.
INSIDE = (
    "{% for m in messages %}{% if m['role'] != 'tool' %}<|im_start|>{{ m['role'] }}\n{{ m['content'] or '' }}"
    "{% for call in m['tool_calls'] or [] %}<call>{{ call.function.name }}</call>{% endfor %}"
    "{% if not m['tool_calls'] %}<|im_end|>\n{% elif messages[loop.index] is defined %}"
    "<answer>{{ messages[loop.index]['content'] }}</answer>{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALLED = TOOLS.replace(
    "{{ m['content']",
    "{% if m['role'] == 'tool' and not messages[loop.index0 - 1]['tool_calls'] %}{{ raise_exception('no call') }}"
    "{% endif %}{{ m['content']",
)
DROPS_TOOLS = (
    "{% for m in messages %}{% if m['role'] != 'tool' %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As gpt-oss does: the last turn ends with another token than the earlier ones.
RETURNS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}: {{ m['content'] }}"
    "{% if m['role'] == 'assistant' and loop.last %}<|im_end|>{% else %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}"
)
PARTS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% for part in m['content'] %}{{ part['text'] }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
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
    with pytest.raises(RecordError, match="nothing to train on"):
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
    assert learned(TURNS[1:], BRACKETS) == " xyz <|end|>| yes, 2 <|end|>"
    assert learned(TURNS[1:], NO_END) == "xyz|yes, 2"


def test_tool_calls_are_the_assistants_words():
    chat = [TURNS[1], {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]},
            {"role": "tool", "content": "9"}, TURNS[2]]  # fmt: skip
    assert learned(chat, TOOLS) == "<call>f</call><|im_end|>|xyz<|im_end|>"


@pytest.mark.parametrize("template", [TOOLS, CALLED, INSIDE])
def test_what_a_tool_answers_is_never_the_assistants(template: str):
    calling = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    chat = [TURNS[1], calling, {"role": "tool", "content": "9"}, TURNS[2], *TURNS[3:]]
    end = "" if template == INSIDE else "<|im_end|>"
    assert learned(chat, template) == f"<call>f</call>{end}|xyz<|im_end|>|yes, 2<|im_end|>"


def test_what_the_header_opens_is_not_taught_and_what_ends_a_turn_is():
    assert learned(TURNS, OPENED) == "</think>xyz<|im_end|>|</think>yes, 2<|im_end|>"
    thought = {"role": "assistant", "content": "<think>\nhm\n</think>2"}
    assert learned([TURNS[1], thought], OPENED) == "hm\n</think>2<|im_end|>"
    assert learned(TURNS, TWO_ENDS) == "xyz<|im_end|><|end|>|yes, 2<|im_end|><|end|>"


def test_content_may_come_in_parts():
    chat = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in TURNS]
    assert learned(chat, PARTS) == "xyz<|im_end|>|yes, 2<|im_end|>"


def test_template_that_hides_the_assistant_is_refused():
    with pytest.raises(RecordError, match=r"does not show the content of message 0 \(system\)"):
        sft_sample(Prompt(TURNS[:3]), tokenizer("{% for m in messages %}{{ loop.index }},{% endfor %}"))


def test_a_message_that_the_template_drops_is_refused():
    chat = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "add"}]
    chat += [{"role": "tool", "content": "4"}, {"role": "assistant", "content": "It is 4"}]
    with pytest.raises(RecordError, match=r"does not show the content of message 2 \(tool\)"):
        learned(chat, DROPS_TOOLS)


def test_the_end_of_an_earlier_turn_is_taught_though_the_last_one_has_another():
    assert learned(TURNS, RETURNS) == "xyz<|end|>|yes, 2<|im_end|>"
