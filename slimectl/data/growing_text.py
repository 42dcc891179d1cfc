"""Decodes a response while it is sampled, up to the text that later tokens cannot change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""Output of decoders for bytes that do not, or not yet, form a character."""


class GrowingText:
    """Decodes the tokens of one response as they arrive. More tokens only ever add to the text.

    Only a window is decoded: the tokens not yet in the text, preceded by the previous piece, because a decoder may
    treat the first token of a string differently. `backend` is a tokenizer of the tokenizers library.
    """

    def __init__(self, backend: Any, *, keep_special: bool = False) -> None:
        self._decode: Callable[[list[int]], str] = partial(backend.decode, skip_special_tokens=not keep_special)
        decoder = backend.decoder.__getstate__().decode() if backend.decoder is not None else ""
        # Such decoders treat a run of byte tokens as a whole: an invalid last byte also removes the characters before
        # it.
        self._token_text = backend.id_to_token if '"ByteFallback"' in decoder else None
        self._window = 0
        """First token of the window."""
        self._consumed = 0
        """Tokens before this one are in the text."""
        self._window_text = ""
        """Text of the window's tokens before `_consumed`."""
        self._text = ""

    def read(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens`, which must begin with the tokens of the previous call."""
        if len(tokens) <= self._consumed:
            return self._text
        text = self._decode(list(tokens[self._window :]))
        new = text[len(self._window_text) :]
        if self._is_byte(tokens[-1]):
            return self._text
        if text.endswith(UNFINISHED):
            # Only the last character can still be incomplete: the bytes after any earlier one have already broken it.
            return self._text + new[:-1]
        self._text += new
        # Start the next window at text: decoders drop the space of a first piece, even after a skipped special token.
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

    With `keep_special` it includes special tokens, except the one that `ended` it. `decode` is the tokenizer's method.
    """
    if not keep_special:
        return str(decode(tokens, skip_special_tokens=True))
    if ended and tokens and not decode(tokens[-1:], skip_special_tokens=True):
        tokens = tokens[:-1]
    return str(decode(tokens, skip_special_tokens=False))


def marked_text(decode: Callable[..., str], tokens: Sequence[int], text: str, stop: Sequence[str]) -> str:
    """Return a response with special tokens, cut at a stop string if its `text` without them is cut there."""
    marked = str(decode(tokens, skip_special_tokens=False))
    if stop and text != decode(tokens, skip_special_tokens=True):
        marked = min((marked.partition(each)[0] for each in stop), key=len)
    return marked


def before_stop(text: str, stops: Sequence[str]) -> str:
    """Return a growing text up to its first stop string, or up to a partial stop string at its end.

    >>> before_stop("one two\\nUs", ["\\nUser:"])
    'one two'
    """
    for stop in stops:
        text = text.partition(stop)[0]
    return text[: len(text) - max((_overlap(text, stop) for stop in stops), default=0)]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of `stop`."""
    return next((n for n in range(min(len(stop), len(text)), 0, -1) if text.endswith(stop[:n])), 0)
