"""Chat templates: finds the message form that each accepts, and checks that it shows all messages.

Templates differ in what they read: arguments of calls as objects or as text, the role `developer` or not, one key of
reasoning or another. A template leaves out what it does not read, without an error. So each shape of chat is rendered
once in several forms, with a stand-in for each of its texts. The first form in which every stand-in shows is used for
all chats of this shape.
"""

from __future__ import annotations

import datetime
import difflib
import functools
import itertools
import json
import re
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from slimectl.chats.messages import (
    KNOWN_KEYS,
    REASONING,
    REASONING_KEYS,
    MessageError,
    normalized_chat,
    normalized_tools,
)
from slimectl.errors import RecordError, SettingsError, first_line
from slimectl.system.stdio import logger
from slimectl.types import Chat, Prompt

OURS = ("tools", "messages", "tokenize", "add_generation_prompt", "continue_final_message", "return_dict")
"""Arguments of chat templates that slimectl sets. Users may not set them."""
TEMPLATE_SETTING = "rollout.apply_chat_template_kwargs"
DATE = "strftime_now"
"""Function with which templates print the date. transformers' version reads the clock. An argument of this name,
YYYY-MM-DD, replaces it."""
DIRECTIVES = "aAbBcdDeFGhHIjmMnpSuUVwWxXyY"
"""Letters after % in the format of a date."""
OPEN = "q0open0q"
"""Stand-in at the end of a thought that is not finished."""
REMEDY = "Leave it out, or put a chat_template.jinja that shows it in the model's folder."
_MARK = re.compile(r"<[^<>\s'\"{}]{1,40}>|\[/?[A-Z_]{2,20}\]|◁/?think▷")
_THINK_START = re.compile(r"[<\[◁][^<>\[\]/]{0,12}think[^<>\[\]]{0,8}[>\]▷]", re.IGNORECASE)
_THINK_END = re.compile(r"[<\[◁]/[^<>\[\]]{0,12}think[^<>\[\]]{0,8}[>\]▷]", re.IGNORECASE)
_STAND_IN = re.compile(r"(?=(q\d+[a-z]\w*?q))")
_PRINTED_PART = re.compile(r"""['"]text['"]: ?['"]\s*q(\d+)c""")
"""A content part as Python or JSON prints it. The template then prints lists of parts instead of reading them."""
MAX_FORMS = 4096
"""Number of chat shapes cached per tokenizer."""


def with_date(source: str, day: str) -> str:
    """Return a template whose `strftime_now` is a macro that prints one day, YYYY-MM-DD.

    transformers 5.24 accepts no function as an argument of a template.

    >>> import jinja2
    >>> jinja2.Template(with_date('{{ strftime_now("%-d %b %Y") }}', "2026-11-07"), trim_blocks=True).render()
    '7 Nov 2026'
    """
    date = datetime.datetime.fromisoformat(day)
    forms = [f"%{flag}{letter}" for flag in ("", "-") for letter in DIRECTIVES]
    filters = "".join(f" | replace({form!r}, {date.strftime(form)!r})" for form in forms)
    # transformers drops the newline after a block.
    return f"{{% macro {DATE}(form) %}}{{{{ form{filters} }}}}{{% endmacro %}}\n{source}"


@dataclass(frozen=True)
class Form:
    """A form of messages: how texts, arguments of calls, missing content and the role `developer` are written."""

    text_in_parts: bool = False
    arguments_as_text: bool = False
    null_content: bool = False
    developer: str = "developer"

    def message(self, message: dict[str, Any], reasoning_key: str) -> dict[str, Any]:
        """Return a normalized message in this form."""
        changes: dict[str, Any] = {}
        content, calls = message["content"], message.get("tool_calls")
        if message["role"] == "developer":
            changes["role"] = self.developer
        if self.text_in_parts and isinstance(content, str):
            changes["content"] = [{"type": "text", "text": content}]
        elif self.null_content and calls and content == "":
            changes["content"] = None
        if calls:
            changes["tool_calls"] = [self._call(call) for call in calls]
        if reasoning_key != REASONING and REASONING in message:
            changes[reasoning_key] = message[REASONING]
        return {**message, **changes}

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        arguments = function["arguments"]
        if isinstance(arguments, dict) and self.arguments_as_text:
            arguments = _json(arguments)
        elif isinstance(arguments, str) and not self.arguments_as_text:
            arguments = {}  # text that was cut off, which a template of objects cannot show
        return {**call, "function": {**function, "arguments": arguments}}


