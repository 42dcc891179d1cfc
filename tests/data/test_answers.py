"""Answers of model families, divided as their chat templates write them, whole and while they come."""

from __future__ import annotations

import json
from typing import Any

import pytest

from slimectl.checkpoints.create import byte_tokenizer
from slimectl.data.answers import ParsedAnswer, format_of
from slimectl.data.tool_calls import NOTATIONS

TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "zip": {"type": "string"},
        "metric": {"type": "boolean"}, "at": {"type": "array"}}}}},
    {"type": "function", "function": {"name": "time.now", "parameters": {"type": "object", "properties": {}}}},
]  # fmt: skip
ARGUMENTS = {"city": 'São "Paulo"\n<b>', "days": 3, "zip": "01310", "metric": True, "at": [1, {"x": None}]}
CALLS = [("get_weather", ARGUMENTS), ("time.now", {})]

SHORT = {
    "@reasoning": "{{ m.reasoning_content }}", "@content": "{{ m.content }}", "@each": "{% for c in m.tool_calls %}",
    "@name": "{{ c.function.name }}", "@id": "{{ c.id }}", "@arguments": "{{ c.function.arguments | tojson }}",
    "@pairs": "{% for k, v in c.function.arguments.items() %}", "@key": "{{ k }}", "@end": "{% endfor %}",
    "@value": "{{ v if v is string else v | tojson }}",
    "@python": "{{ v | tojson if v is mapping or (v is sequence and v is not string) else v }}",
}  # fmt: skip


def template(turn: str, *, head: str = "") -> str:
    """A template of our own that writes the assistant's turn, after a bar, as those of the models do."""
    for word, code in SHORT.items():
        turn = turn.replace(word, code)
    return head + "|{%- set m = messages[-1] %}" + turn


QWEN = template(
    "<think>\n@reasoning\n</think>\n\n@content"
    '@each\n<tool_call>\n{"name": "@name", "arguments": @arguments}\n</tool_call>@end'
)
CODER = template(
    "<think>\n@reasoning\n</think>\n\n@content@each\n\n<tool_call>\n<function=@name>\n"
    "@pairs<parameter=@key>\n@python\n</parameter>\n@end</function>\n</tool_call>@end"
)
GLM45 = template(
    "<think>@reasoning</think>\n@content@each\n<tool_call>@name\n"
    "@pairs<arg_key>@key</arg_key>\n<arg_value>@value</arg_value>\n@end</tool_call>@end"
)
DEEPSEEK_V3 = template(
    "<think>\n@reasoning\n</think>\n\n@content<｜tool▁calls▁begin｜>@each"
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>@name\n```json\n@arguments\n```<｜tool▁call▁end｜>\n@end"
    "<｜tool▁calls▁end｜>"
)
DEEPSEEK_V31 = template(
    "<think>@reasoning</think>@content<｜tool▁calls▁begin｜>@each"
    "<｜tool▁call▁begin｜>@name<｜tool▁sep｜>@arguments<｜tool▁call▁end｜>@end<｜tool▁calls▁end｜>"
)
KIMI = template(
    "<think>@reasoning</think>@content<|tool_calls_section_begin|>@each"
    "<|tool_call_begin|>@id<|tool_call_argument_begin|>@arguments<|tool_call_end|>@end<|tool_calls_section_end|>"
)
MINIMAX = template(
    "<think>\n@reasoning\n</think>\n\n@content\n<minimax:tool_call>\n@each"
    '<invoke name="@name">\n@pairs<parameter name="@key">@value</parameter>\n@end</invoke>\n@end</minimax:tool_call>'
)
LLAMA = template(
    '@each{"name": "@name", "parameters": @arguments}{% if not loop.last %}; {% endif %}@end',
    head='{"name": function name, "parameters": dictionary of argument name and its value}',
)
GLM4 = template("@each@name\n@arguments@end", head="{% if false %}<|observation|>{{ m.metadata }}{% endif %}")
FAMILIES = [
    ("hermes", QWEN), ("qwen3_coder", CODER), ("glm45", GLM45), ("deepseek", DEEPSEEK_V3), ("deepseek", DEEPSEEK_V31),
    ("kimi_k2", KIMI), ("minimax_m2", MINIMAX), ("llama3", LLAMA), ("glm4", GLM4),
]  # fmt: skip


