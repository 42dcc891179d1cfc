"""Builds supervised samples. The loss masks of chats are derived from the chat template itself."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from slimectl.chats.messages import MessageError, is_trained
from slimectl.chats.model_tokens import end_tokens
from slimectl.chats.template import Template
from slimectl.data.chat import STAND_INS, as_chat, encode, encode_raw, image_repeats, located, repeated, shared
from slimectl.data.prompt_images import has_images
from slimectl.errors import RecordError, SettingsError
from slimectl.types import Chat, Label, Prompt, text_of_label


def stop_tokens(tokenizer: Any, stop_token_ids: Collection[int] = ()) -> frozenset[int]:
    """Return the tokens at which an engine ends a response. Empty for a tokenizer without a model."""
    folder = Path(str(getattr(tokenizer, "name_or_path", "")))
    if not (folder / "config.json").is_file():
        return frozenset()
    return frozenset([*end_tokens(folder, tokenizer), *stop_token_ids])


def sft_sample(
    prompt: Prompt,
    tokenizer: Any,
    *,
    apply_chat_template: bool = False,
    template_kwargs: Mapping[str, Any] | None = None,
    from_message: int = 0,
    end_tokens: Collection[int] = (),
) -> tuple[list[int], int, list[int]]:
    """Return (tokens, response_length, loss_mask) of a supervised sample.

    A string prompt is followed by its label and the end token. In a chat every assistant turn is trained on with its
    end-of-turn token, unless the turn is marked otherwise. A label is one more such turn, or continues the last message
    if that is from the assistant. The mask comes from the template. Headers, other roles, text between turns and
    messages before `from_message` get 0. The response spans the first to the last token that is trained on.

    With `end_tokens` each turn must end with one of them, or be followed by one, which is then trained on too. If the
    template ends only the last turn with such a token, the ends of earlier turns are not trained on.

    Raises RecordError if the chat has no assistant turn, if the template leaves out a part of the chat, or if a turn
    ends with another token.
    """
    with located(prompt):
        if isinstance(prompt.text, str) and not (apply_chat_template and prompt.text):
            return _string_sample(prompt.text, prompt.label, tokenizer)
        chat, prefilled = _with_label(as_chat(prompt.text), prompt.label)
        template = Template(tokenizer, prompt, template_kwargs)
        tokens, mask = assistant_mask(
            chat, tokenizer, template, from_message=from_message, end_tokens=end_tokens, prefilled=prefilled
        )
        if prompt.images or has_images(chat):
            counts = image_repeats(tokens, prompt, tokenizer)
            tokens, mask = repeated(tokens, counts), repeated(mask, counts)
        if 1 not in mask:
            raise RecordError("prompt: no assistant message and no label, so there is nothing to train on")
    first, end = mask.index(1), len(mask) - mask[::-1].index(1)
    return tokens[:end], end - first, mask[first:end]


def _with_label(chat: Chat, label: Label) -> tuple[Chat, Chat | None]:
    """Return the chat with its label, and the original chat if the label continues its last message."""
    if label is None:
        return chat, None
    if isinstance(label, list | dict):
        raise RecordError("label: a list or an object. Supervised training needs the response as a string.")
    if not chat or chat[-1]["role"] != "assistant":
        return [*chat, {"role": "assistant", "content": text_of_label(label)}], None
    last = chat[-1]
    if last.get("tool_calls") or not isinstance(last.get("content"), str):
        raise RecordError("label: the chat ends with an assistant message that a label cannot continue")
    return [*chat[:-1], {**last, "content": last["content"] + text_of_label(label)}], chat


def _string_sample(text: str, label: Label, tokenizer: Any) -> tuple[list[int], int, list[int]]:
    if label is None or isinstance(label, list | dict):
        fault = "missing" if label is None else "a list or an object"
        raise RecordError(f"label: {fault}. Supervised training on a string prompt needs the response as its label.")
    if tokenizer.eos_token_id is None:
        raise SettingsError("model.path: its tokenizer has no end token. Set eos_token in tokenizer_config.json.")
    prompt, answer = encode_raw(tokenizer, text), [*encode(tokenizer, text_of_label(label)), tokenizer.eos_token_id]
    # The first token cannot be predicted without a token before it.
    length = len(answer) if prompt else len(answer) - 1
    return prompt + answer, length, [1] * length


def assistant_mask(
    chat: Chat,
    tokenizer: Any,
    template: Template,
    *,
    from_message: int = 0,
    end_tokens: Collection[int] = (),
    prefilled: Chat | None = None,
) -> tuple[list[int], list[int]]:
    """Return the tokens of the rendered chat and their loss mask: 1 for assistant tokens of `from_message` or later.

    `prefilled` is the chat before a label completed its last message. Its part of that message gets 0.
    """
    if not tokenizer.is_fast:
        raise SettingsError("model.path: loss masks need a fast tokenizer (tokenizer.json), but this one is slow")
    rendering = _Rendering.of(template, tokenizer, template.fit(chat, taught=True), end_tokens)
    mask = [0] * len(rendering.tokens)
    for i, message in enumerate(rendering.chat):
        is_continued = prefilled is not None and i == len(rendering.chat) - 1
        if message["role"] != "assistant" or (i < from_message and not is_continued) or not _is_taught(message, i):
            continue
        start, content_end, end = rendering.turn(i)
        if is_continued:
            start = _prefilled_end(template, prefilled, rendering.text)
        role_token = None
        if end_tokens:
            end, role_token = rendering.stopping_end(i, (start, content_end, end), end_tokens)
        for t in rendering.tokens_between(start, end):
            mask[t] = 1
        if role_token is not None:
            count = next((t for t, (begin, _) in enumerate(rendering.offsets) if begin >= end), len(mask))
            return [*rendering.tokens[:count], role_token], [*mask[:count], 1]
    return rendering.tokens, mask


def _is_taught(message: Mapping[str, Any], i: int) -> bool:
    try:
        return is_trained(message, f"message[{i}]")
    except MessageError as error:
        raise RecordError(f"prompt: {error}") from None


def _prefilled_end(template: Template, prefilled: Chat | None, text: str) -> int:
    before = template.prompt_text(prefilled or [])
    if not text.startswith(before):
        raise RecordError(
            "prompt: the chat template changes the start of the last message when the label continues it. Write the "
            "whole message without a label."
        )
    return len(before)


@dataclass(frozen=True)
class _Rendering:
    """A chat as text and tokens, with the character `offsets` of each token and the `special` tokens."""

    template: Template
    tokenizer: Any
    chat: Chat
    text: str
    tokens: list[int]
    offsets: list[tuple[int, int]]
    special: frozenset[int]

    @classmethod
    def of(cls, template: Template, tokenizer: Any, chat: Chat, end_tokens: Collection[int]) -> Self:
        text = template.text(chat)
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        added = (token for token, content in tokenizer.added_tokens_decoder.items() if content.special)
        special = frozenset([*added, *tokenizer.all_special_ids, *end_tokens])
        return cls(template, tokenizer, chat, text, [*encoded["input_ids"]], encoded["offset_mapping"], special)

    @cached_property
    def begins(self) -> list[int]:
        return [begin for begin, _ in self.offsets]

    @cached_property
    def special_spans(self) -> list[tuple[int, int]]:
        return [span for token, span in zip(self.tokens, self.offsets, strict=True) if token in self.special]

    def tokens_between(self, start: int, end: int) -> list[int]:
        """Return the indices of the tokens whose characters all lie between `start` and `end`."""
        places = range(bisect_left(self.begins, start), bisect_left(self.begins, end))
        return [t for t in places if self.begins[t] < self.offsets[t][1] <= end]

    def turn(self, i: int) -> tuple[int, int, int]:
        """Return the start of turn i, the end of its content, and the end of its closing special tokens."""
        start, content_end, tail_end = _turn_span(self.template, self.chat, i, self.text)
        following = next((span for span in self.special_spans if span[0] >= content_end), None)
        has_end = any(stop == content_end for _, stop in self.special_spans)
        is_beyond = following is not None and following[1] > tail_end and not has_end
        if following is not None and is_beyond and self._is_other_end(i, content_end, following):
            tail_end = following[1]
        end, ended = content_end, False
        for begin, stop in self.special_spans:
            # The turn ends with its first special token, and any that follow immediately.
            gap = self.text[end:begin] if end <= begin < stop <= tail_end else "no end"
            if not (gap if ended else gap.strip()):
                end, ended = stop, True
        return start, content_end, end

    def _is_other_end(self, i: int, content_end: int, token: tuple[int, int]) -> bool:
        """Return whether turn i ends with a special token that differs from the one that ends the last turn (gpt-oss).

        `token` is the span of the first special token after the turn's text. A token that opens a turn does not count.
        """
        last = _render_around(self.template, self.chat[: i + 1], i)
        if last is None or not last[1].strip() or self.text[content_end : token[0]].strip():
            return False
        return not _generation_header(self.template, self.chat[:i]).strip().startswith(self.text[slice(*token)])

    def stopping_end(self, i: int, span: tuple[int, int, int], end_tokens: Collection[int]) -> tuple[int, int | None]:
        """Return the end of turn i at which the engine stops, and a token to append to the last turn for that.

        `span` is the result of `turn`. Some templates close a turn with the token of the next role (GLM). Others close
        only the last turn with a token at which the model stops (gpt-oss). Then the ends of earlier turns are not
        trained on. Raises RecordError for other ends.
        """
        start, content_end, end = span
        turn = [(self.tokens[t], self.offsets[t][1]) for t in self.tokens_between(start, end)]
        ends = [*itertools.takewhile(lambda item: item[0] in self.special, reversed(turn))]
        if stops := [stop for token, stop in ends if token in end_tokens]:
            return min(stops), None
        tail = self.text[end:]
        after = encode(self.tokenizer, tail.lstrip())[:1]
        if after and after[0] in end_tokens:
            return end + len(tail) - len(tail.lstrip()) + len(self.tokenizer.decode(after)), None
        token = _token_after(self.template, self.tokenizer, self.chat[i], is_last=not tail.strip())
        if token in end_tokens:
            return (content_end, None) if tail.strip() else (end, token)
        ending = repr(self.tokenizer.decode([token for token, _ in reversed(ends)])) if ends else "no end token"
        names = ", ".join(repr(self.tokenizer.decode([token])) for token in sorted(end_tokens))
        raise RecordError(
            f"prompt: message {i} ends with {ending}, but the model stops only at {names}. Add the ending to "
            "eos_token_id in the model's generation_config.json, or use a chat template that ends turns with a token "
            "at which the model stops."
        )


def _token_after(template: Template, tokenizer: Any, message: Mapping[str, Any], *, is_last: bool) -> int | None:
    """Return the token of the next role if the turn is last, else the token that ends a last turn."""
    question, answer = {"role": "user", "content": STAND_INS[0]}, {"role": "assistant", "content": STAND_INS[1]}
    following: dict[str, Any] = question
    if calls := message.get("tool_calls"):
        answer = {**answer, "content": "", "tool_calls": calls}
        following = {"role": "tool", "content": STAND_INS[0], "tool_call_id": calls[-1].get("id", "")}
    try:
        before = template.text(template.fit([question, answer]))
        if is_last:
            followed = template.text(template.fit([question, answer, following]))
            tail = followed[len(before.rstrip()) :] if followed.startswith(before.rstrip()) else ""
        else:
            tail = before[before.rindex(STAND_INS[1]) + 1 :] if not calls else ""
    except (RecordError, ValueError):
        return None
    tokens = encode(tokenizer, tail.lstrip())
    return tokens[0] if tokens else None


def _turn_span(template: Template, chat: Chat, i: int, text: str) -> tuple[int, int, int]:
    """Return (start, end, tail end) of the assistant's turn i in `text`, the rendering of `chat`.

    Templates may rewrite earlier turns when later ones follow (for example, drop their thinking), so a rendered prefix
    of the chat need not be a prefix of `text`. Usually everything before and after message i stays the same if its text
    is replaced. Otherwise (as with a tool result that is only rendered after a call), the turn is the text that it
    appends to the chat before it, if the template leaves that chat unchanged. Raises RecordError if neither way finds
    the turn.
    """
    # A turn is what the model writes after its prompt. Not every template renders a finished turn after that prompt.
    prompt = _text_before(template, chat[:i], header=True)
    begin = len(prompt) if prompt and text.startswith(prompt) else None
    try:
        return _span_between(template, chat, i, text, begin)
    except RecordError:
        appended = _appended(template, chat, i, text)
        if appended is None:
            raise
        start, end, tail_end = appended
        return (start if begin is None or begin > end else begin), end, tail_end


def _text_before(template: Template, chat: Chat, *, header: bool) -> str:
    """Render the messages before a turn. Return "" if there are none or the template refuses them."""
    try:
        return template.text(chat, header=header) if chat else ""
    except RecordError:
        return ""


def _appended(template: Template, chat: Chat, i: int, text: str) -> tuple[int, int, int] | None:
    """Like `_turn_span`, for a turn that the template appends to the chat. None if that chat or the turn changes."""
    before, until = _text_before(template, chat[:i], header=False), template.text(chat[: i + 1])
    first, second = (template.text([*chat[:i], _replace_content(chat[i], stand_in)]) for stand_in in STAND_INS)
    if first == second or not (text.startswith(before) and text.startswith(until.rstrip())):
        return None
    gap = shared(first, second)[len(before) :]
    opened = _header_end(text[len(before) :], _generation_header(template, chat[:i]), gap)
    return None if opened is None else (len(before) + opened, len(until.rstrip()), len(until))


def _span_between(template: Template, chat: Chat, i: int, text: str, begin: int | None) -> tuple[int, int, int]:
    """Like `_turn_span`: the turn lies between the two texts that do not depend on its message.

    It starts at `begin`, the end of its prompt, or after the header that the template shows.
    """
    around, last = _render_around(template, chat, i), _render_around(template, chat[: i + 1], i)
    if around is not None and last is not None:
        prefix, suffix = around
        end = len(text) - len(suffix)
        start = _shown_header_end(template, chat, i, text, prefix) if begin is None or begin > end else begin
        beyond = end
        if i + 1 < len(chat) and chat[i].get("tool_calls"):  # tool results may vanish without the calls
            answer = _render_around(template, chat, i + 1)
            beyond = end if answer is None else len(shared(answer[0], text))
        if start is not None and start <= end <= beyond and text.endswith(suffix):
            return start, end, end + len(shared(last[1], suffix))
    raise RecordError(
        f"prompt: cannot find message {i} in the rendered chat. Give the messages before "
        f"it as the prompt, and the message as the label."
    )


def _shown_header_end(template: Template, chat: Chat, i: int, text: str, prefix: str) -> int | None:
    """Return the end of the header that the template shows before turn i, or None if it shows none."""
    around = _render_around(template, chat, i - 1) if i else None
    before_end = len(text) - len(around[1]) if around is not None else 0
    opened = _header_end(text[before_end:], _generation_header(template, chat[:i]), shared(prefix, text)[before_end:])
    return None if opened is None else before_end + opened


def _generation_header(template: Template, chat: Chat) -> str:
    # Many templates refuse an empty chat: take the header after a placeholder user message.
    messages = chat or [{"role": "user", "content": STAND_INS[0]}]
    return template.text(messages, header=True)[len(template.text(messages)) :]


def _render_around(template: Template, chat: Chat, i: int) -> tuple[str, str] | None:
    """Return (text before, text after) message i in the rendered chat, found by placing two different texts there.

    Return None if the template does not show the message.
    """
    first, second = (template.text([*chat[:i], _replace_content(chat[i], text), *chat[i + 1 :]]) for text in STAND_INS)
    return None if first == second else (shared(first, second), shared(first[::-1], second[::-1])[::-1])


def _replace_content(message: dict[str, Any], text: str) -> dict[str, Any]:
    content = [{"type": "text", "text": text}] if isinstance(message.get("content"), list) else text
    if message["role"] == "assistant":  # its thinking and tool calls belong to the replaced text
        return {"role": "assistant", "content": content}
    return {**message, "content": content}


def _header_end(text: str, header: str, gap: str) -> int | None:
    """Return the index in `text` at which the header ends. `gap` is its prefix that all messages share."""
    n = next(n for n in range(len(header), -1, -1) if header[:n] in gap)
    # The header may open a thinking block that earlier turns do not have, or have empty. Then the gap holds only the
    # shared part. Some templates have no header, because the end of the user's turn opens the answer.
    if not header or not (2 * n >= len(header) or (n and gap.endswith(header[:n]))):
        return None if header else len(gap)
    at = gap.index(header[:n])
    return at + (len(header) if text.startswith(header, at) else n)
