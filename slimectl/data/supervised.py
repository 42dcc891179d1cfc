"""Supervised samples: loss masks of chats, derived from the chat template itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slimectl.data.chat import STAND_INS, Template, as_chat, encode, image_repeats, located, repeated, shared
from slimectl.data.prompt_images import has_images
from slimectl.errors import RecordError, SettingsError
from slimectl.types import Chat, Label, Prompt, text_of_label


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
        if isinstance(prompt.text, str) and not (apply_chat_template and prompt.text):
            return _string_sample(prompt.text, prompt.label, tokenizer)
        chat = as_chat(prompt.text)
        if prompt.label is not None and chat[-1]["role"] != "assistant":
            chat = [*chat, {"role": "assistant", "content": text_of_label(prompt.label)}]
        tokens, mask = assistant_mask(
            chat, tokenizer, Template(tokenizer, prompt, template_kwargs), from_message=from_message
        )
        if prompt.images or has_images(chat):
            counts = image_repeats(tokens, prompt, tokenizer)
            tokens, mask = repeated(tokens, counts), repeated(mask, counts)
        if 1 not in mask:
            raise RecordError("prompt: no message of the assistant in the chat, and no label; nothing to imitate")
    first, end = mask.index(1), len(mask) - mask[::-1].index(1)
    return tokens[:end], end - first, mask[first:end]


def _string_sample(text: str, label: Label, tokenizer: Any) -> tuple[list[int], int, list[int]]:
    if label is None or isinstance(label, list | dict):
        fault = "missing" if label is None else "a list or an object"
        raise RecordError(f"label: {fault}; imitation of a string prompt needs the answer as its label")
    if tokenizer.eos_token_id is None:
        raise SettingsError("model.path: its tokenizer has no end token; set eos_token in tokenizer_config.json")
    answer = [*encode(tokenizer, text_of_label(label)), tokenizer.eos_token_id]
    if not text:  # nothing comes before the first token, which could be predicted from
        return answer, len(answer) - 1, [1] * (len(answer) - 1)
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
    specials = [offsets[t] for t, token in enumerate(tokens) if token in special]
    mask = [0] * len(tokens)
    for i, message in enumerate(chat):
        if message["role"] != "assistant" or i < from_message:
            continue
        start, end, tail_end = _turn_span(template, chat, i, text)
        following = next((span for span in specials if span[0] >= end), None)
        if following is not None and following[1] > tail_end and _is_other_end(template, chat, i, text, end, following):
            tail_end = following[1]
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


def _is_other_end(template: Template, chat: Chat, i: int, text: str, end: int, token: tuple[int, int]) -> bool:
    """Return whether a special token ends turn i, although the last turn of a chat ends with another (gpt-oss).

    `token` is the span of the first one after the turn's text; one that opens a turn ends none.
    """
    last = _render_around(template, chat[: i + 1], i)
    if last is None or not last[1].strip() or text[end : token[0]].strip():
        return False
    return not _generation_header(template, chat[:i]).strip().startswith(text[slice(*token)])


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
    around, last = _render_around(template, chat, i), _render_around(template, chat[: i + 1], i)
    before_end = _end_before(template, chat, i, text)
    if around is not None and last is not None:
        prefix, suffix = around
        header = _generation_header(template, chat[:i])
        opened = _header_end(text[before_end:], header, shared(prefix, text)[before_end:])
        start, end = before_end + (opened or 0), len(text) - len(suffix)
        beyond = end
        if i + 1 < len(chat) and chat[i].get("tool_calls"):  # answers may depend on the calls, and vanish with them
            answer = _render_around(template, chat, i + 1)
            beyond = end if answer is None else len(shared(answer[0], text))
        if opened is not None and before_end <= start <= end <= beyond and text.endswith(suffix):
            return start, end, end + len(shared(last[1], suffix))
    raise RecordError(
        f"prompt: the chat template does not show what message {i} of the chat became; give what comes before "
        f"it as the prompt, and it as the label"
    )


def _end_before(template: Template, chat: Chat, i: int, text: str) -> int:
    """Return the end of the last message before message i that the template shows: it may drop a tool's."""
    for j in range(i - 1, -1, -1):
        around = _render_around(template, chat, j)
        if around is not None:
            return len(text) - len(around[1])
    return 0


def _generation_header(template: Template, chat: Chat) -> str:
    # Many templates refuse an empty chat: take the header after a placeholder user message.
    messages = chat or [{"role": "user", "content": STAND_INS[0]}]
    return template.text(messages, header=True)[len(template.text(messages)) :]


def _render_around(template: Template, chat: Chat, i: int) -> tuple[str, str] | None:
    """(text before, text after) message i in the rendered chat, found by placing two different texts there.

    None if the template does not show the message.
    """
    first, second = (template.text([*chat[:i], _replace_content(chat[i], text), *chat[i + 1 :]]) for text in STAND_INS)
    return None if first == second else (shared(first, second), shared(first[::-1], second[::-1])[::-1])


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
