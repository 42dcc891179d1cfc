"""The form in which a template takes messages, and what it leaves out."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from chat_families.families import FAMILIES, TOOL, call_chat, tokenizer

from slimectl.chats import template as templates
from slimectl.checkpoints.create import byte_tokenizer
from slimectl.data.chat import encode_raw, render
from slimectl.data.prompts import open_prompts
from slimectl.data.supervised import sft_sample
from slimectl.errors import RecordError, SettingsError
from slimectl.types import Chat, Prompt

USER = {"role": "user", "content": "q"}
PARIS = {"city": "Paris"}
ENDED = "{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}CALL{% endfor %}<|im_end|>"


def given(source: str) -> Any:
    built = byte_tokenizer()
    built.chat_template = source
    return built


def text_of(source: str, chat: Chat, **options: Any) -> str:
    tokens = given(source)
    return str(tokens.decode(render(Prompt(chat, **options), tokens)))


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Any:
    templates._warned.clear()
    with caplog.at_level(logging.INFO, logger="slimectl"):
        yield lambda: [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    "printed",
    ["{{ c.function.arguments | tojson }}", "{{ c.function.arguments }}", "{{ '' + c.function.arguments }}",
     "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}"],
)  # fmt: skip
@pytest.mark.parametrize("arguments", [{"city": "Paris"}, '{"city": "Paris"}'], ids=["object", "text"])
def test_arguments_are_printed_once_in_whatever_form_the_template_takes(printed: str, arguments: Any):
    source = "{% for m in messages %}" + ENDED.replace("CALL", "{{ c.function.name }}" + printed) + "{% endfor %}"
    text = text_of(source, call_chat(arguments)[:3], tools=[TOOL])
    assert text == 'user: Weather?<|im_end|>assistant: lookup{"city": "Paris"}<|im_end|>tool: sunny<|im_end|>'


def test_arguments_that_a_model_broke_off_do_not_end_the_conversation():
    iterates = ENDED.replace(
        "CALL", "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}{{ c.function.name }}"
    )
    for broken in ('{"ci', "", None):
        text = text_of("{% for m in messages %}" + iterates + "{% endfor %}", call_chat(broken)[:3])
        assert text == "user: Weather?<|im_end|>assistant: lookup<|im_end|>tool: sunny<|im_end|>"


def test_null_arguments_that_a_tool_does_not_have_are_padding():
    tokens = tokenizer("qwen2.5")
    padded, plain = (call_chat(arguments)[:3] for arguments in ({"city": "Paris", "unit": None}, {"city": "Paris"}))
    assert render(Prompt(padded, tools=[TOOL]), tokens) == render(Prompt(plain, tools=[TOOL]), tokens)
    assert '"city": null' in tokens.decode(render(Prompt(call_chat({"city": None})[:3], tools=[TOOL]), tokens))


@pytest.mark.parametrize(
    ("chat", "words"),
    [
        ([{"role": "critic", "content": "Heed."}, USER], r"does not show the content of message 0 \(critic\)"),
        ([USER, {"role": "assistant", "content": "Hm.", "tool_calls": [{"name": "f", "arguments": {"a": 1}}]},
          {"role": "tool", "content": "1"}], r"does not show the calls of message 1 \(assistant\)"),
        ([USER, {"role": "assistant", "content": "Hm.", "tool_calls": [{"name": "f", "arguments": {}}]},
          {"role": "tool", "content": "1"}], r"does not show the calls of message 1 \(assistant\)"),
        ([{"role": "user", "content": [{"type": "video"}]}], r"message\[0\]\.content: has a part of type 'video'"),
        ([USER, {"role": "assistant", "content": ""}], "ends with an empty message of the assistant"),
        ([USER, {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}], "ends with tool calls"),
    ],
)  # fmt: skip
def test_a_part_that_leaves_no_trace_is_refused(chat: Chat, words: str):
    source = "{% for m in messages %}{% if m.role in ('user', 'assistant', 'tool') %}" + (
        ENDED.replace("{% for c in m.tool_calls or [] %}CALL{% endfor %}", "") + "{% endif %}{% endfor %}"
    )
    if "ends with tool calls" in words:
        source = source.replace("<|im_end|>", "{{ m.tool_calls[0].function.name if m.tool_calls }}<|im_end|>")
    with pytest.raises(RecordError, match=f"p:1: prompt: .*{words}"):
        render(Prompt(chat, source_location="p:1"), given(source))


def test_each_shape_is_tried_once(monkeypatch: pytest.MonkeyPatch):
    tokens, renderings = tokenizer("qwen2.5"), 0
    template = templates.Template(tokens, Prompt(""), None)

    def counted(chat: Chat, **options: Any) -> str:
        nonlocal renderings
        renderings += 1
        return tokens.apply_chat_template(chat, tokenize=False, add_generation_prompt=options["header"])

    monkeypatch.setattr(template, "text", counted)
    templates._findings.pop(tokens, None)
    for i in range(5):
        template.fit([{"role": "user", "content": f"{i} apples"}, {"role": "assistant", "content": "no" * i + "!"}])
    assert renderings == 1


def test_tools_unknown_keys_and_reasoning_that_do_not_show_are_named_once(said: Any):
    tokens = tokenizer("smollm2")
    answered = {"role": "assistant", "content": "", "tool_calls": [], "reasoning_content": "Hm.", "mood": "calm"}
    for text in ("a", "b"):
        chat = [USER, {**answered, "content": text}, {"role": "tool", "content": text}]
        render(Prompt(chat, tools=[TOOL]), tokens)
    assert sorted(said()) == [
        "message key 'mood' is not read by slimectl or by the model's chat template",
        "the model's chat template does not show the reasoning of message 1 (assistant)",
        "the model's chat template does not show the tools of a prompt: lookup",
    ]


def test_a_chat_that_ends_with_the_assistant_is_continued():
    tokens = tokenizer("qwen2.5")
    chat = [USER, {"role": "assistant", "content": "The answer is"}]
    prompt = render(Prompt(chat), tokens)
    assert tokens.decode(prompt).endswith("<|im_start|>assistant\nThe answer is")
    taught, length, mask = sft_sample(Prompt(chat, label=" 4"), tokens)
    assert (taught[:-length], tokens.decode(taught[-length:])) == (prompt, " 4<|im_end|>")
    assert mask == [1] * length


@pytest.mark.parametrize(
    ("family", "header"),
    [("qwen3", "<|im_start|>assistant\n<think>\n"), ("qwen3-thinking-2507", "<|im_start|>assistant\n<think>\n"),
     ("qwen2.5", "<|im_start|>assistant\n<think>\n"), ("glm4.5", "<|assistant|>\n<think>"),
     ("deepseek-r1", "<｜Assistant｜><think>\n"), ("kimi-k2-thinking", "assistant<|im_middle|><think>\n"),
     ("nemotron-nano2", "<SPECIAL_11>Assistant\n<think>\n"), ("llama2", "[/INST] <think>\n")],
)  # fmt: skip
def test_an_unfinished_thought_is_continued_after_one_header(family: str, header: str):
    tokens = tokenizer(family)
    chat = [USER, {"role": "assistant", "content": "<think>\nHm"}]
    text = tokens.decode(render(Prompt(chat), tokens))
    assert text.endswith(header + "Hm")
    assert text.count("think>") == 1
    if family in ("qwen3", "glm4.5", "qwen2.5"):
        stops = tokens.convert_tokens_to_ids([*FAMILIES[family].stops])
        taught, length, _ = sft_sample(Prompt(chat, label=".\n</think>\n\n4"), tokens, end_tokens=stops)
        assert tokens.decode(taught[:-length]) == text


def test_lists_of_parts_that_a_template_prints_are_not_a_form_of_a_text():
    ended = ENDED.replace("m.content", "m.content if m.content | length < 4")
    with pytest.raises(RecordError, match=r"does not show the content of message 0 \(user\)"):
        text_of("{% for m in messages %}" + ended + "{% endfor %}", [USER])


def test_a_template_that_refuses_stand_ins_is_tried_with_the_texts_themselves():
    asks = "{% if m.role == 'user' and '?' not in m.content %}{{ raise_exception('no question') }}{% endif %}"
    printed = ENDED.replace("CALL", "{{ c.function.name }}{{ c.function.arguments }}")
    text = text_of("{% for m in messages %}" + asks + printed + "{% endfor %}", call_chat(PARIS)[:3])
    assert text == 'user: Weather?<|im_end|>assistant: lookup{"city": "Paris"}<|im_end|>tool: sunny<|im_end|>'
    no_system = "{% for m in messages if m.role != 'system' %}" + asks + ENDED + "{% endfor %}"
    with pytest.raises(RecordError, match=r"does not show the content of message 0 \(system\)"):
        text_of(no_system, [{"role": "system", "content": "Heed."}, {"role": "user", "content": "q?"}])


def test_of_several_templates_the_one_for_tools_or_the_default_is_used():
    plain = "{% for m in messages %}" + ENDED + "{% endfor %}"
    both: Any = {"default": plain, "tool_use": "{{ tools[0].function.name }}: " + plain}
    assert text_of(both, [USER]) == "user: q<|im_end|>"
    assert text_of(both, [USER], tools=[TOOL]) == "lookup: user: q<|im_end|>"
    both["rag"] = both.pop("default")
    with pytest.raises(SettingsError, match="has the chat templates tool_use, rag, and none is called default"):
        text_of(both, [USER])


def test_a_long_text_of_marks_is_read_in_one_pass():
    tokens = tokenizer("qwen3")
    chat = [{"role": "user", "content": "<tool_call> x " * 20_000}]
    [message] = templates.Template(tokens, Prompt(""), None).fit(chat)
    assert message == chat[0]


@pytest.mark.parametrize(("text", "wanted"), [("hi", "<bos>hi"), ("<bos>hi", "<bos>hi"), ("", "<bos>")])
def test_a_raw_text_begins_with_one_bos_where_the_tokenizer_adds_it(text: str, wanted: str):
    gemma, qwen = tokenizer("gemma3"), tokenizer("qwen2.5")
    assert gemma.decode(encode_raw(gemma, text)) == wanted
    assert render(Prompt(text), gemma) == encode_raw(gemma, text)
    assert encode_raw(qwen, "hi") == [ord("h"), ord("i")]
    if text:
        tokens, length, _ = sft_sample(Prompt(text, label="there"), gemma)
        assert tokens[:-length] == encode_raw(gemma, text)


@pytest.mark.parametrize(
    ("added", "wanted"), [("[gMASK] <sop> $A", "[gMASK]<sop>hi"), ("<sop> $A [gMASK]", "<sop>hi"), ("$A <sop>", "hi")]
)
def test_a_raw_text_begins_with_all_that_its_tokenizer_puts_there(added: str, wanted: str):
    from tokenizers import processors

    glm = byte_tokenizer(["[gMASK]", "<sop>"])
    specials = [(token, glm.convert_tokens_to_ids(token)) for token in ("[gMASK]", "<sop>")]
    glm.backend_tokenizer.post_processor = processors.TemplateProcessing(single=added, special_tokens=specials)
    assert glm.decode(encode_raw(glm, "hi")) == glm.decode(encode_raw(glm, wanted)) == wanted


def test_a_template_prints_the_date_that_is_pinned():
    tokens = tokenizer("llama3.2")
    prompts = {
        tokens.decode(render(Prompt([USER]), tokens, template_kwargs={"strftime_now": day}))
        for day in ("2026-11-27", "2026-11-28")
    }
    assert all(f"Today Date: {day} Nov 2026" in text for day, text in zip((27, 28), sorted(prompts), strict=True))


def test_turns_that_are_marked_are_not_taught():
    tokens = tokenizer("qwen2.5")
    turns = [{"role": "assistant", "content": "BAD", "step_loss_mask": 0}, {"role": "assistant", "content": "good"}]
    taught, length, mask = sft_sample(Prompt([USER, turns[0], USER, turns[1]]), tokens)
    assert tokens.decode(taught[-length:]) == "good<|im_end|>"
    assert mask == [1] * length
    with pytest.raises(RecordError, match="no assistant message and no label"):
        sft_sample(Prompt([USER, turns[0]]), tokens)


@pytest.mark.parametrize(
    "value", ['{"name": "lookup", "arguments": {"city": "Paris"}}', '[{"name": "lookup", "arguments": "{}"}]']
)
def test_sharegpt_calls_a_system_column_and_a_history_become_one_chat(tmp_path: Path, value: str):
    import json

    turns = [
        {"from": "human", "value": "q"},
        {"from": "function_call", "value": value},
        {"from": "observation", "value": "1"},
    ]
    row = {"conversations": turns, "system": "Be brief.", "tools": json.dumps([TOOL["function"]])}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    [prompt] = open_prompts([str(tmp_path / "a.jsonl")])
    assert [message["role"] for message in prompt.text] == ["system", "user", "assistant", "tool"]
    text = tokenizer("qwen2.5").decode(render(prompt, tokenizer("qwen2.5")))
    assert '<tool_call>\n{"name": "lookup", "arguments": {' in text
    assert '{"type": "function", "function": {"name": "lookup"' in text
    alpaca = {"instruction": "c", "output": "d", "system": "Be brief.", "history": [["a", "b"]]}
    (tmp_path / "b.jsonl").write_text(json.dumps(alpaca) + "\n")
    [prompt] = open_prompts([str(tmp_path / "b.jsonl")])
    assert prompt.text == [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"},
    ]  # fmt: skip


def test_a_turn_that_would_not_stop_is_refused():
    tokens = tokenizer("qwen2.5-base")
    chat = [USER, {"role": "assistant", "content": "a"}]
    ends = [tokens.eos_token_id]
    with pytest.raises(RecordError, match=r"message 1 ends with '<\|im_end\|>', but the model stops only at '<\|endof"):
        sft_sample(Prompt(chat), tokens, end_tokens=ends)
    both = [*ends, tokens.convert_tokens_to_ids("<|im_end|>")]
    assert sft_sample(Prompt(chat), tokens, end_tokens=both)[0][-1] == both[1]