def written(chat_template: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = chat_template
    tool_calls = [
        {"id": f"functions.{name}:{i}", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]
    turn = {
        "role": "assistant",
        "content": "Let me look.",
        "reasoning_content": "which\n\ncity?",
        "tool_calls": tool_calls,
    }
    chat = [{"role": "user", "content": "Weather?"}, turn]
    return tokenizer.apply_chat_template(chat, tools=TOOLS, tokenize=False).partition("|")[2]


@pytest.mark.parametrize(("name", "chat_template"), FAMILIES)
def test_what_a_template_writes_is_read_again_whole_and_as_it_comes(name: str, chat_template: str):
    calls = CALLS[: 1 if name == "glm4" else 2]
    text, family = written(chat_template, calls), format_of(chat_template)
    assert family.notation is not None
    assert family.notation.name == name
    parsed = family.parse(text, TOOLS)
    assert [(call.name, json.loads(call.arguments)) for call in parsed.tool_calls] == calls
    whole_answer_is_call = not family.notation.opening
    assert parsed.content == ("" if whole_answer_is_call else "Let me look.")
    assert parsed.reasoning == (None if whole_answer_is_call else "which\n\ncity?")
    if name == "kimi_k2":
        assert [call.call_id for call in parsed.tool_calls] == ["functions.get_weather:0", "functions.time.now:1"]
    before = ParsedAnswer("")
    for end in range(len(text) + 1):
        part = family.parse(text[:end], TOOLS, complete=False)
        for longer, shorter in ((part, before), (parsed, part)):
            assert longer.content.startswith(shorter.content)
            assert (longer.reasoning or "").startswith(shorter.reasoning or "")
            assert longer.tool_calls[: len(shorter.tool_calls)] == shorter.tool_calls
        before = part
    assert family.parse(text).tool_calls == ()  # without tools nothing is a call


TAGS = [
    'return "</parameter>"', "</function>", "<parameter=x>\n1\n</parameter>", "<function=f>\n</function>",
    "</tool_call>", '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', "</arg_value>",
    'print("<parameter=x>")',
    "<arg_key>x</arg_key>\n<arg_value>y</arg_value>", '<parameter name="x">1</parameter>', '<invoke name="f"></invoke>',
    "</minimax:tool_call>", "<|tool_call_end|><|tool_calls_section_end|>", "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>", "```json\n{}\n```", '{"a": {"b": "}"}}; {', "</think>", "NaN",
]  # fmt: skip
"""Strings that an argument may have, as a program that writes calls: tags of the notations themselves."""


@pytest.mark.parametrize("value", TAGS)
@pytest.mark.parametrize(("name", "chat_template"), FAMILIES)
def test_an_argument_may_contain_the_tags_of_its_notation(name: str, chat_template: str, value: str):
    calls: list[tuple[str, dict[str, Any]]] = [
        ("get_weather", {"city": value, "days": 3, "zip": f"a {value} b"}),
        ("get_weather", {"days": 4, "city": f"{value}\n{value}"}),
    ]
    calls = calls[: 1 if name == "glm4" else 2]
    text, family = written(chat_template, calls), format_of(chat_template)
    parsed = family.parse(text, TOOLS)
    assert [(call.name, json.loads(call.arguments)) for call in parsed.tool_calls] == calls
    assert parsed.content == ("" if family.notation is None or not family.notation.opening else "Let me look.")
    for end in range(0, len(text), 7):
        part = family.parse(text[:end], TOOLS, complete=False)
        assert parsed.content.startswith(part.content)
        assert parsed.tool_calls[: len(part.tool_calls)] == part.tool_calls


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "[1, NaN]", '{"a": -Infinity}'])
@pytest.mark.parametrize(("name", "chat_template"), FAMILIES)
def test_a_number_that_is_not_json_is_never_sent_as_one(name: str, chat_template: str, number: str):
    mark = "a value to be replaced"
    text = written(chat_template, [("get_weather", {"days": mark, "any": mark})])
    text = text.replace(f'"{mark}"', number).replace(mark, number)
    parsed = format_of(chat_template).parse(text, TOOLS)
    if name in ("glm45", "qwen3_coder", "minimax_m2"):  # whose arguments are texts
        [call] = parsed.tool_calls
        assert json.loads(call.arguments) == {"days": number, "any": number}
    else:  # malformed, as it stands
        assert parsed.tool_calls == ()
        assert number in parsed.content


@pytest.mark.parametrize(
    ("call", "content"),
    [
        ("<tool_call>\n<function=f>\n<parameter=x>\n1\n</function>\n</tool_call>", None),
        ("<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</tool_call>", None),
        ("<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>", None),
        ("<tool_call>\n</tool_call>\n" * 20, None),
        # The good block after a malformed one is a call.
        ("<tool_call>\n<function=f>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>",
         "<tool_call>\n<function=f>\n</tool_call>"),
    ],
)  # fmt: skip
def test_what_is_not_closed_stays_in_the_content(call: str, content: str | None):
    parsed = format_of(CODER).parse(call, TOOLS)
    assert parsed.content == (call if content is None else content)
    assert [each.name for each in parsed.tool_calls] == ([] if content is None else ["g"])


def test_every_notation_is_tried():
    assert {notation.name for notation in NOTATIONS} == {name for name, _ in FAMILIES}


