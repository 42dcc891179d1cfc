"""Values of shell variables, known or not, the operators of `${NAME…}` on their text, arithmetic and conditions."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeAlias

from slimectl.errors import SettingsError
from slimectl.migrate.launch_scripts.shell_words import Place

MAX_TEXT = 1 << 20
"""Maximum number of characters of one value. A longer value is an attack, not a launch script."""


@dataclass(frozen=True)
class Field:
    """One word after expansion, with the line that it was written in.

    If it is unknown, `unknown` is the reason, and the text is the source and not the shell's result. `unset` lists
    variables in the word that are never set, which the shell replaces by nothing.
    """

    text: str
    place: Place
    unknown: str = ""
    unset: str = ""

    @property
    def problem(self) -> str:
        """Why the value cannot be used, or an empty string if it can."""
        return self.unknown or (f"{self.unset} is not set in the script or in the environment" if self.unset else "")

    def with_text(self, text: str) -> Field:
        return self if self.unknown else replace(self, text=checked(text, self.place))


class Leave(Exception):
    """`return`, `break`, `continue`, `raise` or the end of a program, in a shell script or a Python file."""

    def __init__(self, kind: str, value: Any = None) -> None:
        self.kind, self.value = kind, value


Array: TypeAlias = dict[str, Field]
"""The elements of an array by index, in order."""
Value: TypeAlias = Field | Array


def checked(text: str, place: Place) -> str:
    """The text. Raises SettingsError if it is too long for any launch script."""
    if len(text) > MAX_TEXT:
        raise SettingsError(f"{place}: a value of more than {MAX_TEXT} characters. Shorten it")
    return text


def joined(fields: Iterable[Field], place: Place, separator: str = "") -> Field:
    """Join the texts of several fields. The result is unknown if one of them is."""
    members = list(fields)
    return Field(
        checked(separator.join(field.text for field in members), place),
        place,
        next((field.unknown for field in members if field.unknown), ""),
        next((field.unset for field in members if field.unset), ""),
    )


def elements(value: Value | None) -> list[Field]:
    """The fields of a scalar or an array."""
    if value is None:
        return []
    return [value] if isinstance(value, Field) else list(value.values())


def merged(values: list[Value | None], reason: str, place: Place) -> Value | None:
    """A variable after branches, if it is unknown which one is taken. Values that differ become unknown."""
    first = values[0]
    if all(_texts(value) == _texts(first) for value in values):
        return first
    if not any(isinstance(value, dict) for value in values):
        texts = [value.text for value in values if isinstance(value, Field)]
        return Field(" or ".join(dict.fromkeys(texts)), place, reason)
    arrays = sorted((elements(value) for value in values), key=len)
    longest, agreeing = arrays[-1], 0
    while agreeing < len(arrays[0]) and len({array[agreeing].text for array in arrays}) == 1:
        agreeing += 1
    fields = [*longest[:agreeing], *(replace(field, unknown=field.unknown or reason) for field in longest[agreeing:])]
    return {str(number): field for number, field in enumerate(fields)}


def _texts(value: Value | None) -> object:
    if isinstance(value, dict):
        return [(key, field.text, field.unknown) for key, field in value.items()]
    return value and (value.text, value.unknown)


MAX_COST = 50_000_000


def is_costly(text: str, glob: str) -> bool:
    """Whether matching a pattern may take too long. Every `*` multiplies the work."""
    return bool((len(text) + 1) ** (glob.count("*") + 1) > MAX_COST)


@lru_cache(maxsize=1024)
def pattern(text: str) -> re.Pattern[str]:
    """A glob pattern of the shell as a regular expression."""
    parts: list[str] = []
    position = 0
    while position < len(text):
        character = text[position]
        bracket = re.compile(r"\[[!^]?\]?[^\]]*\]").match(text, position)
        if character == "*":
            if parts[-1:] != [".*"]:  # `**` means `*`, and repeated ones would be slow to match
                parts.append(".*")
        elif character == "?":
            parts.append(".")
        elif character == "[" and bracket:
            inside = bracket[0][1:-1].replace("\\", r"\\")
            parts.append(f"[{'^' + inside[1:] if inside[0] in '!^' else inside}]")
            position = bracket.end() - 1
        elif character == "\\" and position + 1 < len(text):
            position += 1
            parts.append(re.escape(text[position]))
        else:
            parts.append(re.escape(character))
        position += 1
    try:
        return re.compile("".join(parts), re.DOTALL)
    except re.error:
        return re.compile(re.escape(text))


def trimmed(text: str, operator: str, glob: str) -> str:
    """`${NAME#GLOB}` and its relatives: the text without a matching beginning or end.

    >>> trimmed("models/qwen3.sh", "##", "*/"), trimmed("qwen3.tar.gz", "%", ".*"), trimmed("qwen3.tar.gz", "%%", ".*")
    ('qwen3.sh', 'qwen3.tar', 'qwen3')
    """
    expression = pattern(glob)
    lengths = range(len(text) + 1) if len(operator) == 1 else range(len(text), -1, -1)
    for length in lengths:
        part = text[:length] if operator[0] == "#" else text[len(text) - length :]
        if expression.fullmatch(part):
            return text[length:] if operator[0] == "#" else text[: len(text) - length]
    return text


def replaced(text: str, operator: str, glob: str, new: str) -> str:
    """`${NAME/GLOB/NEW}` for the first match, `//` for all, `/#` and `/%` for one at the beginning or the end."""
    if not glob:
        return text
    expression = pattern(glob)
    if operator in ("/#", "/%"):
        anchored = re.compile(f"\\A(?:{expression.pattern})" if operator == "/#" else f"(?:{expression.pattern})\\Z")
        return anchored.sub(lambda _: new, text, count=1)
    return expression.sub(lambda _: new, text, count=0 if operator == "//" else 1)


TOKEN = re.compile(
    r"\s*(?:(0[xX][0-9a-fA-F]+|\d+#\w+|\d+)|([A-Za-z_]\w*)|"
    r"(\*\*|<<=|>>=|<<|>>|<=|>=|==|!=|&&|\|\||\+\+|--|[-+*/%&|^]=|[-+*/%<>=!~&|^?:(),]))"
)
PRECEDENCE = {
    "||": 1, "&&": 2, "|": 3, "^": 4, "&": 5, "==": 6, "!=": 6, "<": 7, ">": 7, "<=": 7, ">=": 7, "<<": 8, ">>": 8,
    "+": 9, "-": 9, "*": 10, "/": 10, "%": 10, "**": 12,
}  # fmt: skip
UNARY = 11
STEPS = {"++": 1, "--": -1}
NAME = re.compile(r"[A-Za-z_]")
MAX_TOKENS = 2_000


def _quotient(first: int, second: int) -> int:
    """Divide as C does: towards zero."""
    magnitude = abs(first) // abs(second)
    return magnitude if (first < 0) == (second < 0) else -magnitude


def _power(base: int, exponent: int) -> int:
    if exponent < 0:
        raise ValueError("has a negative exponent")
    return pow(base, exponent, 1 << 64)


OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": _quotient, "**": _power,
    "%": lambda first, second: first - second * _quotient(first, second),
    "<<": lambda first, second: first << (second & 63), ">>": lambda first, second: first >> (second & 63),
    "&": operator.and_, "|": operator.or_, "^": operator.xor,
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, ">": operator.gt, "<=": operator.le, ">=": operator.ge,
    "&&": lambda first, second: int(bool(first) and bool(second)),
    "||": lambda first, second: int(bool(first) or bool(second)),
}  # fmt: skip


def _wrapped(value: int) -> int:
    """The value as a signed 64-bit integer."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


