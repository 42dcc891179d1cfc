"""Bytes and text of single tokens of a vocabulary."""

from __future__ import annotations

from typing import Any

BYTES = [*range(33, 127), *range(161, 173), *range(174, 256)]
"""Bytes that byte-level tokenizers write as the character of the same number. Others become characters above 255."""


class TokenBytes:
    """The bytes of each token of a vocabulary, with its leading space. A special token has the bytes of its name.

    Reads byte-level and metaspace tokenizers, with byte fallback. With other tokenizers it decodes the single token.
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
        if piece is None:  # an id of the model for which the tokenizer has no token
            return b""
        if self._byte_level and all(char in self._byte_of for char in piece):
            return bytes(self._byte_of[char] for char in piece)
        if not self._metaspace:
            return str(self._backend.decode([token], skip_special_tokens=False)).encode()
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes.fromhex(piece[3:5])
        return str(piece).replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()

    def text(self, token: int) -> str:
        """Return the token as text. A part of a multi-byte character becomes a replacement character."""
        return self.of(token).decode("utf-8", "replace")
