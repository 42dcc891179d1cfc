"""Incremental detokenization and search for stop strings."""

from __future__ import annotations

from typing import Any

from slimectl.data.growing_text import UNFINISHED, GrowingText, response_text

LONGEST_WAIT = 16
"""Tokens after which text that still ends in a broken character is accepted: the model wrote broken bytes."""


class Detokenizer:
    """Decodes whole answers; special tokens are skipped, unless `keep_special`.

    Calls the tokenizer's backend: transformers' wrapper around it is several times slower.
    """

    def __init__(self, tokenizer: Any, *, keep_special: bool = False) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._skip_special = not keep_special
        added = self._backend.get_added_tokens_decoder().items()
        self._special = {token.content: number for number, token in added if token.special}

    def special_tokens(self, texts: tuple[str, ...]) -> dict[int, str]:
        """Return the texts that are one special token, by that token."""
        return {self._special[text]: text for text in texts if text in self._special}

    def decode(self, tokens: list[int]) -> str:
        return str(self._backend.decode(tokens, skip_special_tokens=self._skip_special))

    def response_text(self, tokens: list[int], *, keep_special: bool = False, ended: bool = False) -> str:
        """Return the text of a finished answer (data.growing_text.response_text)."""
        return response_text(self._backend.decode, tokens, keep_special=keep_special, ended=ended)

    def growing_text(self) -> GrowingText:
        """Return the text of a new answer, which is decoded as its tokens come."""
        return GrowingText(self._backend, keep_special=not self._skip_special)


class StopScanner:
    """Extends the text of one answer token by token and searches the new part for stop strings.

    Decodes a window only: the tokens not yet in `text`, after those of the piece before them, because a decoder may
    treat the first token of a string differently. Tokens wait while they end inside a multi-byte character. A stop
    string that is one special token is found by the token, because the text may have no special tokens.
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
        self.matched = ""  # the stop string that ended it

    def scan(self, tokens: list[int], *, stopping: bool) -> bool:
        """Append the new tokens to the text; with `stopping`, cut it at the first stop string in the new part."""
        stop_token = self._stop_tokens.get(tokens[-1]) if stopping else None
        if stop_token is not None:
            tokens = tokens[:-1]
        text = self._decode(tokens[self._window :])
        if text.endswith(UNFINISHED) and len(tokens) - self._consumed < LONGEST_WAIT and stop_token is None:
            return False
        search_start = max(0, len(self.text) - self._stop_overlap)
        self.text += text[len(self._window_text) :]
        # The next window begins with text: the blank of a first piece is dropped, also behind a skipped special token.
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


BYTES = [*range(33, 127), *range(161, 173), *range(174, 256)]
"""Bytes that byte-level tokenizers write as the character of that number; the others are characters from 256 on."""


class TokenBytes:
    """The bytes that each token of a vocabulary stands for, alone and with its blank; special tokens by their name.

    Knows byte-level and metaspace tokenizers, with byte fallback; of others a token is what the decoder makes of it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._added = {token: str(added) for token, added in self._backend.get_added_tokens_decoder().items()}
        self._special = {token for token, added in self._backend.get_added_tokens_decoder().items() if added.special}
        decoder = self._backend.decoder.__getstate__().decode() if self._backend.decoder is not None else ""
        self._byte_level, self._metaspace = '"ByteLevel"' in decoder, "\N{LOWER ONE EIGHTH BLOCK}" in decoder
        unprintable = [byte for byte in range(256) if byte not in BYTES]
        self._byte_of = {chr(byte): byte for byte in BYTES} | {chr(256 + i): byte for i, byte in enumerate(unprintable)}

    def is_special(self, token: int) -> bool:
        return token in self._special

    def of(self, token: int) -> bytes:
        piece = self._backend.id_to_token(token)
        if token in self._added:
            return self._added[token].encode()
        if piece is None:  # an id of the model that its tokenizer has no token for
            return b""
        if self._byte_level and all(char in self._byte_of for char in piece):
            return bytes(self._byte_of[char] for char in piece)
        if not self._metaspace:
            return str(self._backend.decode([token], skip_special_tokens=False)).encode()
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes.fromhex(piece[3:5])
        return str(piece).replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()

    def text(self, token: int) -> str:
        """Return the token as text; a part of a multi-byte character is a replacement character."""
        return self.of(token).decode("utf-8", "replace")
