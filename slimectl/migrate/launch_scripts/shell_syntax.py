"""Parses shell scripts: commands, assignments, conditions, loops, functions and here-documents."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from slimectl.errors import SettingsError
from slimectl.migrate.launch_scripts.shell_words import MAX_NESTING, NAME, Literal, Place, Reader, Word

REDIRECTION = re.compile(r"(?:\d+|\{\w+\})?(<<<|<<-|<<|<>|<&|>&|>>|>\||<(?!\()|>(?!\())|&>>|&>")
PLACEHOLDER = re.compile(r"<[A-Za-z][\w .-]*>(?=\s)")
"""`NAME=<your key>`, a placeholder for the reader of the script. The shell rejects it."""
DECLARATIONS = ("declare", "typeset", "local", "export", "readonly")
CLOSING = ("then", "elif", "else", "fi", "do", "done", "esac", "}")


@dataclass(frozen=True)
class Assignment:
    """`NAME=VALUE`, `NAME+=VALUE`, `NAME[INDEX]=VALUE` or `NAME=(ELEMENTS)`."""

    name: str
    value: Word | tuple[tuple[Word | None, Word], ...] | None
    """A word, or the elements of an array, each with its index or None. None if a declaration has no value."""
    place: Place
    index: Word | None = None
    appends: bool = False


@dataclass
class Simple:
    """A command with its words. Assignments come before it, or are its arguments (`export A=b`).

    `[[ … ]]` is the command `[[`, and `(( … ))` the command `let`.
    """

    place: Place
    assignments: list[Assignment] = field(default_factory=list)
    argv: list[Word] = field(default_factory=list)
    stdin: list[Word] = field(default_factory=list)
    """Here-documents and here-strings."""


@dataclass(frozen=True)
class Pipeline:
    commands: tuple[Statement, ...]
    negated: bool


@dataclass(frozen=True)
class AndOr:
    """Commands joined by `&&` and `||`. The first has no operator."""

    members: tuple[tuple[str, Statement], ...]


@dataclass(frozen=True)
class If:
    """`elif` is an `if` in `otherwise`."""

    place: Place
    condition: tuple[Statement, ...]
    body: tuple[Statement, ...]
    otherwise: tuple[Statement, ...]


@dataclass(frozen=True)
class Loop:
    """`while`, `until` (`negated`), or `for ((start; condition; step))` after its start."""

    place: Place
    condition: tuple[Statement, ...]
    body: tuple[Statement, ...]
    negated: bool = False
    step: tuple[Statement, ...] = ()


@dataclass(frozen=True)
class For:
    place: Place
    name: str
    elements: tuple[Word, ...] | None
    """None means the script's arguments."""
    body: tuple[Statement, ...]


@dataclass(frozen=True)
class Case:
    place: Place
    subject: Word
    clauses: tuple[tuple[tuple[Word, ...], tuple[Statement, ...]], ...]


@dataclass(frozen=True)
class Function:
    name: str
    body: tuple[Statement, ...]


@dataclass(frozen=True)
class CommandGroup:
    """`{ …; }`, or `( … )`, which has its own variables."""

    body: tuple[Statement, ...]
    subshell: bool


Statement: TypeAlias = Simple | Pipeline | AndOr | If | Loop | For | Case | Function | CommandGroup


def parse(text: str, file: str) -> tuple[Statement, ...]:
    """Parse a script. Raises SettingsError with the line of any unsupported syntax."""
    parser = Parser(text, file)
    program = parser.commands()
    if not parser.is_at_end:
        raise parser.error(f"{text[parser.position]} opens nothing here. Take it out")
    return program


