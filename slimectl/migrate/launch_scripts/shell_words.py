"""Words of the shell's language: quotes, parameters, arithmetic, substitutions, and the position in a file."""

from __future__ import annotations

import re
import stat
from abc import ABC, abstractmethod
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeAlias

from slimectl.errors import SettingsError

MAX_BYTES = 4 << 20
METACHARACTERS = " \t\n;&|<>()"
NAME = re.compile(r"[A-Za-z_]\w*")
OPERATOR = re.compile(r":[-=+?]|[-=+?]|##|#|%%|%|//|/#|/%|/|\^\^|\^|,,|,|:|@")
MAX_NESTING = 60
"""Maximum depth of substitutions and compound commands. Real scripts stay below it."""


@dataclass(frozen=True)
class Place:
    """A line of a file: `run.sh:12`."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def read_text(path: Path, name: str) -> str:
    """Read a script or a configuration. Raises SettingsError if it is not a text file of a usual size."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise SettingsError(f"{name}: is not a regular file. Give a launch script or a configuration")
        if status.st_size > MAX_BYTES:
            raise SettingsError(f"{name}: has {status.st_size >> 20} MiB, but a launch script has a few kB. Give that")
        content = path.read_bytes()
    except OSError as error:
        raise SettingsError(f"{name}: {error.strerror}") from None
    if b"\0" in content:
        line = content[: content.index(b"\0")].count(b"\n") + 1
        raise SettingsError(f"{name}:{line}: has a NUL byte, so it is not a text. Give a launch script")
    try:
        return content.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise SettingsError(f"{name}:{line}: is not UTF-8. Convert it by `iconv -t UTF-8`") from None


@dataclass(frozen=True)
class Literal:
    """Literal text. Unquoted text may be split into several words."""

    text: str
    quoted: bool


@dataclass(frozen=True)
class Parameter:
    """`$NAME`, `${NAME[INDEX]}`, `${#NAME}`, `${!NAME}` or `${NAME OPERATOR ARGUMENT}`."""

    name: str
    quoted: bool
    index: Word | None = None
    prefix: str = ""
    operator: str = ""
    argument: Word | None = None


@dataclass(frozen=True)
class Arithmetic:
    """`$((EXPRESSION))`. The expression is a word, in which parameters are replaced first."""

    expression: Word
    quoted: bool


@dataclass(frozen=True)
class Substitution:
    """`$(COMMANDS)`: the output of commands. Only some built-in commands have an output here."""

    source: str
    body: tuple[Any, ...]
    """The commands, as shell_syntax.py parses them."""
    quoted: bool


Part: TypeAlias = Literal | Parameter | Arithmetic | Substitution


@dataclass(frozen=True)
class Word:
    """Adjacent parts of one word, and the line of the first."""

    parts: tuple[Part, ...]
    place: Place

    @property
    def bare(self) -> str | None:
        """The text of a word that is one unquoted literal, such as a reserved word."""
        match self.parts:
            case (Literal(text, quoted=False),):
                return text
        return None


