"""Compiles regular expressions to grammars, for plain text and for text inside a JSON string."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from slimectl.engines.embedded.grammar import (
    CHARACTER,
    EMPTY,
    MULTIBYTE,
    PLAIN_ASCII,
    Bytes,
    Choice,
    Node,
    Repeat,
    literal,
    series,
)  # fmt: skip
from slimectl.errors import SettingsError

MOST_REPEATS = 64
LONGEST = 1000
_WORD = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_")
_CLASSES = {
    codes.CATEGORY_DIGIT: frozenset(b"0123456789"),
    codes.CATEGORY_WORD: _WORD,
    codes.CATEGORY_SPACE: frozenset(b" \t\n\r\f"),
}
_NEGATED = {
    codes.CATEGORY_NOT_DIGIT: codes.CATEGORY_DIGIT,
    codes.CATEGORY_NOT_WORD: codes.CATEGORY_WORD,
    codes.CATEGORY_NOT_SPACE: codes.CATEGORY_SPACE,
}
_WRITTEN = {ord(character): character.encode() for character in '"\\\t\n\f\r'}
"""Characters that are special in JSON strings, and line breaks, as written in plain text."""
_ESCAPED = {ord('"'): b'\\"', ord("\\"): b"\\\\", 8: b"\\b", 9: b"\\t", 10: b"\\n", 12: b"\\f", 13: b"\\r"}
"""The same characters as written inside a JSON string."""
_AT_BEGIN, _AT_END = (codes.AT, codes.AT_BEGINNING), (codes.AT, codes.AT_END)


class _Unsupported(Exception):
    pass


def regex_grammar(pattern: str) -> Node:
    """Return the grammar of the texts that a pattern matches in full. Raises SettingsError like `pattern_grammar`."""
    return _Compiler(_WRITTEN).whole(pattern, "regex:")


def pattern_grammar(pattern: Any, at: str) -> Node:
    """Return the grammar of the texts that contain a match of a pattern. ^ and $ anchor it.

    The texts are escaped as inside a JSON string. \\d, \\w and \\s match ASCII only, as in ECMA-262. Raises
    SettingsError for a pattern with back references, lookarounds, boundaries or flags.
    """
    return _Compiler(_ESCAPED).whole(pattern, f"json_schema: {at}:", around=Repeat(CHARACTER))


class _Compiler:
    """Compiles patterns. `written` maps special characters to their bytes in the text."""

    def __init__(self, written: Mapping[int, bytes]) -> None:
        self._written = written

    def whole(self, pattern: Any, at: str, *, around: Node = EMPTY) -> Node:
        """Return the grammar of a pattern, with `around` on each side that has no anchor."""
        if not isinstance(pattern, str) or len(pattern) > LONGEST:
            raise SettingsError(f"{at} pattern is not a string of at most {LONGEST} characters")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                items = list(parser.parse(pattern, re.ASCII))
            begin, end = items[:1] == [_AT_BEGIN], items[-1:] == [_AT_END]
            inner = items[1 if begin else 0 : len(items) - 1 if end else len(items)]
            return series(EMPTY if begin else around, self._sequence(inner), EMPTY if end else around)
        except (_Unsupported, re.error, RecursionError, OverflowError) as error:
            raise SettingsError(
                f"{at} pattern {pattern[:60]!a} is not supported ({str(error)[:60]}). Leave it out."
            ) from None

    def _sequence(self, items: Iterable[tuple[Any, Any]]) -> Node:
        parts = [self._item(code, value) for code, value in items]
        return parts[0] if len(parts) == 1 else series(*parts)

    def _item(self, code: Any, value: Any) -> Node:
        """Return the grammar of one part of a parsed pattern."""
        if code is codes.LITERAL:
            return self._characters({value})
        if code is codes.NOT_LITERAL:
            return self._others({value})
        if code is codes.ANY:
            return self._others({10, 13})
        if code is codes.IN:
            return self._class(value)
        if code is codes.BRANCH:
            return Choice(tuple(map(self._sequence, value[1])))
        if code is codes.SUBPATTERN and not value[1] and not value[2]:
            return self._sequence(value[3])
        if code in (codes.MAX_REPEAT, codes.MIN_REPEAT):
            low, high, inner = value
            return _repeat(self._sequence(inner), low, None if high is codes.MAXREPEAT else high)
        raise _Unsupported(str(code).lower().replace("_", " "))

    def _class(self, members: list[tuple[Any, Any]]) -> Node:
        """Return the grammar of a class such as [a-z_] or [^0-9]."""
        negated = members[0][0] is codes.NEGATE
        chosen: set[int] = set()
        for code, value in members[1 if negated else 0 :]:
            if code is codes.LITERAL:
                chosen.add(value)
            elif code is codes.RANGE:
                if value[1] - value[0] > 0x3000:
                    raise _Unsupported("a class of too many characters")
                chosen |= set(range(value[0], value[1] + 1))
            elif value in _CLASSES:
                chosen |= _CLASSES[value]
            elif value in _NEGATED and len(members) == 1:
                return self._others(_CLASSES[_NEGATED[value]])
            else:
                raise _Unsupported("a negated class inside a class")
        return self._others(chosen) if negated else self._characters(chosen)

    def _characters(self, chosen: Iterable[int]) -> Choice:
        """Return the grammar of one of these characters."""
        plain = frozenset(chosen) & PLAIN_ASCII
        options: list[Node] = [Bytes(plain)] if plain else []
        for character in sorted(set(chosen) - plain):
            if character in self._written:
                options.append(literal(self._written[character].decode()))
            elif character < 0x20 or 0xD800 <= character < 0xE000:
                raise _Unsupported(f"the character {character:#x}")
            else:
                options.append(literal(chr(character)))
        return Choice(tuple(options))

    def _others(self, excluded: Iterable[int]) -> Node:
        """Return the grammar of every character except these, which must be ASCII."""
        if any(character >= 0x80 for character in excluded):
            raise _Unsupported("a negated class of characters beyond ASCII")
        others = (PLAIN_ASCII | self._written.keys()) - frozenset(excluded)
        return Choice((*self._characters(others).options, *MULTIBYTE), takes_plain=others >= PLAIN_ASCII)


def _repeat(node: Node, low: int, high: int | None) -> Node:
    """Return repetitions of a node. Raises _Unsupported if the node may be empty."""
    if max(low, high or 0) > MOST_REPEATS:
        raise _Unsupported(f"more than {MOST_REPEATS} repetitions")
    if _may_be_empty(node):
        raise _Unsupported("repetitions of a part that may be empty")
    return Repeat(node, low, high)


def _may_be_empty(node: Node) -> bool:
    if isinstance(node, Bytes):
        return False
    if isinstance(node, Choice):
        return any(map(_may_be_empty, node.options))
    if isinstance(node, Repeat):
        return node.low == 0 or _may_be_empty(node.node)
    return all(map(_may_be_empty, getattr(node, "parts", ())))