@dataclass(frozen=True)
class TemplatePart:
    """A part of a message: its stand-in `text`, and an `alternative` that may show instead."""

    message: int
    kind: str
    text: str
    alternative: str = ""


@dataclass(frozen=True)
class Finding:
    """The form for chats of one shape, and the parts that the template leaves out."""

    form: Form
    missing: tuple[TemplatePart, ...] = ()


@dataclass(frozen=True)
class Reading:
    """Variables and keys that the source of a template reads."""

    identifiers: frozenset[str]
    marks: re.Pattern[str] | None
    reasoning_key: str


@functools.lru_cache(maxsize=32)
def _reading(source: str) -> Reading:
    identifiers = frozenset(re.findall(r"[A-Za-z_]\w*", source))
    marks = sorted({*_MARK.findall(source)}, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, marks))) if marks else None
    return Reading(identifiers, pattern, next((key for key in REASONING_KEYS if key in identifiers), ""))


_findings: weakref.WeakKeyDictionary[Any, dict[Any, Finding]] = weakref.WeakKeyDictionary()
_warned: set[tuple[str, str]] = set()


class Template:
    """The chat template of a tokenizer, bound to the tools and arguments of one prompt."""

    def __init__(self, tokenizer: Any, prompt: Prompt, kwargs: Mapping[str, Any] | None) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise SettingsError(
                "rollout.apply_chat_template: the tokenizer of this model has no chat template. Use string prompts and "
                "leave the setting false, or put a chat_template.jinja into the model's folder."
            )
        self.tools = normalized_tools(prompt.tools)
        self._tokenizer = tokenizer
        self._source = _source(tokenizer, self.tools)
        self._reading = _reading(self._source)
        for name in kwargs or ():
            _check_argument(name, self._reading.identifiers)
        arguments = {key: value for key, value in (kwargs or {}).items() if value is not None}
        self._arguments = {**arguments, "tools": self.tools, "tokenize": False}
        if isinstance(day := self._arguments.pop(DATE, None), str):
            self._arguments["chat_template"] = with_date(self._source, day)
        self._key = (self._source, repr(sorted(arguments.items())), _tool_names(self.tools))

    def fit(self, chat: Chat, *, taught: bool = False) -> Chat:
        """Return a chat in the form that the template takes, message by message.

        Raises RecordError with the number of the message if the template leaves out content or a call. In a chat that
        is `taught`, the same holds for reasoning. Reasoning before the last question may be left out, because many
        templates do so on purpose. Other reasoning that is left out gives one warning.
        """
        try:
            messages = [self._without_padding(message) for message in normalized_chat(chat, "message", images=True)]
        except MessageError as error:
            raise RecordError(f"prompt: {error}") from None
        self._name_unknown_keys(messages)
        finding = self._finding(messages)
        for part in finding.missing:
            shown = f"message {part.message} ({messages[part.message]['role']})"
            if part.kind == "reasoning" and not taught:
                self._warn_once("reasoning", f"the model's chat template does not show the reasoning of {shown}")
                continue
            raise RecordError(f"prompt: the chat template does not show the {part.kind} of {shown}. {REMEDY}")
        return [finding.form.message(message, self._reading.reasoning_key or REASONING) for message in messages]

    def text(self, chat: Chat, *, header: bool = False, continued: bool = False) -> str:
        """Render a chat that `fit` returned.

        With `header` the text ends with the header of the assistant's next turn. With `continued` it ends with the
        content of the last message, which the model then continues. Raises RecordError if the template fails.
        """
        arguments = {**self._arguments, "continue_final_message": True} if continued else self._arguments
        try:
            return self._rendered(chat, {**arguments, "add_generation_prompt": header})
        except Exception as error:
            line = first_line(error)
            raise RecordError(f"prompt: the chat template refuses this chat: {line}") from error

    def _rendered(self, chat: Chat, arguments: Mapping[str, Any]) -> str:
        """Render a chat with arguments of `apply_chat_template`.

        From transformers 5.24 on that method drops contents that are null, but templates of DeepSeek show calls only
        beside one. The function that it calls keeps them.
        """
        if not any(message["content"] is None for message in chat):
            return str(self._tokenizer.apply_chat_template(chat, **arguments))
        from transformers.utils.chat_template_utils import render_jinja_template

        options = {"chat_template": self._source, **self._tokenizer.special_tokens_map, **arguments}
        del options["tokenize"]
        return str(render_jinja_template([chat], **options)[0][0])

    def prompt_text(self, chat: Chat) -> str:
        """Render a chat as a prompt. If its last message is the assistant's, the model continues that message."""
        messages = self.fit(chat)
        if not messages or messages[-1]["role"] != "assistant":
            return self.text(messages, header=True)
        last = messages[-1]
        if last.get("tool_calls") or not last["content"]:
            end = "tool calls" if last.get("tool_calls") else "an empty message"
            raise RecordError(
                f"prompt: ends with {end} of the assistant, which cannot be continued. Add the message that follows."
            )
        return self._text_of_open_thought(messages) or self.text(messages, continued=True)

    def _text_of_open_thought(self, chat: Chat) -> str:
        """Render a chat up to the end of its last message if it is an unfinished thought between tags, else return "".

        Templates that split the content at its closing tag treat an unfinished thought as an answer, and may write an
        empty thought before it. So the thought is closed after a stand-in, and the text is cut there. If a template
        still writes another thought, the message follows the header.
        """
        last = chat[-1]
        content = last["content"]
        opened = [*_THINK_START.finditer(content)] if isinstance(content, str) else []
        if opened and not _THINK_END.search(content, opened[-1].end()):
            opening = opened[-1][0]
            closing = f"{opening[0]}/{opening[1:]}"
            text = self.text([*chat[:-1], {**last, "content": f"{content}{OPEN}{closing}{OPEN}"}])
            if text.count(OPEN) == 2:
                before, tag, thought = text.partition(OPEN)[0].rpartition(opening)
                if not before.rstrip().endswith((opening, closing)):
                    return before + tag + thought
            header = self.text(chat[:-1], header=True)
            is_opened = header.rstrip().endswith(opening)
            follows = content.lstrip().removeprefix(opening) if is_opened else content
            return f"{header.rstrip() if is_opened else header}{follows}"
        return ""

    def _without_padding(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message without null arguments that its tool does not have. Tables add them."""
        if not message.get("tool_calls") or not self.tools:
            return message
        calls = []
        for call in message["tool_calls"]:
            function = call["function"]
            names, arguments = _parameter_names(self.tools, function["name"]), function["arguments"]
            if names is not None and isinstance(arguments, dict):
                arguments = {key: value for key, value in arguments.items() if value is not None or key in names}
            calls.append({**call, "function": {**function, "arguments": arguments}})
        return {**message, "tool_calls": calls}

    def _name_unknown_keys(self, messages: Chat) -> None:
        for message in messages:
            for key in message.keys() - KNOWN_KEYS - self._reading.identifiers:
                self._warn_once(key, f"message key {key!r} is not read by slimectl or by the model's chat template")

    def _warn_once(self, subject: str, text: str) -> None:
        if (self._source, subject) not in _warned:
            _warned.add((self._source, subject))
            logger.warning(text)

    def _finding(self, messages: Chat) -> Finding:
        shape = (self._key, tuple(self._shape(message) for message in messages))
        findings = _findings.setdefault(self._tokenizer, {})
        if shape not in findings:
            if len(findings) >= MAX_FORMS:
                findings.clear()
            findings[shape] = self._find(messages)
        return findings[shape]

    def _shape(self, message: dict[str, Any]) -> Any:
        content, calls = message["content"], message.get("tool_calls") or ()
        return (
            message["role"],
            hash(tuple(self._segments(content)))  # a long text has many
            if isinstance(content, str)
            else tuple(part["type"] for part in content),
            REASONING in message,
            tuple(call["function"]["name"] in call["id"] for call in calls),
            tuple(
                (isinstance(call["function"]["arguments"], str), not call["function"]["arguments"]) for call in calls
            ),
            tuple(sorted(message.keys() - {"role", "content", "tool_calls", REASONING})),
        )

    def _segments(self, text: str) -> Iterator[str]:
        """Yield the marks of the template in a text, and "x" for each other text between them that is not blank."""
        for piece, is_mark in self._pieces(text):
            if is_mark or piece.strip():
                yield piece if is_mark else "x"

    def _pieces(self, text: str) -> Iterator[tuple[str, bool]]:
        begin = 0
        for match in self._reading.marks.finditer(text) if self._reading.marks else ():
            yield text[begin : match.start()], False
            yield match[0], True
            begin = match.end()
        yield text[begin:], False

    def _find(self, messages: Chat) -> Finding:
        """Return the first form in which all parts show, else the form with the fewest missing parts.

        A template that looks at texts may refuse stand-ins in every form. Then the texts themselves are looked for.
        """
        best = self._best(messages, originals=False) or self._best(messages, originals=True)
        if best is None:
            return Finding(next(self._forms(messages)))
        query = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
        reads = bool(self._reading.reasoning_key)

        def is_dropped_on_purpose(part: TemplatePart) -> bool:
            return part.kind == "reasoning" and part.message < query and (reads or not part.text.endswith("rq"))

        return replace(best, missing=tuple(part for part in best.missing if not is_dropped_on_purpose(part)))

    def _best(self, messages: Chat, *, originals: bool) -> Finding | None:
        parts: list[TemplatePart] = []
        stand_ins = [self._stand_in(i, message, parts, originals=originals) for i, message in enumerate(messages)]
        best: Finding | None = None
        for form in self._forms(messages):
            finding = self._tried(form, stand_ins, parts)
            if finding is not None and (best is None or len(finding.missing) < len(best.missing)):
                best = finding
            if best is not None and not best.missing:
                break
        return best

    def _forms(self, messages: Chat) -> Iterator[Form]:
        """Yield the forms in which these messages can be written, the usual one first."""
        calls = [message for message in messages if message.get("tool_calls")]
        texts = [call["function"]["arguments"] for message in calls for call in message["tool_calls"]]
        has_developer = any(message["role"] == "developer" for message in messages)
        reads_developer = "developer" in self._reading.identifiers
        developers = ("developer", "system") if reads_developer else ("system", "developer")
        for in_parts, as_text, null, developer in itertools.product(
            (False, True),
            (False, True) if texts else (False,),
            (False, True) if any(message["content"] == "" for message in calls) else (False,),
            developers if has_developer else ("developer",),
        ):
            yield Form(in_parts, as_text, null, developer)

    def _tried(self, form: Form, stand_ins: Chat, parts: list[TemplatePart]) -> Finding | None:
        chat = [form.message(message, self._reading.reasoning_key or REASONING) for message in stand_ins]
        try:
            text = self.text(chat, header=chat[-1]["role"] != "assistant")
        except RecordError:
            return None
        shown = {*_STAND_IN.findall(text)}
        missing = [
            part
            for part in parts
            if part.text not in shown and part.text not in text and not (part.alternative and part.alternative in text)
        ]
        missing += [TemplatePart(int(match[1]), "content", match[0]) for match in _PRINTED_PART.finditer(text)]
        if not all(name in text for name in _tool_names(self.tools)):
            names = ", ".join(_tool_names(self.tools))
            self._warn_once("tools", f"the model's chat template does not show the tools of a prompt: {names}")
        for i, message in enumerate(stand_ins):
            # A model must not learn objects printed by Python, or JSON text that was quoted again.
            for call in message.get("tool_calls", ()):
                arguments = call["function"]["arguments"]
                keys = arguments if isinstance(arguments, dict) else ()
                if any(f"'{key}'" in text or f'\\"{key}\\"' in text for key in keys):
                    missing.append(TemplatePart(i, "arguments", call["function"]["name"]))
        return Finding(form, tuple(missing))

    def _stand_in(
        self, i: int, message: dict[str, Any], parts: list[TemplatePart], *, originals: bool
    ) -> dict[str, Any]:
        """Return a message with a stand-in for each text, or with the `originals`. They are added to `parts`."""
        result, content = dict(message), message["content"]

        def text(kind: str, name: str, original: str, alternative: str = "") -> str:
            parts.append(TemplatePart(i, kind, original if originals else f"q{i}{name}q", alternative))
            return parts[-1].text

        def filled(content: str, place: int = 0) -> str:
            ends = [match.end() for match in _THINK_END.finditer(content)] if message["role"] == "assistant" else []
            pieces, begin = [], 0
            for number, (piece, is_mark) in enumerate(self._pieces(content)):
                begin += len(piece)
                if is_mark or not piece.strip():
                    pieces.append(piece)
                    continue
                kind = "reasoning" if ends and begin < ends[-1] else "content"
                pieces.append(piece.replace(piece.strip(), text(kind, f"c{place}x{number}", piece.strip()), 1))
            return "".join(pieces)

        if isinstance(content, str):
            result["content"] = filled(content)
        else:
            result["content"] = [
                {**part, "text": filled(part["text"], place)} if part["type"] == "text" else part
                for place, part in enumerate(content)
            ]
        if REASONING in message:
            result[REASONING] = text("reasoning", "r", message[REASONING].strip())
        if message.get("tool_calls"):
            result["tool_calls"] = [_stand_in_call(k, call, text) for k, call in enumerate(message["tool_calls"])]
        return result


def _stand_in_call(k: int, call: dict[str, Any], text: Any) -> dict[str, Any]:
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    if arguments and isinstance(arguments, dict):
        key, value = next(iter(arguments.items()))
        stand_in_key = text("calls", f"k{k}", key)
        arguments = {stand_in_key: text("calls", f"v{k}", value if isinstance(value, str) and value.isalnum() else key)}
    # Kimi's template shows only the id of a call, functions.NAME:NUMBER.
    stand_in = text("calls", f"n{k}", name, call["id"] if name in call["id"] else "")
    return {**call, "function": {**call["function"], "name": stand_in, "arguments": arguments}}


def _source(tokenizer: Any, tools: Any) -> str:
    if isinstance(tokenizer.chat_template, str):
        return tokenizer.chat_template
    try:
        return str(tokenizer.get_chat_template(tools=tools))
    except ValueError:  # several templates
        names = ", ".join(map(str, tokenizer.chat_template))
        raise SettingsError(
            f"model.path: its tokenizer has the chat templates {names}, and none is called default. Put the one to use "
            "into a chat_template.jinja in the model's folder."
        ) from None


def _tool_names(tools: list[dict[str, Any]] | None) -> tuple[str, ...]:
    functions = [tool.get("function") for tool in tools or ()]
    return tuple(str(function["name"]) for function in functions if isinstance(function, dict) and "name" in function)


def _parameter_names(tools: list[dict[str, Any]], name: str) -> set[str] | None:
    """Return the names of a tool's parameters, or None if they are unknown."""
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, dict) and function.get("name") == name:
            properties = (function.get("parameters") or {}).get("properties")
            return set(properties) if isinstance(properties, dict) else None
    return None


def _json(arguments: dict[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def _check_argument(name: str, identifiers: frozenset[str]) -> None:
    """Raise SettingsError for an argument that slimectl sets itself, or that the template never reads."""
    setting = f"{TEMPLATE_SETTING}: {name}"
    if name in OURS:
        raise SettingsError(f"{setting} is set by slimectl. Leave it out.")
    if name not in identifiers and name != DATE:
        near = difflib.get_close_matches(name, identifiers, n=1)
        hint = f"Did you mean {near[0]}?" if near else "Leave it out, or see the model's chat_template.jinja."
        raise SettingsError(f"{setting} is not read by the model's chat template. {hint}")
