"""Parses tool calls in the notations of model families, each as the family's chat template writes it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from slimectl.chats.messages import MessageError
from slimectl.data.json_codec import STRICT_DECODER
from slimectl.types import AnyGrammar, JsonGrammar

PYTHON = {"True": True, "False": False, "None": None}
"""Values that Qwen3.5's template writes as Python literals."""

Tools = Sequence[Mapping[str, Any]]
"""Tools as declared in a request: {"type": "function", "function": {name, parameters}}, or the inner object."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that a model wrote. `arguments` is a JSON object as text, and `call_id` the id that the model gave it."""

    name: str
    arguments: str
    call_id: str = ""


@dataclass(frozen=True, slots=True)
class CallNotation:
    """The way a family writes calls: in blocks from `opening` to `closing`, each with one or several calls.

    `markers` occur in the chat template of the family, but not in templates of earlier notations in NOTATIONS. `read`
    returns the calls in the inside of a block, or none if it is malformed. `may_begin` returns whether the text before
    a closing tag may be the start of a well-formed inside, because the tag may be a part of an argument. Without
    `opening` the whole response is a block. If a call is a JSON object, `arguments_key` is the key of its arguments.
    """

    name: str
    markers: tuple[str, ...]
    opening: str
    closing: str
    read: Callable[[str, Tools], list[ToolCall]]
    arguments_key: str = ""
    may_begin: Callable[[str, Tools], bool] = lambda text, tools: True

    def call_grammar(self, tools: Tools, name: str = "") -> JsonGrammar | None:
        """Return the grammar of one call of a tool (any tool without `name`), or None if calls are not JSON objects."""
        functions = [function for tool in tools if name in ("", (function := _function(tool)).get("name"))]
        if not self.arguments_key or not functions:
            return None
        parameters = {
            f"tool_{i}": function.get("parameters") or {"type": "object"} for i, function in enumerate(functions)
        }
        calls = [
            {
                "properties": {"name": {"const": function["name"]}, self.arguments_key: {"$ref": f"#/$defs/tool_{i}"}},
                "required": ["name", self.arguments_key],
            }
            for i, function in enumerate(functions)
        ]
        schema = {
            "anyOf": calls,
            "$defs": {key: _rerooted(value, f"#/$defs/{key}") for key, value in parameters.items()},
        }
        frame = (f"{self.opening}\n", f"\n{self.closing}") if self.opening else ("", "")
        return JsonGrammar(json.dumps(schema), *frame)


def schema_or_call(schema: JsonGrammar, notation: CallNotation | None, tools: Tools) -> AnyGrammar:
    """Return the grammar of a response that follows a schema, or is one call of a tool.

    Raises MessageError if calls are not JSON objects.
    """
    call = None if notation is None else notation.call_grammar(tools)
    if call is None:
        raise MessageError(
            "tools",
            "cannot be combined with a response schema, because this model's chat template does not write calls as "
            "JSON objects. Leave out the schema, or set tool_choice to none.",
        )
    return AnyGrammar((schema, call))


def _rerooted(schema: Any, root: str) -> Any:
    """Return a schema whose references to itself point to `root`."""
    if isinstance(schema, list):
        return [_rerooted(item, root) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: root + value[1:] if key == "$ref" and str(value).startswith("#") else _rerooted(value, root)
        for key, value in schema.items()
    }


def _json_call(text: str, tools: Tools) -> list[ToolCall]:
    """Read {"name": …, "arguments": {…}}. Llama uses "parameters" instead."""
    call = _json_object(text)
    arguments = call.get("arguments", call.get("parameters", {})) if call else None
    if call is None or not isinstance(call.get("name"), str) or not isinstance(arguments, dict):
        return []
    return [ToolCall(call["name"], _dumped(arguments))]


def _declared_json_calls(text: str, tools: Tools) -> list[ToolCall]:
    """Read Llama's calls of declared tools, separated by semicolons. Any other object is a plain answer."""
    calls: list[ToolCall] = []
    names = {_function(tool).get("name") for tool in tools}
    position, text = 0, text.rstrip("; \n")
    while position < len(text):
        try:
            _, end = STRICT_DECODER.raw_decode(text, position)
        except (ValueError, RecursionError):
            return []
        call = _json_call(text[position:end], tools)
        if not call or call[0].name not in names:
            return []
        calls += call
        position = len(text) - len(text[end:].lstrip("; \n"))
    return calls


def _begins_object(text: str, tools: Tools) -> bool:
    return text == "" or text.startswith("{")


def _begins_tool_name(text: str, tools: Tools) -> bool:
    """Return whether the first line is the name of a declared tool, or the beginning of one."""
    line, newline, _ = text.partition("\n")
    names = [str(_function(tool).get("name")) for tool in tools]
    return line in names if newline else any(name.startswith(line) for name in names)


