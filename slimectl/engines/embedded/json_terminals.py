"""Grammars for the terminals of JSON: whitespace, characters, strings and numbers."""

from __future__ import annotations

from slimectl.engines.embedded.grammar import EMPTY, Bytes, Choice, Node, Repeat, Sequential, literal


def ranges(*pairs: tuple[int, int]) -> Bytes:
    return Bytes(frozenset(byte for low, high in pairs for byte in range(low, high + 1)))


def series(*parts: Node | str) -> Node:
    return Sequential(tuple(literal(part) if isinstance(part, str) else part for part in parts))


def optional(node: Node) -> Node:
    return Choice((EMPTY, node))


SPACE = optional(Choice((literal(" "), series("\n", Repeat(Bytes(frozenset(b" \t")), 0, 24)))))
"""Whitespace between two parts: none, a space, or a line break with indentation. Bounded, so that it always ends."""
DIGIT, TAIL = ranges((0x30, 0x39)), ranges((0x80, 0xBF))
HEX = ranges((0x30, 0x39), (0x41, 0x46), (0x61, 0x66))
MULTIBYTE = (
    series(ranges((0xC2, 0xDF)), TAIL),
    series(ranges((0xE0, 0xE0)), ranges((0xA0, 0xBF)), TAIL),
    series(ranges((0xE1, 0xEC), (0xEE, 0xEF)), TAIL, TAIL),
    series(ranges((0xED, 0xED)), ranges((0x80, 0x9F)), TAIL),
    series(ranges((0xF0, 0xF0)), ranges((0x90, 0xBF)), TAIL, TAIL),
    series(ranges((0xF1, 0xF3)), TAIL, TAIL, TAIL),
    series(ranges((0xF4, 0xF4)), ranges((0x80, 0x8F)), TAIL, TAIL),
)
"""Non-ASCII characters in UTF-8."""
CHARACTER = Choice(
    (
        ranges((0x20, 0x21), (0x23, 0x5B), (0x5D, 0x7F)),
        series("\\", Bytes(frozenset(b'"\\/bfnrt'))),
        series("\\u", ranges((0x30, 0x39), (0x41, 0x43), (0x45, 0x46), (0x61, 0x63), (0x65, 0x66)), HEX, HEX, HEX),
        series("\\u", Bytes(frozenset(b"dD")), ranges((0x30, 0x37)), HEX, HEX),  # half a surrogate pair is not allowed
        *MULTIBYTE,
    ),
    takes_plain=True,
)
"""One character inside a JSON string."""
STRING = series('"', Repeat(CHARACTER), '"')
INTEGER = series(optional(literal("-")), Choice((literal("0"), series(ranges((0x31, 0x39)), Repeat(DIGIT, 0, 19)))))
EXPONENT = series(Bytes(frozenset(b"eE")), optional(Bytes(frozenset(b"+-"))), Repeat(DIGIT, 1, 2))
NUMBER = series(INTEGER, optional(series(".", Repeat(DIGIT, 1, 20))), optional(EXPONENT))