class Parser(Reader):
    """Commands from a position in the text of a script on."""

    def commands(self, *ends: str) -> tuple[Statement, ...]:
        """Parse commands up to `)`, `;;` or a reserved word of `ends`, which are left to the caller."""
        self.depth += 1
        if self.depth > MAX_NESTING:
            raise self.error(f"more than {MAX_NESTING} commands inside one another. Write it flat")
        body: list[Statement] = []
        while True:
            self._skip_separators()
            if self.is_at_end or self.at(";;") or self.at(")") or self._reserved(*ends):
                break
            start = self.position
            body.append(self._and_or())
            if self.position == start:
                raise self.error(f"{self.text[start : start + 20]!r} is not understood. Simplify this line")
        if self.is_at_end:
            self._read_documents()
        self.depth -= 1
        return tuple(body)

    def _skip_blanks(self) -> None:
        self.match(re.compile(r"(?:[ \t\r]|\\\r?\n)*(?:#[^\n]*)?"))

    def _skip_lines(self) -> None:
        self._skip_blanks()
        while self.take("\n"):
            self._read_documents()
            self._skip_blanks()

    def _skip_separators(self) -> None:
        """Advance over newlines, semicolons, `&` and comments."""
        self._skip_lines()
        while self.match(re.compile(r";(?!;)|&(?![>&])")):
            self._skip_lines()

    def _read_documents(self) -> None:
        """Read the here-documents that the previous line has opened."""
        for command, delimiter, is_quoted, strips_tabs in self.documents:
            place, lines = self.place, []
            while True:
                if self.is_at_end:
                    raise self.error(f"the here-document has no {delimiter}. Write it on a line of its own")
                line = self.match(re.compile(r"[^\n]*\n?")) or ""
                line = line.lstrip("\t") if strips_tabs else line
                if line.rstrip("\n") == delimiter:
                    break
                lines.append(line)
            text = "".join(lines)
            if command is not None:
                command.stdin.append(
                    Word((Literal(text, quoted=True),), place) if is_quoted else self.expanded(text, place)
                )
        self.documents.clear()

    def _reserved(self, *words: str) -> str | None:
        """The reserved word of `words` that is next, if any. The position does not change."""
        for word in words:
            following = self.text[self.position + len(word) :][:1]
            if self.at(word) and (not following or following in " \t\r\n;&|<>()" or word == "{"):
                return word
        return None

    def _take_reserved(self, *words: str) -> str | None:
        word = self._reserved(*words)
        self.position += len(word or "")
        return word

    def _and_or(self) -> Statement:
        members = [("", self._pipeline())]
        while True:
            self._skip_blanks()
            operator = self.match(re.compile(r"&&|\|\|"))
            if operator is None:
                return members[0][1] if len(members) == 1 else AndOr(tuple(members))
            self._skip_lines()
            members.append((operator, self._pipeline()))

    def _pipeline(self) -> Statement:
        negated = False
        self._skip_blanks()
        while (word := self._take_reserved("!", "time")) is not None:
            negated ^= word == "!"
            self._skip_blanks()
        commands = [self._command()]
        self._skip_blanks()
        while self.match(re.compile(r"\|(?!\|)&?")):
            self._skip_lines()
            commands.append(self._command())
            self._skip_blanks()
        return commands[0] if len(commands) == 1 and not negated else Pipeline(tuple(commands), negated)

    def _command(self) -> Statement:
        place = self.place
        if (word := self._reserved("select", "coproc")) is not None:
            raise self.error(f"{word} is not read. Take it out of the script")
        if (word := self._reserved(*CLOSING)) is not None:
            raise self.error(f"{word} closes nothing here. Take it out")
        compounds = {
            "if": self._if, "for": self._for, "while": self._loop, "until": self._loop, "case": self._case,
            "function": self._function, "[[": self._test,
        }  # fmt: skip
        statement: Statement
        if (word := self._take_reserved(*compounds)) is not None:
            statement = compounds[word](place, word)
        elif self._reserved("{"):
            statement = CommandGroup(self._block(), subshell=False)
        elif self.take("(("):
            statement = self._let(self.arithmetic_text(), place)
        elif self.take("("):
            statement = CommandGroup(self.commands(), subshell=True)
            self._close(")", "( of a subshell", place)
        else:
            return self._simple(place)
        while self._redirection(None):
            pass
        return statement

    def _block(self) -> tuple[Statement, ...]:
        place = self.place
        self.take("{")
        return self._body(place, "block", "}")[0]

    def _close(self, text: str, opening: str, place: Place) -> None:
        if not self.take(text):
            raise SettingsError(f"{place}: this {opening} has no {text}. Close it")

    def _body(self, place: Place, opening: str, *ends: str) -> tuple[tuple[Statement, ...], str]:
        """Parse the body of a compound command up to one of `ends`, and return that end too."""
        body = self.commands(*ends)
        end = self._reserved(*ends) or ends[-1]
        self._close(end, opening, place)
        return body, end

    def _if(self, place: Place, _: str) -> If:
        condition, _ = self._body(place, "if", "then")
        body, end = self._body(place, "if", "elif", "else", "fi")
        if end == "elif":
            return If(place, condition, body, (self._if(place, end),))
        return If(place, condition, body, self._body(place, "if", "fi")[0] if end == "else" else ())

    def _loop(self, place: Place, keyword: str) -> Loop:
        condition, _ = self._body(place, keyword, "do")
        body, _ = self._body(place, keyword, "done")
        return Loop(place, condition, body, negated=keyword == "until")

    def _let(self, expression: str, place: Place) -> Simple:
        return Simple(place, argv=[Word((Literal("let", quoted=False),), place), self.expanded(expression, place)])

    def _for(self, place: Place, _: str) -> For | CommandGroup:
        self._skip_blanks()
        if self.take("(("):
            parts = self.arithmetic_text().split(";")
            if len(parts) != 3:
                raise self.error("this for does not have three parts. Write for ((i=0; i<n; i++))")
            start, condition, step = ((self._let(part, place),) if part.strip() else () for part in parts)
            self._skip_separators()
            return CommandGroup((*start, Loop(place, condition, self._do(place), step=step)), subshell=False)
        name = self.match(NAME)
        if name is None:
            raise self.error("this for has no variable. Write for NAME in …")
        self._skip_lines()
        elements = tuple(self._words_of_line()) if self._take_reserved("in") else None
        self._skip_separators()
        return For(place, name, elements, self._do(place))

    def _do(self, place: Place) -> tuple[Statement, ...]:
        self._close("do", "for", place)
        return self._body(place, "for", "done")[0]

    def _words_of_line(self) -> Iterator[Word]:
        self._skip_blanks()
        while (word := self.word()) is not None:
            yield word
            self._skip_blanks()

    def _case(self, place: Place, _: str) -> Case:
        self._skip_blanks()
        subject = self.word()
        self._skip_lines()
        if subject is None or not self.take("in"):
            raise self.error("this case is not understood. Write case WORD in … esac")
        clauses: list[tuple[tuple[Word, ...], tuple[Statement, ...]]] = []
        while True:
            self._skip_separators()
            if self._take_reserved("esac"):
                return Case(place, subject, tuple(clauses))
            self.take("(")
            patterns = [*self._words_of_line()]
            while self.take("|"):
                patterns += self._words_of_line()
            if not patterns:
                raise self.error("this case has no pattern here. Write PATTERN) … ;;")
            self._close(")", "case", place)
            clauses.append((tuple(patterns), self.commands("esac")))
            self.match(re.compile(r";;&|;;|;&"))

    def _function(self, place: Place, _: str) -> Function:
        self._skip_blanks()
        name = self.match(re.compile(r"[^\s(){};|&<>]+"))
        self._skip_blanks()
        self.match(re.compile(r"\(\s*\)"))
        return self._function_body(name or "")

    def _function_body(self, name: str) -> Function:
        self._skip_lines()
        if self.at("{") or self.at("("):
            return Function(name, (self._command(),))
        raise self.error(f"the function {name} has no body in braces. Write {name}() {{ …; }}")

    def _test(self, place: Place, keyword: str) -> Simple:
        argv = [Word((Literal(keyword, quoted=False),), place)]
        while True:
            self._skip_lines()
            if self._take_reserved("]]"):
                return Simple(place, argv=argv)
            here = self.place
            pattern = r"(?:(?! \]\]| && | \|\| )[^\n])+" if argv[-1].bare == "=~" else r"&&|\|\||[()<>]"
            if (text := self.match(re.compile(pattern))) is not None:
                argv.append(Word((Literal(text, quoted=False),), here))
            elif (word := self.word()) is not None:
                argv.append(word)
            else:
                raise self.error("this [[ is not understood. Close it by ]]")

    def _simple(self, place: Place) -> Statement:
        command = Simple(place)
        while True:
            self._skip_blanks()
            if self._redirection(command):
                continue
            declares = bool(command.argv) and command.argv[0].bare in DECLARATIONS
            if (declares or not command.argv) and (assignment := self._assignment(declares=declares)) is not None:
                command.assignments.append(assignment)
                continue
            word = self._process_substitution() or self.word()
            if word is None:
                return command
            command.argv.append(word)
            if len(command.argv) == 1 and word.bare and self.match(re.compile(r"[ \t]*\([ \t]*\)")):
                return self._function_body(word.bare)

    def _process_substitution(self) -> Word | None:
        """Read `<(…)` as a command substitution, because its file is unknown in either case."""
        place = self.place
        return Word((self.substitution(quoted=True),), place) if self.match(re.compile(r"[<>]\(")) else None

    def _assignment(self, *, declares: bool) -> Assignment | None:
        start, place, name, index = self.position, self.place, self.match(NAME), None
        if name and self.take("["):
            index = self.word("]\n")
            if not self.take("]"):
                self.position = start
                return None
        operator = self.match(re.compile(r"\+?=")) if name else None
        if name is None or operator is None:
            if declares and name and (self.is_at_end or self.text[self.position] in " \t\r\n;&|)"):
                return Assignment(name, None, place, index)
            self.position = start
            return None
        value: Word | tuple[tuple[Word | None, Word], ...]
        if self.take("("):
            value = tuple(self._elements(place))
        elif (placeholder := self.match(PLACEHOLDER)) is not None:
            value = Word((Literal(placeholder, quoted=True),), place)
        else:
            value = self.word() or Word((), place)
        return Assignment(name, value, place, index, operator == "+=")

    def _elements(self, place: Place) -> Iterator[tuple[Word | None, Word]]:
        """Read the elements of an array up to its parenthesis. Comments may be between them."""
        while True:
            self._skip_lines()
            if self.take(")"):
                return
            index = None
            if self.match(re.compile(r"\[(?=[^\]\n]*\]=)")):
                index = self.word("]")
                self.take("]=")
            word = self.word()
            if word is None:
                problem = "has no )" if self.is_at_end else "is not understood"
                raise self.error(f"the array that opens in line {place.line} {problem}. Fix it here")
            yield index, word

    def _redirection(self, command: Simple | None) -> bool:
        """Read one redirection, if there is one here. Here-documents and here-strings become the command's stdin."""
        self._skip_blanks()
        operator = self.match(REDIRECTION)
        if operator is None:
            return False
        self._skip_blanks()
        target = self.word() or self._process_substitution()
        if target is None:
            raise self.error("this redirection has no target. Give a file, or replace a <PLACEHOLDER> by its value")
        if operator.endswith("<<<"):
            if command is not None:
                command.stdin.append(target)
        elif operator.endswith(("<<", "<<-")):
            delimiter = "".join(part.text for part in target.parts if isinstance(part, Literal))
            is_quoted = any(part.quoted for part in target.parts)
            self.documents.append((command, delimiter, is_quoted, operator.endswith("-")))
        return True