def _named_json_call(text: str, tools: Tools) -> list[ToolCall]:
    """Read GLM-4-0414's call: a line with the name of a declared tool, then an object."""
    name, _, arguments = text.strip().partition("\n")
    names = {_function(tool).get("name") for tool in tools}
    values = _json_object(arguments) if name in names else None
    return [] if values is None else [ToolCall(name, _dumped(values))]


def _deepseek_calls(text: str, tools: Tools) -> list[ToolCall]:
    """Read DeepSeek's calls: V3 and R1 write type, name and a fenced object, V3.1 name and object."""
    calls = []
    for head, body in _elements(text, DEEPSEEK_CALL, "<｜tool▁call▁end｜>") or ():
        name, fence, fenced = ("", "", "") if body.lstrip().startswith("{") else body.partition("```json")
        values = _json_object(fenced.rpartition("```")[0] if fence else body)
        if values is None:
            return []
        calls.append(ToolCall((name if fence else head).strip(), _dumped(values)))
    return calls


def _kimi_calls(text: str, tools: Tools) -> list[ToolCall]:
    """Read Kimi-K2's calls. The name is a part of the id, functions.NAME:INDEX, which the template renders again."""
    calls = []
    for call_id, arguments in _elements(text, KIMI_CALL, "<|tool_call_end|>") or ():
        name = re.sub(r":\d+$", "", call_id.strip().removeprefix("functions."))
        values = _json_object(arguments)
        if values is None or not name:
            return []
        calls.append(ToolCall(name, _dumped(values), call_id.strip()))
    return calls


def _glm_call(text: str, tools: Tools) -> list[ToolCall]:
    """Read a call of GLM-4.5 and later: the name, then pairs of <arg_key> and <arg_value>."""
    name, elements = text.split("<arg_key>", 1)[0].strip(), _elements(text, GLM_ARGUMENT, "</arg_value>")
    if elements is None or not re.fullmatch(r"[\w.-]+", name):
        return []
    return [_call_of_texts(name, [(key.strip(), value) for key, value in elements], tools)]


def _function_call(text: str, tools: Tools) -> list[ToolCall]:
    """Read a call of Qwen3-Coder and Qwen3.5: <function=NAME> with <parameter=KEY> blocks, values on separate lines."""
    return _calls_of_elements(text, FUNCTION, "</function>", PARAMETER, tools, on_lines=True)


def _minimax_calls(text: str, tools: Tools) -> list[ToolCall]:
    """Read MiniMax-M2's calls: <invoke name="NAME"> with <parameter name="KEY"> blocks."""
    return _calls_of_elements(text, INVOKE, "</invoke>", NAMED_PARAMETER, tools)


def _calls_of_elements(
    text: str,
    opening: re.Pattern[str],
    closing: str,
    parameter: re.Pattern[str],
    tools: Tools,
    *,
    on_lines: bool = False,
) -> list[ToolCall]:
    """Return a call for each element, with inner elements as parameters, or no calls if an element is not closed.

    With `on_lines` each parameter tag is on its own line.
    """
    calls = []
    for name, body in _elements(text, opening, closing) or ():
        pairs = _elements(body, parameter, "</parameter>")
        if pairs is None:
            return []
        if on_lines:
            pairs = [(key, value.removeprefix("\n").removesuffix("\n")) for key, value in pairs]
        calls.append(_call_of_texts(name.strip(), pairs, tools))
    return calls


DEEPSEEK_CALL = re.compile("<｜tool▁call▁begin｜>([^<]*)<｜tool▁sep｜>")
KIMI_CALL = re.compile(r"<\|tool_call_begin\|>([^<]*)<\|tool_call_argument_begin\|>")
GLM_ARGUMENT = re.compile(r"<arg_key>([^<]*)</arg_key>\s*<arg_value>")
FUNCTION, PARAMETER = re.compile("<function=([^<>]*)>"), re.compile("<parameter=([^<>]*)>")
INVOKE, NAMED_PARAMETER = re.compile('<invoke name="([^"]*)">'), re.compile('<parameter name="([^"]*)">')
"""The start of an element. The group is its name."""


MOST_NESTED = 64
"""Most tags within an element that are paired, so that a text of only tags is read quickly."""


def _elements(text: str, opening: re.Pattern[str], closing: str) -> list[tuple[str, str]] | None:
    """Return name and content of every element, or None if one is not closed.

    Content may contain tags, such as a program that writes calls. It ends at the last closing tag before the next
    element. A closed element inside it belongs to it.
    """
    elements: list[tuple[str, str]] = []
    match = opening.search(text)
    while match is not None:
        first = _first_end(text, match.end(), opening, closing)
        if first < 0:
            return None
        following = opening.search(text, first)
        end = text.rindex(closing, first, len(text) if following is None else following.start())
        elements.append((match[1], text[match.end() : end]))
        match = following
    return elements