class Reader(ABC):
    """A position in the text of a script, and the words from there on."""

    def __init__(self, text: str, file: str, *, first_line: int = 1, depth: int = 0) -> None:
        self.text, self.file, self.position, self.depth = text, file, 0, depth
        self._first_line = first_line
        self.documents: list[tuple[Any, str, bool, bool]] = []
        """Here-documents that the current line has opened: command, delimiter, whether quoted, whether tabs go."""
        self._line_starts = [0, *(match.end() for match in re.finditer("\n", text))]

    @abstractmethod
    def commands(self, *ends: str) -> tuple[Any, ...]:
        """Parse commands up to `)`, `;;` or a reserved word of `ends`."""

    def inside(self, text: str, first_line: int) -> Self:
        """A reader for a text inside this one, which starts at a given line."""
        return type(self)(text, self.file, first_line=first_line, depth=self.depth)

    def expanded(self, text: str, place: Place) -> Word:
        """A text as a word in which only expansions are replaced, such as a here-document."""
        return Word(tuple(self.inside(text, place.line).quoted_text("")), place)

    @property
    def place(self) -> Place:
        return Place(self.file, bisect_right(self._line_starts, self.position) + self._first_line - 1)

    def error(self, message: str) -> SettingsError:
        return SettingsError(f"{self.place}: {message}")

    def at(self, text: str) -> bool:
        return self.text.startswith(text, self.position)

    def take(self, text: str) -> bool:
        """Advance past `text`, if it is next."""
        if self.at(text):
            self.position += len(text)
            return True
        return False

    def match(self, pattern: re.Pattern[str]) -> str | None:
        """Advance past a match of the pattern at this position, and return its text."""
        match = pattern.match(self.text, self.position)
        if match is None:
            return None
        self.position = match.end()
        return match.group()

    @property
    def is_at_end(self) -> bool:
        return self.position >= len(self.text)

    def word(self, stop: str = METACHARACTERS) -> Word | None:
        """Read one word up to an unquoted character of `stop`. Return None if there is none here."""
        place, parts, start = self.place, [], self.position
        while not self.is_at_end and self.text[self.position] not in stop:
            if self.take("\\\n"):
                continue
            parts += self._part(stop)
        return Word(tuple(parts), place) if self.position > start and (parts or stop != METACHARACTERS) else None

    def _part(self, stop: str) -> list[Part]:
        character = self.text[self.position]
        if character == "\\":
            self.position += 2
            return [Literal(self.text[self.position - 1 : self.position], quoted=True)]
        if character == "'":
            return [Literal(self._until("'", self.position + 1), quoted=True)]
        if self.at("$'"):
            return [self._ansi_string()]
        if character == '"' or self.at('$"'):
            self.position += 2 if character == "$" else 1
            return self.quoted_text('"')
        if character in "$`":
            return [self._expansion(quoted=False)]
        plain = re.compile(rf"[^{re.escape(stop)}\\'\"$`]+")
        return [Literal(self.match(plain) or self._advance(), quoted=False)]

    def _advance(self) -> str:
        self.position += 1
        return self.text[self.position - 1]

    def _until(self, end: str, start: int) -> str:
        """Return the text from `start` up to `end`, and advance past it."""
        stop = self.text.find(end, start)
        if stop < 0:
            raise self.error(f"this {end} is never closed. Close it")
        self.position = stop + len(end)
        return self.text[start:stop]

    def _ansi_string(self) -> Literal:
        """Read `$'…'` with its escapes."""
        match = re.compile(r"\$'((?:[^'\\]|\\.)*)'", re.DOTALL).match(self.text, self.position)
        if match is None:
            raise self.error("this $' is never closed. Close it")
        self.position = match.end()
        escapes = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"'}
        text = re.sub(r"\\(.)", lambda escape: escapes.get(escape[1], escape[0]), match[1], flags=re.DOTALL)
        return Literal(text, quoted=True)

    def quoted_text(self, end: str) -> list[Part]:
        """Read the inside of double quotes, or with an empty `end` a here-document to the end of the text."""
        start, text = self.place, ""
        collected: list[Part] = [Literal("", quoted=True)]
        while not (end and self.at(end)):
            if self.is_at_end:
                if not end:
                    break
                raise SettingsError(f"{start}: this {end} is never closed. Close it")
            if self.take("\\\n"):
                continue
            character = self.text[self.position]
            if character == "\\" and self.text[self.position + 1 : self.position + 2] in (*'$`"\\',):
                text += self.text[self.position + 1]
                self.position += 2
            elif character in "$`":
                collected += [Literal(text, quoted=True), self._expansion(quoted=True)]
                text = ""
            else:
                text += self.match(re.compile(r'[^\\$`"]+')) or self._advance()
        self.position += len(end)
        return [*collected, Literal(text, quoted=True)]

    def _expansion(self, *, quoted: bool) -> Part:
        """Read `$…` or backquotes."""
        if self.depth > MAX_NESTING:
            raise self.error(f"more than {MAX_NESTING} expansions inside one another. Write it flat")
        self.depth += 1
        try:
            if self.take("`"):
                return self._backquoted(quoted=quoted)
            if self.take("$(("):
                return Arithmetic(self.expanded(self.arithmetic_text(), self.place), quoted)
            if self.take("$("):
                return self.substitution(quoted=quoted)
            if self.take("${"):
                return self._braced_parameter(quoted=quoted)
            self.position += 1
            name = self.match(NAME) or self.match(re.compile(r"[0-9@*#?$!-]"))
            return Parameter(name, quoted) if name else Literal("$", quoted)
        finally:
            self.depth -= 1

    def arithmetic_text(self) -> str:
        """Read up to the `))` that closes an expression."""
        start, open_parentheses = self.position, 0
        while not self.is_at_end:
            if not open_parentheses and self.at("))"):
                self.position += 2
                return self.text[start : self.position - 2]
            open_parentheses += {"(": 1, ")": -1}.get(self._advance(), 0)
        self.position = start
        raise self.error("this $(( is never closed. Close it")

    def substitution(self, *, quoted: bool) -> Substitution:
        start = self.position
        body = self.commands()
        source = self.text[start : self.position]
        if not self.take(")"):
            self.position = start
            raise self.error("this $( is never closed. Close it")
        return Substitution(f"$({source})", body, quoted)

    def _backquoted(self, *, quoted: bool) -> Substitution:
        line = self.place.line
        match = re.compile(r"((?:[^`\\]|\\.)*)`", re.DOTALL).match(self.text, self.position)
        if match is None:
            raise self.error("this ` is never closed. Close it")
        self.position = match.end()
        source = re.sub(r"\\([`\\$])", r"\1", match[1])
        return Substitution(f"$({source})", self.inside(source, line).commands(), quoted)

    def _braced_parameter(self, *, quoted: bool) -> Parameter:
        """Read behind `${`."""
        start = self.position
        prefix = self.match(re.compile(r"[#!](?=[A-Za-z_@*0-9])")) or ""
        name = self.match(NAME) or self.match(re.compile(r"[0-9]+|[@*#?$!-]"))
        if name is None:
            raise self.error("this ${ has no variable. Write ${NAME}")
        index = None
        if self.take("["):
            index = self.word("]")
            self._expect("]", start)
        operator = self.match(OPERATOR) or ""
        argument = None
        if not self.at("}"):
            argument = self._quoted_argument() if quoted else self.word("}")
        self._expect("}", start)
        return Parameter(name, quoted, index, prefix, operator, argument)

    def _quoted_argument(self) -> Word:
        """Read the argument of an operator inside double quotes, where a single quote is text."""
        place, parts = self.place, []
        while not self.is_at_end and not self.at("}"):
            if self.take('"'):
                parts += self.quoted_text('"')
            elif self.text[self.position] in "$`":
                parts.append(self._expansion(quoted=True))
            elif self.take("\\"):
                parts.append(Literal(self._advance() if not self.is_at_end else "", quoted=True))
            else:
                parts.append(Literal(self.match(re.compile(r'[^}\\$`"]+')) or "", quoted=False))
        return Word(tuple(parts), place)

    def _expect(self, text: str, start: int) -> None:
        if not self.take(text):
            self.position = min(start, len(self.text))
            raise self.error(f"this ${{ is not understood: it has no {text}. Write ${{NAME}} or ${{NAME:-default}}")
