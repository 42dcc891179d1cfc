"""Chats as tokens: what the model is asked, and which tokens of a whole chat the assistant wrote."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slimectl.errors import RecordError, SettingsError
from slimectl.types import Chat, Prompt

# Two texts with nothing in common: where two renderings differ, there stands the message.
STAND_INS = ("x", "y")


def render(
    prompt: Prompt,
    tokenizer: Any,
    *,
    apply_chat_template: bool = False,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """The tokens that the model is asked to continue.

    A string is tokenised as it stands, or with `apply_chat_template` as one user message; a chat list always goes
    through the tokenizer's template, with its tools and the header of the assistant's turn. Raises SettingsError if
    there is no template, RecordError if it refuses the chat.
    """
    if isinstance(prompt.text, str) and not apply_chat_template:
        return _encode(tokenizer, prompt.text)
    template = _Template(tokenizer, prompt, template_kwargs)
    return _encode(tokenizer, template.text(_as_chat(prompt.text), header=True))


def sft_sample(
    prompt: Prompt,
    tokenizer: Any,
    *,
    apply_chat_template: bool = False,
    template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[list[int], int, list[int]]:
    """(tokens, response_length, loss_mask) to imitate an answer.

    A string prompt is followed by its label and the end token. In a chat every turn of the assistant counts, its
    end-of-turn token included; a label is one more such turn. The mask is derived from the template itself: header,
    other roles and whatever the template adds between turns get 0. The response begins with the first token that
    counts and ends with the last.

    Raises RecordError if nothing is there to imitate, or if the template does not show what the assistant wrote.
    """
    if isinstance(prompt.text, str) and prompt.label is None:
        raise RecordError("label: missing; imitation of a string prompt needs the answer as its label")
    if isinstance(prompt.text, str) and not apply_chat_template:
        if tokenizer.eos_token_id is None:
            raise SettingsError("model.path: its tokenizer has no end token; set eos_token in tokenizer_config.json")
        answer = [*_encode(tokenizer, str(prompt.label)), tokenizer.eos_token_id]
        return _encode(tokenizer, prompt.text) + answer, len(answer), [1] * len(answer)
    chat = _as_chat(prompt.text)
    if prompt.label is not None and chat[-1]["role"] != "assistant":
        chat = [*chat, {"role": "assistant", "content": str(prompt.label)}]
    tokens, mask = assistant_mask(chat, tokenizer, _Template(tokenizer, prompt, template_kwargs))
    if 1 not in mask:
        raise RecordError("prompt: no message of the assistant in the chat, and no label; nothing to imitate")
    first, end = mask.index(1), len(mask) - mask[::-1].index(1)
    return tokens[:end], end - first, mask[first:end]


def following(tokenizer: Any, messages: Chat, template_kwargs: Mapping[str, Any] | None = None) -> list[int]:
    """The tokens that come after an assistant's text when `messages` follow it and the assistant is to speak again.

    They begin with the end of the assistant's turn. What stands before is left alone, so tokens that were sampled stay
    as they are: only the difference is rendered, after stand-ins for a user and an answer. Raises SettingsError without
    a template, RecordError if it refuses such messages.
    """
    template = _Template(tokenizer, Prompt(text=""), template_kwargs)
    asked = [{"role": "user", "content": STAND_INS[0]}]
    one, two = (
        template.text([*asked, {"role": "assistant", "content": text}, *messages], header=True) for text in STAND_INS
    )
    return _encode(tokenizer, _shared(one[::-1], two[::-1])[::-1])


def assistant_mask(chat: Chat, tokenizer: Any, template: _Template) -> tuple[list[int], list[int]]:
    """All tokens of the rendered chat, and 1 for each that the assistant wrote."""
    if not tokenizer.is_fast:
        raise SettingsError("model.path: loss masks need a fast tokenizer (tokenizer.json); this one is a slow one")
    text = template.text(chat)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    tokens, offsets = list(encoded["input_ids"]), encoded["offset_mapping"]
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special} | {*tokenizer.all_special_ids}
    mask = [0] * len(tokens)
    for i, message in enumerate(chat):
        if message["role"] != "assistant":
            continue
        start, end, tail_end = template.written(chat, i, text)
        for t, (begin, stop) in enumerate(offsets):
            if end <= begin < stop <= tail_end and tokens[t] in special and not text[end:begin].strip():
                # The model ends its turn with this token.
                end = stop
                break
        for t, (begin, stop) in enumerate(offsets):
            if start <= begin < stop <= end:
                mask[t] = 1
    return tokens, mask


class _Template:
    """The chat template of a tokenizer, bound to the tools and arguments of one prompt."""

    def __init__(self, tokenizer: Any, prompt: Prompt, kwargs: Mapping[str, Any] | None) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise SettingsError(
                "rollout.apply_chat_template: the tokenizer of this model has no chat template; give string prompts "
                "and leave it false, or put a chat_template.jinja beside the tokenizer"
            )
        self._tokenizer = tokenizer
        self._arguments = {**(kwargs or {}), "tools": prompt.tools, "tokenize": False}

    def text(self, chat: Chat, *, header: bool = False) -> str:
        """The chat as text; with `header`, opened for the assistant's next turn. Raises RecordError."""
        try:
            text: str = self._tokenizer.apply_chat_template(chat, add_generation_prompt=header, **self._arguments)
        except Exception as error:
            raise RecordError(f"prompt: the chat template refuses this chat: {error}") from error
        return text

    def written(self, chat: Chat, i: int, text: str) -> tuple[int, int, int]:
        """Where in `text`, the rendering of `chat`, the assistant's turn i begins and ends, and where its tail ends.

        Templates may rewrite earlier turns when later ones come (dropping their thinking), so a rendered prefix is no
        prefix of the whole. What always holds: with another text in message i, everything before and after it stays.
        """
        other, after = self._around(chat, i)
        before_end = len(text) - len(self._around(chat, i - 1)[1]) if i else 0
        shared = _shared(other, text)
        header = self.text(chat[:i], header=True)[len(self.text(chat[:i])) :] if i else self._first_header(chat)
        gap = shared[before_end:]
        opened = _after_header(gap, header)
        start, end = before_end + (opened or 0), len(text) - len(after)
        if opened is None or not (before_end <= start <= end and text.endswith(after)):
            raise RecordError(f"prompt: the chat template does not show what message {i} of the chat became")
        tail = self._around(chat[: i + 1], i)[1]
        return start, end, end + len(_shared(tail, after))

    def _first_header(self, chat: Chat) -> str:
        # Many templates refuse to render no messages at all: take the header after a stand-in for a user.
        asked = [{"role": "user", "content": STAND_INS[0]}]
        return self.text(asked, header=True)[len(self.text(asked)) :]

    def _around(self, chat: Chat, i: int) -> tuple[str, str]:
        """The chat with a stand-in for message i, up to the stand-in; and all that follows it."""
        one, two = (self.text([*chat[:i], _stand_in(chat[i], text), *chat[i + 1 :]]) for text in STAND_INS)
        following = _shared(one[::-1], two[::-1])[::-1]
        return _shared(one, two), following


def _stand_in(message: dict[str, Any], text: str) -> dict[str, Any]:
    if message["role"] == "assistant":  # what else it holds (thinking, tool calls) is its text, too
        return {"role": "assistant", "content": text}
    return {**message, "content": text}


def _after_header(gap: str, header: str) -> int | None:
    """Where in `gap`, all that stands between the content of two messages, the header ends."""
    if header in gap and header:
        return gap.index(header) + len(header)
    # It may hold an empty thinking block that earlier turns lack: then the gap ends with as much of it as there is.
    # And some templates have none, because the asking turn's end opens the answer.
    partial = any(gap.endswith(header[:n]) for n in range(len(header) - 1, 0, -1))
    return len(gap) if partial or not header else None


def _shared(a: str, b: str) -> str:
    """The longest beginning that both have."""
    end = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:end]


def _as_chat(text: str | Chat) -> Chat:
    return [{"role": "user", "content": text}] if isinstance(text, str) else text


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))
