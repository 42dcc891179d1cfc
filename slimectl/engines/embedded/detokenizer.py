"""Text from tokens, as they come."""

from __future__ import annotations

from typing import Any

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
LONGEST_WAIT = 16
"""Tokens after which text that still ends in a broken character is taken as it is: the model wrote broken bytes."""


class Detokenizer:
    """Decodes whole answers; special tokens leave no text, unless `keep_special`.

    Asks the tokenizer's backend: transformers' wrapper around it is several times slower.
    """

    def __init__(self, tokenizer: Any, *, keep_special: bool = False) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._skip_special = not keep_special

    def decode(self, tokens: list[int]) -> str:
        return str(self._backend.decode(tokens, skip_special_tokens=self._skip_special))


class StopScanner:
    """Grows the text of one answer token by token and looks for stop strings where it has grown.

    Decodes a window only: the tokens not yet in `text`, after those of the piece before them, because a decoder may
    treat the first token of a string differently. Tokens wait while they end inside a multi-byte character.
    """

    def __init__(self, detokenizer: Detokenizer, stop: tuple[str, ...]) -> None:
        self._decode = detokenizer.decode
        self._stop = stop
        self._reach = max(map(len, stop), default=1) - 1
        self._window = 0  # first token of the window
        self._taken = 0  # tokens before this one are in the text
        self._window_text = ""  # what the window's tokens before `taken` decode to
        self.text = ""
        self.matched = ""  # the stop string that ended it

    def scan(self, tokens: list[int], *, stopping: bool) -> bool:
        """Take the new tokens into the text; with `stopping`, cut it at the first stop string in what is new."""
        text = self._decode(tokens[self._window :])
        if text.endswith(UNFINISHED) and len(tokens) - self._taken < LONGEST_WAIT:
            return False
        searched = max(0, len(self.text) - self._reach)
        self.text += text[len(self._window_text) :]
        self._window, self._taken = self._taken, len(tokens)
        self._window_text = self._decode(tokens[self._window :])
        found = [(at, stop) for stop in self._stop if (at := self.text.find(stop, searched)) >= 0]
        if not stopping or not found:
            return False
        at, self.matched = min(found)
        self.text = self.text[:at]
        return True
