"""Conditions of the shell: `[ … ]`, `test` and `[[ … ]]`, where they follow from the script alone."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

from slimectl.settings.launch_scripts.shell_values import Field, is_costly, pattern

NUMERIC: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le, "-gt": operator.gt,
    "-ge": operator.ge,
}  # fmt: skip
TEXTUAL: dict[str, Callable[[str, str], bool]] = {
    "=": operator.eq, "==": operator.eq, "!=": operator.ne, "<": operator.lt, ">": operator.gt,
}  # fmt: skip


class Condition:
    """Evaluates the words of a condition; None is an answer that depends on the machine."""

    def __init__(self, tokens: Sequence[Field | str], is_set: Callable[[str], bool], *, globs: bool) -> None:
        self._tokens, self._is_set, self._globs, self._next = tokens, is_set, globs, 0

    def result(self) -> bool | None:
        return self._either() if self._tokens else False

    def _text(self, ahead: int = 0) -> str | None:
        """The text of the word or sign at a distance; None past the end."""
        position = self._next + ahead
        if position >= len(self._tokens):
            return None
        token = self._tokens[position]
        return token if isinstance(token, str) else token.text

    def _take(self, *texts: str) -> bool:
        if self._text() in texts:
            self._next += 1
            return True
        return False

    def _either(self) -> bool | None:
        return self._chain(("||", "-o"), self._both, decisive=True)

    def _both(self) -> bool | None:
        return self._chain(("&&", "-a"), self._one, decisive=False)

    def _chain(self, signs: tuple[str, ...], part: Callable[[], bool | None], *, decisive: bool) -> bool | None:
        """Evaluate parts between signs; one part with the decisive value decides."""
        value = part()
        while self._take(*signs):
            both = (value, part())
            value = decisive if decisive in both else None if None in both else not decisive
        return value

    def _one(self) -> bool | None:
        if self._text() == "!" and self._text(1) is not None:
            self._next += 1
            value = self._one()
            return None if value is None else not value
        if self._text() == "(" and self._text(1) is not None:
            self._next += 1
            value = self._either()
            self._take(")")
            return value
        sign = self._text(1)
        if sign in NUMERIC or sign in TEXTUAL or sign == "=~":
            return self._comparison(sign)
        first = self._text() or ""
        if first.startswith("-") and len(first) == 2 and sign is not None and sign not in ("&&", "||"):
            return self._unary(first)
        word = self._tokens[self._next] if self._next < len(self._tokens) else ""
        self._next += 1
        return None if isinstance(word, Field) and word.unknown else bool(first)

    def _unary(self, sign: str) -> bool | None:
        word = self._tokens[self._next + 1]
        self._next += 2
        if sign == "-v" and isinstance(word, Field):
            return self._is_set(word.text)
        if sign not in ("-z", "-n") or (isinstance(word, Field) and word.unknown):
            return None  # a question about a file or a terminal
        text = word if isinstance(word, str) else word.text
        return bool(text) == (sign == "-n")

    def _comparison(self, sign: str) -> bool | None:
        first_word, second_word = self._tokens[self._next], self._tokens[min(self._next + 2, len(self._tokens) - 1)]
        self._next += 3
        if sign == "=~" or any(isinstance(word, Field) and word.unknown for word in (first_word, second_word)):
            return None
        texts = [word if isinstance(word, str) else word.text for word in (first_word, second_word)]
        if sign in NUMERIC:
            try:
                return NUMERIC[sign](int(texts[0]), int(texts[1]))
            except ValueError:
                return None
        if self._globs and sign in ("=", "==", "!="):
            if is_costly(*texts):
                return None
            return (pattern(texts[1]).fullmatch(texts[0]) is not None) != (sign == "!=")
        return TEXTUAL[sign](*texts)