def test_what_follows_a_malformed_call_is_streamed_at_once_unless_the_call_may_go_on():
    broken = "<tool_call>{'name': 'f'}</tool_call> so"
    assert format_of(QWEN).parse(broken, TOOLS, complete=False).content == broken
    within = '<tool_call>{"name": "f", "arguments": {"x": "</tool_call> so'
    assert format_of(QWEN).parse(within, TOOLS, complete=False).content == ""
    assert format_of(QWEN).parse(within, TOOLS).content == within


@pytest.mark.parametrize(
    ("text", "content", "names"),
    [
        ("<tool_call>\n{\"name\": \"time.now\"}\n</tool_call>", "", ["time.now"]),
        ("<tool_call>{'name': 'f'}</tool_call> so", "<tool_call>{'name': 'f'}</tool_call> so", []),
        ('a <tool_call>[1]</tool_call>\n<tool_call>{"name": "g", "arguments": {}}</tool_call>\nb ',
         "a <tool_call>[1]</tool_call>\nb", ["g"]),
        ('<tool_call>{"name": "g", "argu', '<tool_call>{"name": "g", "argu', []),
        ("x <tool", "x <tool", []),
        ("plain, with blanks \n", "plain, with blanks \n", []),
    ],
)  # fmt: skip
def test_a_call_that_is_malformed_or_cut_stays_in_the_content(text: str, content: str, names: list[str]):
    parsed = format_of(QWEN).parse(text, TOOLS)
    assert (parsed.content, [call.name for call in parsed.tool_calls]) == (content, names)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('{"name": "time.now", "parameters": {"s": "a; {b"}}', ["time.now"]),
        ('<|python_tag|>{"name": "time.now", "parameters": {}} ;{"name": "get_weather", "parameters": {}};',
         ["time.now", "get_weather"]),
        ('{"name": "Ann", "parameters": {}}', []),  # no tool of that name: an answer in JSON
        ('{"name": "time.now", "parameters": {}} is what I would call', []),
        ("time.now", []),
    ],
)  # fmt: skip
def test_an_object_is_a_call_of_llama_s_if_a_tool_has_its_name(text: str, names: list[str]):
    parsed = format_of(LLAMA).parse(text, TOOLS)
    assert [call.name for call in parsed.tool_calls] == names
    assert parsed.content == ("" if names else text)


@pytest.mark.parametrize(
    ("family", "text", "content"),
    [
        (LLAMA, "It is", "It is"),
        (LLAMA, "<|python", ""),  # the token may still come
        (LLAMA, "<|python_tag|>print", "<|python_tag|>print"),
        (LLAMA, ' {"name', ""),
        (GLM4, "get_wea", ""),
        (GLM4, "get_well soon", "get_well soon"),
        (GLM4, "get_weather\n", ""),
        (GLM4, "get_weather now\n", "get_weather now"),
    ],
)
def test_an_answer_that_is_no_call_as_a_whole_is_content_at_once(family: str, text: str, content: str):
    assert format_of(family).parse(text, TOOLS, complete=False) == ParsedAnswer(content)


@pytest.mark.parametrize(
    ("text", "prompt", "reasoning", "content"),
    [
        ("<think>\na\n</think>\n\nb", "", "a", "b"),
        ("a\n</think>\n\nb", "<|im_start|>assistant\n<think>\n", "a", "b"),  # the template opened it
        ("a, cut", "…<think>\n", "a, cut", ""),
        ("b </think>", "", None, "b </think>"),
        ("b", "…<think>\n\n</think>\n\n", None, "b"),  # the template opened and closed it
        ("<think>\n\n</think>\n\nb", "", "", "b"),
    ],
)
def test_reasoning_is_what_stands_between_its_tags(text: str, prompt: str, reasoning: str | None, content: str):
    assert format_of(QWEN).parse(text, prompt=prompt) == ParsedAnswer(content, reasoning)
    assert format_of("{{ messages }}").parse(text, prompt=prompt) == ParsedAnswer(text)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "integer"}, "5", 5),
        ({"type": "number"}, "5", 5),
        ({"type": ["string", "null"]}, "5", "5"),
        ({"type": ["string", "null"]}, "null", None),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "5", 5),
        ({"type": "boolean"}, "True", True),
        ({"type": "string"}, "True", "True"),
        ({}, "[1", "[1"),
        ({}, "[1]", [1]),
    ],
)
def test_an_argument_that_is_written_as_text_has_the_type_that_its_tool_declares(schema: Any, text: str, value: Any):
    tool = {"name": "f", "parameters": {"properties": {"x": schema}}}
    call = f"<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"
    (parsed,) = format_of(GLM45).parse(call, [tool]).tool_calls
    assert json.loads(parsed.arguments) == {"x": value}
    assert type(json.loads(parsed.arguments)["x"]) is type(value)


def test_of_several_templates_each_may_have_the_format():
    assert format_of({"default": "</think>", "tool_use": "<tool_call>"}) == format_of("</think> <tool_call>")
