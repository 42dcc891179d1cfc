"""Chats to imitate: which of their tokens the assistant wrote, read off the chat template itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slimectl.data.chat import STAND_INS, Template, as_chat, encode, located, shared
from slimectl.errors import RecordError, SettingsError
from slimectl.types import Chat, Prompt


def sft_sample(
    prompt: Prompt,
    tokenizer: Any,
    *,
    apply_chat_template: bool = False,
    template_kwargs: Mapping[str, Any] | None = None,
    from_message: int = 0,
) -> tuple[list[int], int, list[int]]:
    """(tokens, response_length, loss_mask) to imitate an answer.

    A string prompt is followed by its label and the end token. In a chat every turn of the assistant counts, its
    end-of-turn token included; a label is one more such turn. The mask is derived from the template itself: header,
    other roles and whatever the template adds between turns get 0, and so does all before `from_message` of a chat. The
    response begins with the first token that counts and ends with the last.

    Raises RecordError if nothing is there to imitate, or if the template does not show what the assistant wrote.
    """
    with located(prompt):
        if isinstance(prompt.text, str) and not apply_chat_template:
            return _answered(prompt.text, prompt.label, tokenizer)
        chat = as_chat(prompt.text)
        if prompt.label is not None and chat[-1]["role"] != "assistant":
            chat = [*chat, {"role": "assistant", "content": str(prompt.label)}]
        tokens, mask = assistant_mask(
            chat, tokenizer, Template(tokenizer, prompt, template_kwargs), from_message=from_message
        )
        if 1 not in mask:
            raise RecordError("prompt: no message of the assistant in the chat, and no label; nothing to imitate")
    first, end = mask.index(1), len(mask) - mask[::-1].index(1)
    return tokens[:end], end - first, mask[first:end]


def _answered(text: str, label: str | int | float | None, tokenizer: Any) -> tuple[list[int], int, list[int]]:
    if label is None:
        raise RecordError("label: missing; imitation of a string prompt needs the answer as its label")
    if tokenizer.eos_token_id is None:
        raise SettingsError("model.path: its tokenizer has no end token; set eos_token in tokenizer_config.json")
    answer = [*encode(tokenizer, str(label)), tokenizer.eos_token_id]
    return encode(tokenizer, text) + answer, len(answer), [1] * len(answer)


def assistant_mask(
    chat: Chat, tokenizer: Any, template: Template, *, from_message: int = 0
) -> tuple[list[int], list[int]]:
    """All tokens of the rendered chat, and 1 for each that the assistant wrote in `from_message` or later."""
    if not tokenizer.is_fast:
        raise SettingsError("model.path: loss masks need a fast tokenizer (tokenizer.json); this one is a slow one")
    text = template.text(chat)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    tokens, offsets = list(encoded["input_ids"]), encoded["offset_mapping"]
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special} | {*tokenizer.all_special_ids}
    mask = [0] * len(tokens)
    for i, message in enumerate(chat):
        if message["role"] != "assistant" or i < from_message:
            continue
        start, end, tail_end = _written(template, chat, i, text)
        ended = False
        for t, (begin, stop) in enumerate(offsets):
            # The model ends its turn with the first special token, and any that follow it at once.
            gap = text[end:begin] if end <= begin < stop <= tail_end and tokens[t] in special else "no end"
            if not (gap if ended else gap.strip()):
                end, ended = stop, True
        for t, (begin, stop) in enumerate(offsets):
            if start <= begin < stop <= end:
                mask[t] = 1
    return tokens, mask


def _written(template: Template, chat: Chat, i: int, text: str) -> tuple[int, int, int]:
    """Where in `text`, the rendering of `chat`, the assistant's turn i begins and ends, and where its tail ends.

    Templates may rewrite earlier turns when later ones come (dropping their thinking), so a rendered prefix is no
    prefix of the whole. What mostly holds: with another text in message i, everything before and after it stays.
    Where it does not (a tool's answer that only stands after a call), the turn is what it adds to a chat that
    ends before it, if the template leaves that as it is. Raises RecordError where neither shows the turn.
    """
    try:
        return _between(template, chat, i, text)
    except RecordError:
        before, until = template.text(chat[:i], header=True) if i else "", template.text(chat[: i + 1])
        one, two = (template.text([*chat[:i], _stand_in(chat[i], said)]) for said in STAND_INS)
        if one == two or not (before and until.startswith(before) and text.startswith(until)):
            raise
        return len(before), len(until.rstrip()), len(until)


def _between(template: Template, chat: Chat, i: int, text: str) -> tuple[int, int, int]:
    """As `_written`: the turn is what stands between the same two texts whatever its message says."""
    other, after = _around(template, chat, i)
    before_end = len(text) - len(_around(template, chat, i - 1)[1]) if i else 0
    header = _header_after(template, chat[:i])
    opened = _after_header(text[before_end:], header, shared(other, text)[before_end:])
    start, end = before_end + (opened or 0), len(text) - len(after)
    beyond = end
    if i + 1 < len(chat) and chat[i].get("tool_calls"):  # what answers them may hang on the calls, and go with them
        beyond = len(shared(_around(template, chat, i + 1)[0], text))
    if opened is None or not (before_end <= start <= end <= beyond and text.endswith(after)):
        raise RecordError(
            f"prompt: the chat template does not show what message {i} of the chat became; give what comes before "
            f"it as the prompt, and it as the label"
        )
    tail = _around(template, chat[: i + 1], i)[1]
    return start, end, end + len(shared(tail, after))


def _header_after(template: Template, chat: Chat) -> str:
    # Many templates refuse to render no messages at all: take the header after a stand-in for a user.
    asked = chat or [{"role": "user", "content": STAND_INS[0]}]
    return template.text(asked, header=True)[len(template.text(asked)) :]


def _around(template: Template, chat: Chat, i: int) -> tuple[str, str]:
    """The chat with a stand-in for message i, up to the stand-in; and all that follows it."""
    one, two = (template.text([*chat[:i], _stand_in(chat[i], text), *chat[i + 1 :]]) for text in STAND_INS)
    following = shared(one[::-1], two[::-1])[::-1]
    return shared(one, two), following


def _stand_in(message: dict[str, Any], text: str) -> dict[str, Any]:
    content = [{"type": "text", "text": text}] if isinstance(message.get("content"), list) else text
    if message["role"] == "assistant":  # what else it holds (thinking, tool calls) is its text, too
        return {"role": "assistant", "content": content}
    return {**message, "content": content}


def _after_header(text: str, header: str, gap: str) -> int | None:
    """Where in `text` the header ends; `gap` is the beginning of it that stands there whatever the message says."""
    n = next(n for n in range(len(header), -1, -1) if header[:n] in gap)
    # It may open a block of thinking that earlier turns lack, or have empty: then as much of it stands in the gap as
    # they share. And some templates have none, because the asking turn's end opens the answer.
    if not header or not (2 * n >= len(header) or (n and gap.endswith(header[:n]))):
        return None if header else len(gap)
    at = gap.index(header[:n])
    return at + (len(header) if text.startswith(header, at) else n)