def _first_end(text: str, start: int, opening: re.Pattern[str], closing: str) -> int:
    """Return the index of the first closing tag not opened after `start`, else of the first closing tag, else -1."""
    depth = 0
    tags = re.compile(f"{opening.pattern}|(?P<closing>{re.escape(closing)})")
    for tag in islice(tags.finditer(text, start), MOST_NESTED):
        if tag["closing"] is None:
            depth += 1
        elif depth == 0:
            return tag.start()
        else:
            depth -= 1
    return text.find(closing, start)


def _breaks_off_in_string(text: str, tools: Tools) -> bool:
    """Return whether a text is JSON that ends within a string, where a closing tag is content."""
    try:
        STRICT_DECODER.decode(text)
    except json.JSONDecodeError as error:
        return error.msg.startswith("Unterminated string")
    except (ValueError, RecursionError):
        return False
    return False


def _contains(tag: str) -> Callable[[str, Tools], bool]:
    return lambda text, tools: tag in text


NOTATIONS = (
    CallNotation("minimax_m2", ("<minimax:tool_call>",), "<minimax:tool_call>", "</minimax:tool_call>", _minimax_calls,
                 may_begin=_contains("<invoke ")),
    CallNotation("deepseek", ("<｜tool▁calls▁begin｜>",), "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
                 _deepseek_calls, may_begin=_contains("<｜tool▁call▁begin｜>")),
    CallNotation("kimi_k2", ("<|tool_calls_section_begin|>",), "<|tool_calls_section_begin|>",
                 "<|tool_calls_section_end|>", _kimi_calls, may_begin=_contains("<|tool_call_begin|>")),
    CallNotation("glm45", ("<arg_key>", "<tool_call>"), "<tool_call>", "</tool_call>", _glm_call,
                 may_begin=_contains("<arg_value>")),
    CallNotation("qwen3_coder", ("<function=", "<tool_call>"), "<tool_call>", "</tool_call>", _function_call,
                 may_begin=_contains("<parameter=")),
    CallNotation("hermes", ("<tool_call>",), "<tool_call>", "</tool_call>", _json_call, "arguments",
                 _breaks_off_in_string),
    CallNotation("llama3", ("dictionary of argument name and its value",), "", "", _declared_json_calls, "parameters",
                 _begins_object),
    CallNotation("glm4", ("<|observation|>", "metadata"), "", "", _named_json_call, may_begin=_begins_tool_name),
)  # fmt: skip
"""Notations of the families. A model uses the first one whose markers occur in its chat template."""


def notation_of(chat_template: str) -> CallNotation | None:
    """Return the notation of the model with this chat template, or None if it is unknown."""
    return next(
        (notation for notation in NOTATIONS if all(marker in chat_template for marker in notation.markers)), None
    )


def _call_of_texts(name: str, pairs: Iterable[tuple[str, ...]], tools: Tools) -> ToolCall:
    """Return a call from arguments that are texts. They are parsed as JSON, unless the tool declares a string."""
    functions = (_function(tool) for tool in tools)
    declared = next((function for function in functions if function.get("name") == name), {})
    parameters = declared.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    schemas = properties if isinstance(properties, Mapping) else {}
    return ToolCall(name, _dumped({key: _value(text, schemas.get(key)) for key, text in pairs}))


def _value(text: str, schema: Any) -> Any:
    types = set(_types(schema))
    if types == {"string"}:
        return text
    try:
        value = PYTHON[text] if text in PYTHON else STRICT_DECODER.decode(text)
    except (ValueError, RecursionError):
        return text
    # For an argument that may be a string but not a number, a text like 5 is a string.
    names = {bool: "boolean", int: "integer", float: "number", dict: "object", list: "array", type(None): "null"}
    kind = names.get(type(value), "string")
    fits = not types or kind in types or (kind == "integer" and "number" in types)
    return value if fits else text


def _types(schema: Any) -> Iterator[str]:
    """Yield the types of a schema, including its alternatives."""
    if not isinstance(schema, Mapping):
        return
    declared = schema.get("type", [])
    yield from [declared] if isinstance(declared, str) else [kind for kind in declared if isinstance(kind, str)]
    for key in ("anyOf", "oneOf"):
        alternatives = schema.get(key)
        for alternative in alternatives if isinstance(alternatives, list) else []:
            yield from _types(alternative)


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function")
    return function if isinstance(function, Mapping) else tool


def _json_object(text: str) -> dict[str, Any] | None:
    try:
        value = STRICT_DECODER.decode(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _dumped(values: dict[str, Any]) -> str:
    return json.dumps(values, ensure_ascii=False)