class ShellExpression:
    """Evaluates one expression. The given functions read and write variables.

    Raises ValueError, with the end of a sentence about the expression, for unsupported syntax.
    """

    def __init__(self, text: str, read: Callable[[str], int], write: Callable[[str, int], None]) -> None:
        self._read, self._write = read, write
        self._tokens: list[str] = []
        position, text = 0, text.strip()
        while position < len(text):
            match = TOKEN.match(text, position)
            if match is None or len(self._tokens) > MAX_TOKENS:
                raise ValueError(f"is not understood at {text[position : position + 10]!r}")
            self._tokens.append(match[0].strip())
            position = match.end()
        self._next = 0

    def result(self) -> int:
        """The value of the expression, or 0 if it is empty."""
        if not self._tokens:
            return 0
        try:
            value = self._expression()
        except (ZeroDivisionError, RecursionError) as error:
            raise ValueError("divides by zero" if isinstance(error, ZeroDivisionError) else "is too deep") from None
        if self._next < len(self._tokens):
            raise ValueError(f"is not understood at {self._tokens[self._next]!r}")
        return value

    @property
    def _token(self) -> str:
        return self._tokens[self._next] if self._next < len(self._tokens) else ""

    def _advance(self) -> str:
        """Return the next token and advance past it."""
        token = self._token
        self._next += 1
        return token

    def _take(self, *tokens: str) -> str | None:
        return self._advance() if self._token in tokens else None

    def _expression(self) -> int:
        value = self._binary(1)
        if self._take("?"):
            positive = self._expression()
            if not self._take(":"):
                raise ValueError("has ? without :")
            negative = self._expression()
            return positive if value else negative
        return value

    def _binary(self, lowest: int) -> int:
        first = self._operand()
        while (precedence := PRECEDENCE.get(self._token, 0)) >= lowest:
            symbol = self._advance()
            second = self._binary(precedence if symbol == "**" else precedence + 1)
            first = _wrapped(OPERATORS[symbol](first, second))
        return first

    def _operand(self) -> int:
        if symbol := self._take("-", "+", "!", "~"):
            value = self._binary(UNARY)
            return {"-": _wrapped(-value), "+": value, "!": int(not value), "~": ~value}[symbol]
        if symbol := self._take("++", "--"):
            name = self._advance()
            if not NAME.match(name):
                raise ValueError(f"needs a variable in place of {name!r}")
            return self._assigned(name, self._read(name) + STEPS[symbol])
        if self._take("("):
            value = self._expression()
            if not self._take(")"):
                raise ValueError("has ( without )")
            return value
        token = self._advance()
        if token[:1].isdigit():
            return _number(token)
        if not NAME.match(token):
            raise ValueError(f"is not understood at {token!r}" if token else "ends too early")
        return self._variable(token)

    def _variable(self, name: str) -> int:
        """The value of a variable, or of an assignment to it."""
        if symbol := self._take("++", "--"):
            return self._assigned(name, self._read(name) + STEPS[symbol]) - STEPS[symbol]
        symbol = self._take("=", "+=", "-=", "*=", "/=", "%=", "<<=", ">>=", "&=", "|=", "^=")
        if symbol is None:
            return self._read(name)
        second = self._expression()
        return self._assigned(name, second if symbol == "=" else OPERATORS[symbol[:-1]](self._read(name), second))

    def _assigned(self, name: str, value: int) -> int:
        self._write(name, _wrapped(value))
        return _wrapped(value)


