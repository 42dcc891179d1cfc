"""Separates the reasoning of a response from its answer, in the same way for all verifiers."""

from __future__ import annotations

from slimectl.rewards.base import Span
from slimectl.types import Chat, Sample

TAGS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
)
"""Opening and closing tags of reasoning, by model family."""

OPENINGS = tuple(opening for opening, _ in TAGS)
_LONGEST = max(map(len, OPENINGS))
OPENED = "opened_thought"
"""Metadata key of a sample for the tag with which its rendered prompt opened a thought, or ""."""


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
    end = prompt[-4 * _LONGEST :].rstrip()
    if not end or end[-1] not in ">]▷":  # tags end with these characters
        return ""
    return next((tag for tag in OPENINGS if end.endswith(tag)), "")


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
    start = 0
    if _may_have_tags(text):
        for opening, closing in TAGS:
            closed = _last(text, closing)
            if _last(text, opening) > closed or (opening == opened and closed < 0):
                return -1
            if closed >= 0:
                start = max(start, closed + len(closing))
    elif opened in OPENINGS:
        return -1
    return start


def _may_have_tags(text: str) -> bool:
    """Whether the end of a tag is in the text. Most texts have none, so this avoids a search for each tag."""
    if ">" in text and any(text.rfind(end) >= 0 for end in ("think>", "ing>", "thought>", "|>")):
        return True
    return ("]" in text and "THINK]" in text) or "▷" in text


def _last(text: str, tag: str) -> int:
    """Return the place of the last tag that is not quoted, or -1."""
    at = text.rfind(tag)
    while at > 0 and _is_mentioned(text, at, at + len(tag)):
        at = text.rfind(tag, 0, at)
    return at


def _is_mentioned(text: str, start: int, end: int) -> bool:
    """Whether only text[start:end] is in quotation marks or backticks, as in split("</think>")."""
    mark = text[start - 1]
    if mark not in "`'\"" or text[end : end + 1] != mark:
        return False
    around = text[max(0, start - 2) : start - 1] + text[end + 1 : end + 2]
    return not any(character.isalnum() or character == mark for character in around)
