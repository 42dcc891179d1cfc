"""Incremental detokenization and search for stop strings."""

from __future__ import annotations

from typing import Any

from slimectl.data.growing_text import UNFINISHED, GrowingText, response_text

LONGEST_WAIT = 16
"""Number of tokens to wait for the end of an incomplete character. After that, the model has written broken bytes."""


class Detokenizer:
    """Decodes whole responses. Skips special tokens unless `keep_special`.

    Calls the tokenizer's backend because the wrapper in transformers is several times slower.
    """

    def __init__(self, tokenizer: Any, *, keep_special: bool = False) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._skip_special = not keep_special
        added = self._backend.get_added_tokens_decoder().items()
        self._special = {token.content: number for number, token in added if token.special}

    def special_tokens(self, texts: tuple[str, ...]) -> dict[int, str]:
        """Return those `texts` that are a single special token, keyed by its id."""
        return {self._special[text]: text for text in texts if text in self._special}

    def decode(self, tokens: list[int]) -> str:
        return str(self._backend.decode(tokens, skip_special_tokens=self._skip_special))

    def response_text(self, tokens: list[int], *, keep_special: bool = False, ended: bool = False) -> str:
        """Return the text of a finished response (data.growing_text.response_text)."""
        return response_text(self._backend.decode, tokens, keep_special=keep_special, ended=ended)

    def growing_text(self) -> GrowingText:
        """Return a decoder for one new response that adds text as tokens arrive."""
        return GrowingText(self._backend, keep_special=not self._skip_special)


class StopScanner:
    """Extends the text of one response token by token and searches the new part for stop strings.

    Decodes only a window: the tokens not yet in `text` and the piece before them, because a decoder may treat the first
    token of a string differently. Tokens are held back while they end inside a multi-byte character. A stop string that
    is one special token is matched by its id, because the text may omit special tokens.
    """

    def __init__(self, detokenizer: Detokenizer, stop: tuple[str, ...]) -> None:
        self._decode = detokenizer.decode
        self._stop_tokens = detokenizer.special_tokens(stop)
        self._stop = stop
        self._stop_overlap = max(map(len, stop), default=1) - 1
        self._window = 0  # first token of the window
        self._consumed = 0  # tokens before this one are in the text
        self._window_text = ""  # text of the window's tokens before `_consumed`
        self.text = ""
        self.matched = ""  # the stop string that ended the text

    def scan(self, tokens: list[int], *, stopping: bool) -> bool:
        """Append the new tokens to the text. With `stopping`, cut the text at the first stop string in the new part."""
        stop_token = self._stop_tokens.get(tokens[-1]) if stopping else None
        if stop_token is not None:
            tokens = tokens[:-1]
        text = self._decode(tokens[self._window :])
        if text.endswith(UNFINISHED) and len(tokens) - self._consumed < LONGEST_WAIT and stop_token is None:
            return False
        search_start = max(0, len(self.text) - self._stop_overlap)
        self.text += text[len(self._window_text) :]
        # The next window must begin with text: decoders drop the space before a first piece, even after a skipped
        # special token.
        newest_text = self._decode(tokens[self._consumed :])
        if newest_text:
            self._window, text = self._consumed, newest_text
        self._consumed, self._window_text = len(tokens), text
        matches = [(position, stop) for stop in self._stop if (position := self.text.find(stop, search_start)) >= 0]
        if stop_token is not None:
            matches.append((len(self.text), stop_token))
        if not stopping or not matches:
            return False
        position, self.matched = min(matches)
        self.text = self.text[:position]
        return True