def _number(token: str) -> int:
    """Read a decimal, octal or hexadecimal number, or BASE#DIGITS."""
    base, hash_sign, digits = token.partition("#")
    if hash_sign:
        return _wrapped(int(digits, int(base)))
    if token.lower().startswith("0x"):
        return _wrapped(int(token, 16))
    return _wrapped(int(token, 8 if len(token) > 1 and token.startswith("0") else 10))


NUMERIC: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le, "-gt": operator.gt,
    "-ge": operator.ge,
}  # fmt: skip
TEXTUAL: dict[str, Callable[[str, str], bool]] = {
    "=": operator.eq, "==": operator.eq, "!=": operator.ne, "<": operator.lt, ">": operator.gt,
}  # fmt: skip


class Condition:
    """Evaluates the words of a condition. None means that the result depends on the machine."""

    def __init__(self, words: Sequence[Field], is_set: Callable[[str], bool], *, globs: bool) -> None:
        self._words, self._is_set, self._globs, self._next = words, is_set, globs, 0

    def result(self) -> bool | None:
        return self._either() if self._words else False

    def _word(self, ahead: int = 0) -> Field:
        """The word at a distance, or an empty one past the end."""
        position = self._next + ahead
        return self._words[position] if position < len(self._words) else Field("", Place("", 0))

    def _take(self, *texts: str) -> bool:
        if self._word().text in texts:
            self._next += 1
            return True
        return False

    def _either(self) -> bool | None:
        return self._chain(("||", "-o"), self._both, decisive=True)

    def _both(self) -> bool | None:
        return self._chain(("&&", "-a"), self._one, decisive=False)

    def _chain(self, signs: tuple[str, ...], part: Callable[[], bool | None], *, decisive: bool) -> bool | None:
        """Evaluate parts between operators. One part with the decisive value decides."""
        value = part()
        while self._take(*signs):
            both = (value, part())
            value = decisive if decisive in both else None if None in both else not decisive
        return value

    def _one(self) -> bool | None:
        first, count = self._word(), len(self._words) - self._next
        sign = self._word(1).text
        if count > 1 and self._take("!"):
            value = self._one()
            return None if value is None else not value
        if count > 1 and self._take("("):
            value = self._either()
            self._take(")")
            return value
        if count > 1 and (sign in NUMERIC or sign in TEXTUAL or sign == "=~"):
            self._next += 3
            return self._comparison(first, sign, self._word(-1))
        if count > 1 and re.fullmatch("-.", first.text) and sign not in ("&&", "||"):
            self._next += 2
            return self._unary(first.text, self._word(-1))
        self._next += 1
        return None if first.unknown else bool(first.text)

    def _unary(self, sign: str, word: Field) -> bool | None:
        if sign == "-v":
            return self._is_set(word.text)
        if sign not in ("-z", "-n") or word.unknown:
            return None  # a question about a file or a terminal
        return bool(word.text) == (sign == "-n")

    def _comparison(self, first: Field, sign: str, second: Field) -> bool | None:
        if sign == "=~" or first.unknown or second.unknown:
            return None
        if sign in NUMERIC:
            try:
                return NUMERIC[sign](int(first.text), int(second.text))
            except ValueError:
                return None
        if self._globs and sign in ("=", "==", "!="):
            if is_costly(first.text, second.text):
                return None
            return (pattern(second.text).fullmatch(first.text) is not None) != (sign == "!=")
        return TEXTUAL[sign](first.text, second.text)
