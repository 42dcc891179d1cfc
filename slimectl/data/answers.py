"""Splits the response of a chat model into reasoning, content and tool calls: the inverse of its chat template."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from slimectl.data.tool_calls import CallNotation, ToolCall, Tools, notation_of
from slimectl.rewards.thoughts import END_OF_THINK, THINK

MOST_CLOSINGS = 16
"""Most closing tags that are tried as the end of a block, so that a response of only tags is parsed quickly."""
PYTHON_TAG = "<|python_tag|>"
"""Token with which Llama may begin a call."""


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """The parts of a response. `reasoning` is None if there was none."""

    content: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """Response format of a model: whether it reasons between tags, and its tool-call notation."""

    reasons: bool = False
    notation: CallNotation | None = None

    @property
    def marks(self) -> tuple[str, ...]:
        """Tokens that parsing needs, even if special tokens are left out of the text."""
        tags = (THINK, END_OF_THINK) if self.reasons else ()
        calls = (self.notation.opening or PYTHON_TAG, self.notation.closing) if self.notation else ()
        return tuple(mark for mark in (*tags, *calls) if mark)

    def parse(self, text: str, tools: Tools = (), *, prompt: str = "", complete: bool = True) -> ParsedAnswer:
        """Split a response into its parts. Without `tools` no calls are parsed. A malformed call stays in the content.

        `prompt` is the rendered chat, or its end: many templates open the reasoning themselves. If the response is not
        `complete`, the result holds only what can no longer change, so that more text only adds to each part.
        """
        reasoning, content = self._reasoning(text, prompt, complete=complete)
        if self.notation is None or not tools:
            return ParsedAnswer(content if complete else content[: _stable(content, ())], reasoning)
        if not self.notation.opening:
            return _whole_call(content, reasoning, self.notation, tools, complete=complete)
        content, calls = _blocks(content, self.notation, tools, complete=complete)
        return ParsedAnswer(content, reasoning, tuple(calls))

    def _reasoning(self, text: str, prompt: str, *, complete: bool) -> tuple[str | None, str]:
        opened = prompt.rstrip().endswith(THINK)
        if not self.reasons:
            return None, text
        start = text.lstrip()
        if not opened and not start.startswith(THINK):
            undecided = not complete and THINK.startswith(start)
            return None, "" if undecided else text
        body, end, content = start.removeprefix(THINK).partition(END_OF_THINK)
        if not end and not complete:
            return body[: _stable(body, (END_OF_THINK,))].lstrip("\n"), ""
        return body.strip("\n"), content.lstrip("\n")


@dataclass(frozen=True, slots=True)
class AnswerParser:
    """Splits the responses to one chat, whose rendering ends with `prompt`."""

    format: AnswerFormat
    tools: Tools = ()
    prompt: str = ""
    ends: Collection[str] = ()
    """Special tokens without a meaning in a response, which are removed from its end."""
    single_call: bool = False
    """Whether a response keeps only its first call."""

    def parse(self, text: str, *, complete: bool = True) -> ParsedAnswer:
        """Return the parts of a response. If it is not `complete`, only the parts that can no longer change."""
        while end := next((token for token in self.ends if text.endswith(token)), ""):
            text = text.removesuffix(end)
        parts = self.format.parse(text, self.tools, prompt=self.prompt, complete=complete)
        return replace(parts, tool_calls=parts.tool_calls[:1]) if self.single_call else parts


def format_of(chat_template: str | dict[str, str] | None) -> AnswerFormat:
    """Return the format of the model with this chat template, or with these templates by name.

    >>> format_of("… <think> … <tool_call> …").notation.name
    'hermes'
    """
    template = "\n".join(chat_template.values()) if isinstance(chat_template, dict) else chat_template or ""
    return AnswerFormat(END_OF_THINK in template, notation_of(template))


def _whole_call(
    content: str, reasoning: str | None, notation: CallNotation, tools: Tools, *, complete: bool
) -> ParsedAnswer:
    """Parse a response that is one call as a whole. While it may still become one, it has no content."""
    if not complete:
        begin = content.lstrip()
        may_be_call = PYTHON_TAG.startswith(begin) or notation.may_begin(begin.removeprefix(PYTHON_TAG), tools)
        return ParsedAnswer("" if may_be_call else content[: _stable(content, ())], reasoning)
    calls = notation.read(content.strip().removeprefix(PYTHON_TAG), tools)
    return ParsedAnswer("" if calls else content, reasoning, tuple(calls))


def _blocks(content: str, notation: CallNotation, tools: Tools, *, complete: bool) -> tuple[str, list[ToolCall]]:
    """Extract the call blocks from a response."""
    calls: list[ToolCall] = []
    outside, remaining = "", content
    while True:
        before, opening, inside = remaining.partition(notation.opening)
        end, block_calls = _block(inside, notation, tools, complete=complete)
        if end < 0:
            break
        calls += block_calls
        block = "" if block_calls else opening + inside[:end]  # anything else is text
        outside = (outside + before + block).rstrip() if block_calls else outside + before + block
        remaining = inside[end:]
        if not outside:
            remaining = remaining.lstrip()
    if complete:
        return (outside + remaining).rstrip() if calls else content, calls
    outside += before[: _stable(before, () if opening else (notation.opening,))]
    return outside[: _stable(outside, ())], calls


def _block(inside: str, notation: CallNotation, tools: Tools, *, complete: bool) -> tuple[int, list[ToolCall]]:
    """Return the length of a block after its opening tag (closing tag included), and its calls.

    An argument may contain the closing tag, so the block ends at the first one that leaves it well formed. A malformed
    block ends at the first closing tag. The length is -1 if there is no closing tag, or if it depends on later text.
    """
    first = end = inside.find(notation.closing)
    for _ in range(MOST_CLOSINGS):
        if end < 0:
            return (first + len(notation.closing) if complete and first >= 0 else -1), []
        calls = notation.read(inside[:end], tools)
        written = sum(call.arguments.count(notation.closing) for call in calls)
        if calls and inside.count(notation.closing, 0, end) <= written:  # otherwise it includes another block
            return end + len(notation.closing), calls
        if not notation.may_begin(inside[:end], tools):
            break
        end = inside.find(notation.closing, end + len(notation.closing))
    return first + len(notation.closing), []


def _stable(text: str, tags: tuple[str, ...]) -> int:
    """Return the length of a text without trailing whitespace and without a partial tag at its end."""
    end = len(text)
    for tag in tags:
        overlap = next((n for n in range(min(len(tag), end), 0, -1) if text.endswith(tag[:n])), 0)
        end = min(end, len(text) - overlap)
    return len(text[:end].rstrip())
