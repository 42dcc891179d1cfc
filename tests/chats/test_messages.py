"""Messages and tools of every dialect in one form."""

from __future__ import annotations

import json
from typing import Any

import pytest

from slimectl.chats.messages import MessageError, is_trained, normalized_tools, template_message

PARIS = {"city": "Paris"}
CALL = {"id": "c1", "type": "function", "function": {"name": "lookup", "arguments": PARIS}}


def assistant(**values: Any) -> dict[str, Any]:
    return {"role": "assistant", **values}


@pytest.mark.parametrize(
    ("message", "wanted"),
    [
        (assistant(content=None), assistant(content="")),
        (assistant(content=[{"type": "text", "text": "a"}, "b", {"text": "c"}]), assistant(content="abc")),
        (assistant(content="a", tool_calls=None, name=None), assistant(content="a")),
        (assistant(content="a", thinking="t"), assistant(content="a", reasoning_content="t")),
        (assistant(content="a", reasoning="t", reasoning_content="t"), assistant(content="a", reasoning_content="t")),
        (assistant(content="a", reasoning_content=""), assistant(content="a")),
        (assistant(content=[{"type": "thinking", "thinking": "t"}, {"type": "text", "text": "a"}]),
         assistant(content="a", reasoning_content="t")),
        (assistant(content=[{"type": "thinking", "thinking": [{"type": "text", "text": "t"}]}]),
         assistant(content="", reasoning_content="t")),
        ({"role": "function", "name": "f", "content": "1"}, {"role": "tool", "name": "f", "content": "1"}),
        (assistant(content=None, function_call={"name": "lookup", "arguments": '{"city": "Paris"}'}),
         assistant(content="", tool_calls=[CALL | {"id": ""}])),
        (assistant(content="", function_call='{"name": "lookup", "arguments": {"city": "Paris"}}'),
         assistant(content="", tool_calls=[CALL | {"id": ""}])),
        (assistant(content="", tool_calls=json.dumps([CALL])), assistant(content="", tool_calls=[CALL])),
        (assistant(content="a", tool_calls="", function_call={}), assistant(content="a")),
        (assistant(content=None, refusal="No."), assistant(content="No.", refusal="No.")),
        ({"role": "tool", "content": {"temp": 3, "sky": "blå"}},
         {"role": "tool", "content": '{"temp": 3, "sky": "blå"}'}),
        ({"role": "tool", "content": [{"temp": 3}, 4]}, {"role": "tool", "content": '[{"temp": 3}, 4]'}),
        ({"role": "tool", "content": [{"type": "text", "text": "3"}, " °C"]}, {"role": "tool", "content": "3 °C"}),
    ],
)  # fmt: skip
def test_a_message_has_one_form(message: dict[str, Any], wanted: dict[str, Any]):
    assert template_message(message, "m") == wanted
    assert template_message(wanted, "m") == wanted


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [(PARIS, PARIS), ('{"city": "Paris"}', PARIS), ("", {}), (" ", {}), (None, {}), ('{"ci', '{"ci'), ("[1]", "[1]"),
     ([1], "[1]"), ('{"a": null}', {"a": None})],
)  # fmt: skip
def test_arguments_are_an_object_where_they_can_be(arguments: Any, wanted: Any):
    call = {"id": "c1", "type": "function", "function": {"name": "lookup", "arguments": arguments}}
    plain = {"id": "c1", "name": "lookup", "arguments": arguments}
    for form in (call, plain):
        [read] = template_message(assistant(content="", tool_calls=[form]), "m")["tool_calls"]
        assert read == {**CALL, "function": {"name": "lookup", "arguments": wanted}}


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "User", "content": ""}, "m.role: is 'User'. Did you mean 'user'?"),
        ({"role": "system ", "content": ""}, "m.role: is 'system '. Did you mean 'system'?"),
        ({"content": "x"}, "m.role: is not a string"),
        ({"role": "user", "content": 3}, "m.content: is neither a string nor a list of parts"),
        ({"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}, "m.content: has a part of type 'video'"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "m.content: has a part of type 'input_audio'"),
        ({"role": "user", "content": [{"type": "image"}]}, "m.content: has a part of type 'image'"),
        ({"role": "user", "content": "\ud83d"}, "m.content: has half of a surrogate pair"),
        (assistant(content="", tool_calls={}), "m.tool_calls: is not a list"),
        (assistant(content="", function_call="lookup"), "m.tool_calls[0]: is not a function call"),
        ({"role": "user", "content": {"temp": 3}}, "m.content: is neither a string nor a list of parts"),
        (assistant(content="", tool_calls=[{"function": {}}]), "m.tool_calls[0]: is not a function call"),
        (assistant(content="", reasoning="a", thinking="b"), "m.reasoning_content: differs from the other reasoning"),
    ],
)  # fmt: skip
def test_what_no_template_can_show_is_refused(message: dict[str, Any], words: str):
    with pytest.raises(MessageError) as refusal:
        template_message(message, "m")
    assert str(refusal.value).startswith(words)


def test_tools_lose_the_nulls_of_tables_and_keep_those_of_json_schema():
    properties = {"a": {"type": "string", "description": None, "default": None, "enum": ["x", None]}, "b": None}
    schema = {"type": "object", "properties": properties}
    kept = {"type": "object", "properties": {"a": {"type": "string", "default": None, "enum": ["x", None]}}}
    tool = {"type": "function", "function": {"name": "f", "description": None, "parameters": schema}}
    wanted = [{"type": "function", "function": {"name": "f", "parameters": kept}}]
    assert normalized_tools([tool]) == wanted
    assert normalized_tools([{"name": "f", "parameters": schema}]) == wanted
    assert normalized_tools([]) is normalized_tools(None) is None


@pytest.mark.parametrize("mark", ["step_loss_mask", "loss_mask", "loss", "loss_weight", "weight", "train", "trainable"])
def test_a_turn_is_trained_on_unless_its_mark_says_no(mark: str):
    for value, wanted in ((0, False), (False, False), (0.0, False), (1, True), (True, True), (None, True)):
        assert is_trained(assistant(content="", **{mark: value}), "m") is wanted
    for value in (0.5, 2, "no", [0]):
        with pytest.raises(MessageError, match=rf"m\.{mark}: is .* Use 1 or true to train on the turn"):
            is_trained(assistant(content="", **{mark: value}), "m")


def test_marks_that_contradict_each_other_are_refused():
    with pytest.raises(MessageError, match="m: has contradicting marks: loss and weight"):
        is_trained(assistant(content="", weight=0, loss=True), "m")
