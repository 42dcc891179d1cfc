"""Preferences: which of two answers to a prompt is better, from any source and in any of the usual forms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slimectl.data.checks import a_chat, a_label, shown
from slimectl.data.prompts import LABEL_KEY, Keys, ordered_rows, prompt_of
from slimectl.errors import RecordError
from slimectl.types import Chat, Prompt

SIDES = ("chosen", "rejected")


@dataclass(frozen=True)
class Preference:
    """Two answers to one prompt, the better one first; each is a prompt with its label, or a chat that ends with it.

    The first `shared` messages of both chats are the same: what was asked.
    """

    chosen: Prompt
    rejected: Prompt
    shared: int = 0


def open_preferences(
    sources: Sequence[str], *, input_key: str, metadata_key: str, tool_key: str, shuffle_seed: int | None = None
) -> Iterator[Preference]:
    """The preferences of all sources: rows with the keys `chosen` and `rejected`.

    Both are strings, or both chats. With a prompt (a string or a chat under `input_key`) they are answers, or whole
    chats that begin with it; without one they are whole texts or chats, and what both begin with was asked. A shared
    text ends with a whole word. Raises RecordError, with file and line, for a row that is no preference.
    """
    keys = Keys(input_key, LABEL_KEY, metadata_key, tool_key)
    for index, (where, row) in enumerate(ordered_rows(sources, shuffle_seed=shuffle_seed)):
        if not isinstance(row, dict):
            raise RecordError(f"{where}: expected an object, got {shown(row)}")
        for key in SIDES:
            if key not in row:
                there = ", ".join(map(str, row)) or "none"
                raise RecordError(
                    f"{where}: no key {key!r}; its keys are {there}: a preference has chosen and rejected"
                )
        chosen, rejected = (_answer(where, row, key) for key in SIDES)
        asked = row.get(input_key) is not None
        base = prompt_of((where, row), index, keys, asked=asked)
        if isinstance(chosen, str) and isinstance(rejected, str):
            yield _of_texts(where, base, asked, chosen, rejected)
        elif isinstance(chosen, list) and isinstance(rejected, list):
            yield _of_chats(where, base, asked, chosen, rejected)
        else:
            raise RecordError(f"{where}: rejected: one answer is a string and the other a chat; give two of one kind")


def _answer(where: str, row: dict[str, Any], key: str) -> str | Chat:
    value = row[key]
    try:
        return a_chat(value) if isinstance(value, list) else str(a_label(value))
    except ValueError as error:
        raise RecordError(f"{where}: {key}: {error}") from None


def _of_texts(where: str, base: Prompt, asked: bool, chosen: str, rejected: str) -> Preference:
    start = 0 if asked else _shared_words(chosen, rejected)
    if not asked and not chosen[:start].strip():
        raise RecordError(f"{where}: chosen and rejected begin with different words; give their prompt, too")
    text = base.text if asked else chosen[:start]
    before = len(text) if isinstance(text, list) else 0
    one, other = _side("chosen", base, text, chosen[start:]), _side("rejected", base, text, rejected[start:])
    return Preference(one, other, before)


def _of_chats(where: str, base: Prompt, asked: bool, chosen: Chat, rejected: Chat) -> Preference:
    prompt: Chat = []
    if asked:
        prompt = [{"role": "user", "content": base.text}] if isinstance(base.text, str) else base.text
    chosen, rejected = _whole(where, "chosen", prompt, chosen), _whole(where, "rejected", prompt, rejected)
    shared = _shared_messages(chosen, rejected)
    for key, chat in zip(SIDES, (chosen, rejected), strict=True):
        if not any(message["role"] == "assistant" for message in chat[shared:]):
            raise RecordError(f"{where}: {key}: no message of the assistant after what both chats begin with")
    return Preference(_side("chosen", base, chosen), _side("rejected", base, rejected), shared)


def _side(key: str, base: Prompt, text: str | Chat, label: str | None = None) -> Prompt:
    return replace(base, text=text, label=label, where=f"{base.where}: {key}")


def _whole(where: str, key: str, prompt: Chat, answer: Chat) -> Chat:
    """The chat from its first message on. Raises RecordError for one that asks something else than the prompt."""
    if not answer:
        raise RecordError(f"{where}: {key}: empty; give at least a message of the assistant")
    if answer[0]["role"] == "assistant":
        if not prompt:
            raise RecordError(f"{where}: {key}: begins with the assistant; give the prompt, or the whole chat")
        return [*prompt, *answer]
    said = [(message["role"], message.get("content")) for message in answer]
    if not all((message["role"], message.get("content")) in said for message in prompt):
        raise RecordError(f"{where}: {key}: does not hold the prompt; give the answer's messages only, or no prompt")
    return answer


def _shared_messages(one: Chat, other: Chat) -> int:
    """How many messages both begin with, the last of each left out."""
    most = min(len(one), len(other)) - 1
    return next((i for i in range(most) if one[i] != other[i]), most)


def _shared_words(one: str, other: str) -> int:
    """How many characters both begin with, up to the end of a word; the blank after it belongs to the answer."""
    end = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    while end and not one[end - 1].isspace():
        end -= 1
    return end - 1 if end and one[end - 1] == " " else end
