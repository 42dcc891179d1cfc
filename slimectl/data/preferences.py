"""Reads preference pairs of a chosen and a rejected answer, from any source and in the common formats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slimectl.data.checks import a_chat, a_scalar, shown
from slimectl.data.columns import (
    INPUT_KEY,
    LABEL_KEY,
    Columns,
    PromptOptions,
    as_messages,
    chat_column,
    with_context,
)
from slimectl.data.prompt_images import has_images, has_places
from slimectl.data.prompts import BadRow, nonempty_chat, numbered, with_parts
from slimectl.data.tables import Row
from slimectl.errors import RecordError
from slimectl.types import Chat, Prompt, column, text_of_label

SIDES = ("chosen", "rejected")


@dataclass(frozen=True)
class Preference:
    """Two answers to one prompt, the better one first. Each is a prompt with its label, or a chat that ends with it.

    The first `shared` messages of both chats are equal: the prompt.
    """

    chosen: Prompt
    rejected: Prompt
    shared: int = 0


def open_preferences(
    sources: Sequence[str], options: PromptOptions = PromptOptions(), *, on_bad_row: BadRow | None = None
) -> Iterator[Preference]:
    """Yield the preferences of all sources, from rows with `chosen` and `rejected`, numbered from `options.start`.

    Both are strings, or both are chats. With a prompt (a string or a chat under the input key) they are answers, or
    whole chats that begin with it. Without one they are whole texts or chats, and their common prefix is the prompt. A
    common text prefix ends at a word boundary. An invalid row raises RecordError with file and line, or is passed to
    `on_bad_row`.
    """
    return numbered(sources, options, _preference, on_bad_row)


def _preference(source: Row, index: int, options: PromptOptions) -> Preference:
    location, row = source
    if isinstance(row, RecordError):
        raise row
    if not isinstance(row, dict):
        raise RecordError(f"{location}: expected an object, got {shown(row)}")
    for key in SIDES:
        if key not in row:
            key_names = ", ".join(map(str, row)) or "none"
            raise RecordError(
                f"{location}: no key {key!r}. Its keys are {key_names}, but a preference has chosen and rejected."
            )
    chosen, rejected = (_answer(location, row, key) for key in SIDES)
    name = chat_column(row) if options.input_key == INPUT_KEY and INPUT_KEY not in row else None
    text = as_messages(column(row, name or options.input_key), f"{location}: {name or options.input_key}")
    has_prompt = text is not None
    columns = Columns(text if has_prompt else "", column(row, LABEL_KEY), (name or options.input_key, LABEL_KEY))
    columns = with_context(row, columns, location)
    check = nonempty_chat if has_prompt else a_chat
    base = with_parts((location, row), index, options, columns, check)
    if base.images or any(map(has_places if options.reads_images else has_images, (chosen, rejected))):
        raise RecordError(f"{location}: images in preferences are not supported. Remove the row.")
    if isinstance(chosen, str) and isinstance(rejected, str):
        return _text_preference(location, base, has_prompt, chosen, rejected)
    if isinstance(chosen, list) and isinstance(rejected, list):
        return _chat_preference(location, base, has_prompt, chosen, rejected)
    raise RecordError(f"{location}: rejected: one answer is a string and the other a chat. Give two of the same kind.")


def _answer(location: str, row: dict[str, Any], key: str) -> str | Chat:
    value = as_messages(row[key], f"{location}: {key}")
    try:
        return a_chat(value) if isinstance(value, list) else text_of_label(a_scalar(value))
    except ValueError as error:
        raise RecordError(f"{location}: {key}: {error}") from None


def _text_preference(location: str, base: Prompt, has_prompt: bool, chosen: str, rejected: str) -> Preference:
    start = 0 if has_prompt else _shared_words(chosen, rejected)
    if not has_prompt and not chosen[:start].strip():
        raise RecordError(f"{location}: chosen and rejected begin with different words. Give their prompt, too.")
    text = base.text if has_prompt else chosen[:start]
    before = len(text) if isinstance(text, list) else 0
    first, second = _side("chosen", base, text, chosen[start:]), _side("rejected", base, text, rejected[start:])
    return Preference(first, second, before)


def _chat_preference(location: str, base: Prompt, has_prompt: bool, chosen: Chat, rejected: Chat) -> Preference:
    prompt: Chat = []
    if has_prompt:
        prompt = [{"role": "user", "content": base.text}] if isinstance(base.text, str) else base.text
    chosen, rejected = (
        _full_chat(location, "chosen", prompt, chosen),
        _full_chat(location, "rejected", prompt, rejected),
    )
    shared = _shared_messages(chosen, rejected)
    for key, chat in zip(SIDES, (chosen, rejected), strict=True):
        if not any(message["role"] == "assistant" for message in chat[shared:]):
            raise RecordError(f"{location}: {key}: no assistant message after the messages that both chats share")
    return Preference(_side("chosen", base, chosen), _side("rejected", base, rejected), shared)


def _side(key: str, base: Prompt, text: str | Chat, label: str | None = None) -> Prompt:
    return replace(base, text=text, label=label, source_location=f"{base.source_location}: {key}")


def _full_chat(location: str, key: str, prompt: Chat, answer: Chat) -> Chat:
    """Return the complete chat of prompt and answer. Raises RecordError if the answer's chat lacks the prompt."""
    if not answer:
        raise RecordError(f"{location}: {key}: empty. Give at least one assistant message.")
    if answer[0]["role"] == "assistant":
        if not prompt:
            raise RecordError(
                f"{location}: {key}: begins with an assistant message. Give the prompt, or the whole chat."
            )
        return [*prompt, *answer]
    turns = [(message["role"], message.get("content")) for message in answer]
    if not all((message["role"], message.get("content")) in turns for message in prompt):
        raise RecordError(
            f"{location}: {key}: does not begin with the prompt. Give only the messages of the answer, or no prompt."
        )
    return answer


def _shared_messages(first: Chat, second: Chat) -> int:
    """Return the length of the common prefix in messages. The last message of each chat never counts."""
    limit = min(len(first), len(second)) - 1
    return next((i for i in range(limit) if first[i] != second[i]), limit)


def _shared_words(first: str, second: str) -> int:
    """Return the length of the common prefix in characters, up to a word's end. The space after it is the answer's."""
    end = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))
    while end and not first[end - 1].isspace():
        end -= 1
    return end - 1 if end and first[end - 1] == " " else end
