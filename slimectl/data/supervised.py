"""Supervised samples: loss masks of chats, derived from the chat template itself."""

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
    """(tokens, response_length, loss_mask) of a supervised sample.

    A string prompt is followed by its label and the end token. In a chat every assistant turn is trained on, its
    end-of-turn token included; a label is one more such turn. The mask is derived from the template itself: header,
    other roles and whatever the template adds between turns get 0, and so do all messages before `from_message` of a
    chat. The response spans the first to the last trained token.

    Raises RecordError without any assistant turn, or if the template does not show what the assistant wrote.
    """
    with located(prompt):
        if isinstance(prompt.text, str) and not apply_chat_template:
            return _string_sample(prompt.text, prompt.label, tokenizer)
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


def _string_sample(text: str, label: str | int | float | None, tokenizer: Any) -> tuple[list[int], int, list[int]]:
    if label is None:
        raise RecordError("label: missing; imitation of a string prompt needs the answer as its label")
    if tokenizer.eos_token_id is None:
        raise SettingsError("model.path: its tokenizer has no end token; set eos_token in tokenizer_config.json")
    answer = [*encode(tokenizer, str(label)), tokenizer.eos_token_id]
    return encode(tokenizer, text) + answer, len(answer), [1] * len(answer)


def assistant_mask(
    chat: Chat, tokenizer: Any, template: Template, *, from_message: int = 0
) -> tuple[list[int], list[int]]:
    """All tokens of the rendered chat, and their loss mask: 1 for assistant tokens of `from_message` or later."""
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
        start, end, tail_end = _turn_span(template, chat, i, text)
        ended = False
        for t, (begin, stop) in enumerate(offsets):
            # The turn ends with its first special token, and any that follow immediately.
            gap = text[end:begin] if end <= begin < stop <= tail_end and tokens[t] in special else "no end"
            if not (gap if ended else gap.strip()):
                end, ended = stop, True
        for t, (begin, stop) in enumerate(offsets):
            if start <= begin < stop <= end:
                mask[t] = 1
    return tokens, mask


def _turn_span(template: Template, chat: Chat, i: int, text: str) -> tuple[int, int, int]:
    """(start, end, tail end) of the assistant's turn i in `text`, the rendering of `chat`.

    Templates may rewrite earlier turns when later ones come (dropping their thinking), so a rendered prefix of the
    chat need not be a prefix of `text`. Usually, with another text in message i, everything before and after it stays
    the same. Otherwise (a tool's answer that is only rendered after a call), the turn is what it appends to the chat
    that ends before it, if the template leaves that chat unchanged. Raises RecordError if neither shows the turn.
    """
    try:
        return _span_between(template, chat, i, text)
    except RecordError:
        before, until = template.text(chat[:i], header=True) if i else "", template.text(chat[: i + 1])
        first, second = (template.text([*chat[:i], _replace_content(chat[i], stand_in)]) for stand_in in STAND_INS)
        if first == second or not (before and until.startswith(before) and text.startswith(until)):
            raise
        return len(before), len(until.rstrip()), len(until)


def _span_between(template: Template, chat: Chat, i: int, text: str) -> tuple[int, int, int]:
    """Like `_turn_span`: the turn lies between the two texts that do not depend on its message."""
    prefix, suffix = _render_around(template, chat, i)
    before_end = len(text) - len(_render_around(template, chat, i - 1)[1]) if i else 0
    header = _generation_header(template, chat[:i])
    opened = _header_end(text[before_end:], header, shared(prefix, text)[before_end:])
    start, end = before_end + (opened or 0), len(text) - len(suffix)
    beyond = end
    if i + 1 < len(chat) and chat[i].get("tool_calls"):  # answers may depend on the calls, and vanish with them
        beyond = len(shared(_render_around(template, chat, i + 1)[0], text))
    if opened is None or not (before_end <= start <= end <= beyond and text.endswith(suffix)):
        raise RecordError(
            f"prompt: the chat template does not show what message {i} of the chat became; give what comes before "
            f"it as the prompt, and it as the label"
        )
    tail = _render_around(template, chat[: i + 1], i)[1]
    return start, end, end + len(shared(tail, suffix))


def _generation_header(template: Template, chat: Chat) -> str:
    # Many templates refuse an empty chat: take the header after a placeholder user message.
    messages = chat or [{"role": "user", "content": STAND_INS[0]}]
    return template.text(messages, header=True)[len(template.text(messages)) :]


def _render_around(template: Template, chat: Chat, i: int) -> tuple[str, str]:
    """(text before, text after) message i in the rendered chat, found by placing two different texts there."""
    first, second = (template.text([*chat[:i], _replace_content(chat[i], text), *chat[i + 1 :]]) for text in STAND_INS)
    following = shared(first[::-1], second[::-1])[::-1]
    return shared(first, second), following


def _replace_content(message: dict[str, Any], text: str) -> dict[str, Any]:
    content = [{"type": "text", "text": text}] if isinstance(message.get("content"), list) else text
    if message["role"] == "assistant":  # its thinking and tool calls belong to the replaced text
        return {"role": "assistant", "content": content}
    return {**message, "content": content}


def _header_end(text: str, header: str, gap: str) -> int | None:
    """Index in `text` at which the header ends; `gap` is its prefix that does not depend on the message."""
    n = next(n for n in range(len(header), -1, -1) if header[:n] in gap)
    # The header may open a thinking block that earlier turns lack, or have empty: then the gap holds only the shared
    # part. Some templates have no header, because the end of the user's turn opens the answer.
    if not header or not (2 * n >= len(header) or (n and gap.endswith(header[:n]))):
        return None if header else len(gap)
    at = gap.index(header[:n])
    return at + (len(header) if text.startswith(header, at) else n)
