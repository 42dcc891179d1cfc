"""Text of an answer that is still being sampled, as far as later tokens cannot change it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What decoders write for bytes that are no character, or not yet one."""


class GrowingText:
    """Decodes the tokens of one answer as they come; the text of more tokens only adds to it.

    Decodes a window only: the tokens not yet in the text, after those of the piece before them, because a decoder may
    treat the first token of a string differently. `backend` is the tokenizer of the library tokenizers.
    """

    def __init__(self, backend: Any, *, keep_special: bool = False) -> None:
        self._decode: Callable[[list[int]], str] = partial(backend.decode, skip_special_tokens=not keep_special)
        decoder = backend.decoder.__getstate__().decode() if backend.decoder is not None else ""
        # Such decoders judge a run of byte tokens as a whole: a last broken byte takes back the characters before it.
        self._token_text = backend.id_to_token if '"ByteFallback"' in decoder else None
        self._window = 0
        """First token of the window."""
        self._consumed = 0
        """Tokens before this one are in the text."""
        self._window_text = ""
        """Text of the window's tokens before `_consumed`."""
        self._text = ""

    def read(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens`, which begin with those of the call before."""
        if len(tokens) <= self._consumed:
            return self._text
        text = self._decode(list(tokens[self._window :]))
        new = text[len(self._window_text) :]
        if self._is_byte(tokens[-1]):
            return self._text
        if text.endswith(UNFINISHED):
            # Only the last character may be the beginning of one: those before it are followed by what broke them.
            return self._text + new[:-1]
        self._text += new
        # The next window begins with text: the blank of a first piece is dropped, also behind a skipped special token.
        if newest := self._decode(list(tokens[self._consumed :])):
            self._window, text = self._consumed, newest
        self._consumed, self._window_text = len(tokens), text
        return self._text

    def _is_byte(self, token: int) -> bool:
        piece = self._token_text(token) if self._token_text is not None else None
        return piece is not None and len(piece) == 6 and piece.startswith("<0x")


def response_text(
    decode: Callable[..., str], tokens: Sequence[int], *, keep_special: bool = False, ended: bool = False
) -> str:
    """Return the text of a response.

    With `keep_special` it has special tokens, except the one that `ended` it. `decode` is a tokenizer's.
    """
    if not keep_special:
        return str(decode(tokens, skip_special_tokens=True))
    if ended and tokens and not decode(tokens[-1:], skip_special_tokens=True):
        tokens = tokens[:-1]
    return str(decode(tokens, skip_special_tokens=False))


def marked_text(decode: Callable[..., str], tokens: Sequence[int], text: str, stop: Sequence[str]) -> str:
    """Return a response with special tokens, cut at a stop string if its `text` without them is cut."""
    marked = str(decode(tokens, skip_special_tokens=False))
    if stop and text != decode(tokens, skip_special_tokens=True):
        marked = min((marked.partition(each)[0] for each in stop), key=len)
    return marked


def before_stop(text: str, stops: Sequence[str]) -> str:
    """Return a growing text up to its first stop string, or to the beginning of one at its end.

    >>> before_stop("one two\\nUs", ["\\nUser:"])
    'one two'
    """
    for stop in stops:
        text = text.partition(stop)[0]
    return text[: len(text) - max((_overlap(text, stop) for stop in stops), default=0)]


def _overlap(text: str, stop: str) -> int:
    """Return the number of characters at the end of `text` with which `stop` begins."""
    return next((n for n in range(min(len(stop), len(text)), 0, -1) if text.endswith(stop[:n])), 0)
