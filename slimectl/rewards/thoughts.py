"""Separates the reasoning of a response from its answer, in the same way for all verifiers."""

from __future__ import annotations

import re

from slimectl.rewards.base import Span
from slimectl.types import Chat, Sample

THINK, END_OF_THINK = "<think>", "</think>"

_NAME = r"(?:[a-z]{2,10}[:_])?(?:think(?:ing)?|thoughts?|reasoning|scratchpad)"
_PAIRS = (
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<|channel>thought", "<channel|>"),
    ("<unused94>thought", "<unused95>"),
    ("<start_working_out>", "<end_working_out>"),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
)
"""Opening and closing reasoning tags that are not in XML form, by model family."""

_ROLES = {tag: (pair, tag == pair[0]) for pair in _PAIRS for tag in pair}
_TAG = re.compile(
    rf"<\s?(?P<end>/?)\s?(?P<name>(?i:{_NAME}))\s?>|"
    r"<\|channel\|>\s?(?P<channel>\w{1,20})[^\n<>]{0,80}(?:<\|constrain\|>\s?\w{1,20})?<\|message\|>|"
    + "|".join(map(re.escape, _ROLES))
)
"""A reasoning tag. Among the channels of gpt-oss, `final` closes the reasoning, and every other one opens it."""

_QUOTE = re.compile(r"(?<![\w`'\"])[bfru]{0,2}([`'\"])((?:(?!\1)\S)*)$")
_MENTION = 40
"""Maximum characters between a mentioned tag and the quotation marks around it."""

_LONGEST = 160
"""Characters at the end of a prompt that are searched for a tag."""

OPENED = "opened_thought"
"""Metadata key for the tag with which a sample's rendered prompt opened a thought, or ""."""


def opened_by(prompt: str | Chat) -> str:
    """Return the tag with which a prompt opens a thought at its end, or "".

    >>> opened_by("What is 6 times 7?<|im_end|><|im_start|>assistant<think> ")
    '<think>'

    A chat opens a thought if its last message is the start of the assistant's response. If the chat template opens it,
    a rollout writes the tag to `metadata.opened_thought`.
    """
    if not isinstance(prompt, str):
        last = prompt[-1] if prompt else {}
        content = last.get("content")
        prompt = content if last.get("role") == "assistant" and isinstance(content, str) else ""
    end = prompt[-_LONGEST:].rstrip()
    tag = next((match for match in _TAG.finditer(end) if match.end() == len(end)), None)
    return tag[0] if tag and _role(tag)[1] else ""


def first_tag(text: str) -> str:
    """Return the first reasoning tag in a text, or ""."""
    tag = _TAG.search(text)
    return tag[0] if tag else ""


def answer_start(sample: Sample) -> int:
    """Return where the answer starts, in characters of the response: after its last closed thought.

    Returns -1 if the last thought never closes, because then the response has no answer. A tag in the response or at
    the end of the prompt opens a thought. A closing tag counts even without an opening tag. A tag between quotation
    marks or backticks counts as text.
    """
    opened = sample.metadata.get(OPENED)
    return after_thought(sample.response, opened_by(sample.prompt) if opened is None else str(opened))


def answer_span(sample: Sample) -> Span | None:
    """Return the response from `answer_start` on, or None if the last thought never closes."""
    start = answer_start(sample)
    return Span(sample.response[start:], start) if start >= 0 else None


def after_thought(text: str, opened: str = "") -> int:
    """Return the end of the last closed thought of a text, or -1 if the last or `opened` thought never ends.

    >>> after_thought("<think>a</think>b"), after_thought("a"), after_thought("a", opened="<think>")
    (16, 0, -1)
    """
    ends: dict[object, int] = {}
    opening = _TAG.match(opened)
    if opening:
        ends[_role(opening)[0]] = -1
    may_have_tags = (">" in text and "<" in text) or "THINK]" in text or "▷" in text
    for tag in _TAG.finditer(text) if may_have_tags else ():
        if not _is_mentioned(text, *tag.span()):
            kind, opens = _role(tag)
            ends[kind] = -1 if opens else tag.end()
    return -1 if -1 in ends.values() else max(ends.values(), default=0)


def _role(tag: re.Match[str]) -> tuple[object, bool]:
    """Return the kind of reasoning that a tag belongs to, and whether the tag opens it."""
    if tag["name"]:
        return tag["name"].lower(), not tag["end"]
    return ("channel", tag["channel"] != "final") if tag["channel"] else _ROLES[tag[0]]


def _is_mentioned(text: str, start: int, end: int) -> bool:
    """Whether quotation marks or backticks surround text[start:end], as in split("</think>").

    On one side they may enclose more text without blanks, as in "<think>.*?</think>".
    """
    quote = _QUOTE.search(text, max(0, start - _MENTION), start)
    closing = text.find(quote[1], end, end + _MENTION) if quote else -1
    if not quote or closing < 0 or any(map(str.isspace, text[end:closing])):
        return False
    after = text[closing + 1 : closing + 2]
    return not (quote[2] and closing > end) and not after.isalnum() and after != quote[1]
