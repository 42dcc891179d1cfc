"""Parses shell scripts: commands, assignments, conditions, loops, functions and here-documents."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TypeAlias

from slimectl.errors import SettingsError
from slimectl.settings.launch_scripts.shell_words import MAX_NESTING, Literal, Place, Reader, Word

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[)?")
REDIRECTION = re.compile(r"(?:\d+|\{\w+\})?(<<<|<<-|<<|<>|<&|>&|>>|>\||<(?!\()|>(?!\())|&>>|&>")
PLACEHOLDER = re.compile(r"<[A-Za-z][\w .-]*>(?=\s)")
"""`NAME=<your key>`, which the reader of the script is to replace; the shell refuses it."""
DECLARATIONS = ("declare", "typeset", "local", "export", "readonly")
RESERVED = ("if", "for", "while", "until", "case", "function", "select", "coproc", "{", "[[", "!", "time")
CLOSING = ("then", "elif", "else", "fi", "do", "done", "esac", "}")


@dataclass(frozen=True)
class Assignment:
    """`NAME=VALUE`, `NAME+=VALUE`, `NAME[INDEX]=VALUE` or `NAME=(ELEMENTS)`."""

    name: str
    value: Word | tuple[tuple[Word | None, Word], ...] | None
    """A word; the elements of an array, each with its index or None; None where a declaration gives no value."""
    place: Place
    index: Word | None = None
    appends: bool = False


@dataclass
class Simple:
    """A command with its words; assignments stand before it, or are its arguments (`export A=b`)."""

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
    """Commands joined by `&&` and `||`; the first has no operator."""

    members: tuple[tuple[str, Statement], ...]


@dataclass(frozen=True)
class If:
    place: Place
    clauses: tuple[tuple[tuple[Statement, ...], tuple[Statement, ...]], ...]
    otherwise: tuple[Statement, ...]


@dataclass(frozen=True)
class Loop:
    """`while` or `until`, or `for ((start; condition; step))` with `arithmetic`."""

    place: Place
    condition: tuple[Statement, ...]
    body: tuple[Statement, ...]
    negated: bool = False
    arithmetic: tuple[Word, Word, Word] | None = None


@dataclass(frozen=True)
class For:
    place: Place
    name: str
    elements: tuple[Word, ...] | None
    """None stands for the script's arguments."""
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
class Group:
    """`{ …; }`, or `( … )`, which has variables of its own."""

    body: tuple[Statement, ...]
    subshell: bool


@dataclass(frozen=True)
class Test:
    """`[[ … ]]`: words, and operators as text."""

    place: Place
    tokens: tuple[Word | str, ...]


@dataclass(frozen=True)
class ArithmeticCommand:
    """`(( … ))`."""

    expression: Word


Statement: TypeAlias = Simple | Pipeline | AndOr | If | Loop | For | Case | Function | Group | Test | ArithmeticCommand


def parse(text: str, file: str) -> tuple[Statement, ...]:
    """Parse a script. Raises SettingsError with the line of what is not understood."""
    reader = Reader(text, file, lambda reader, until: statements(reader, until=until))
    program = statements(reader, until="")
    if not reader.is_at_end:
        raise reader.error(f"{reader.text[reader.position]} opens nothing here; take it out")
    return program


def statements(reader: Reader, *, until: str, keywords: tuple[str, ...] = ()) -> tuple[Statement, ...]:
    """Parse commands up to the text `until` or a reserved word of `words`, which are left to the caller."""
    reader.depth += 1
    if reader.depth > MAX_NESTING:
        raise reader.error(f"more than {MAX_NESTING} commands inside one another; write it flat")
    parser = _Parser(reader)
    body: list[Statement] = []
    while True:
        parser.skip_separators()
        if reader.is_at_end or (until and reader.at(until)) or parser.reserved(*keywords):
            break
        if reader.at(";;") or reader.at(")"):
            break
        start = reader.position
        body.append(parser.and_or())
        if reader.position == start:
            raise reader.error(f"{reader.text[start : start + 20]!r} is not understood; simplify this line")
    if reader.is_at_end and reader.documents:
        parser.read_documents()
    reader.depth -= 1
    return tuple(body)


class _Parser:
    """Commands from a reader's position on."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader

    def skip_blanks(self) -> None:
        self.reader.match(re.compile(r"(?:[ \t\r]|\\\r?\n)+"))
        if self.reader.at("#"):
            self.reader.match(re.compile(r"[^\n]*"))

    def skip_separators(self) -> None:
        """Advance over newlines, semicolons, `&` and comments."""
        while True:
            self.skip_blanks()
            if self.reader.take("\n"):
                self.read_documents()
            elif not (self.reader.at(";") and not self.reader.at(";;") and self.reader.take(";")) and not (
                self.reader.at("&") and not self.reader.at("&>") and not self.reader.at("&&") and self.reader.take("&")
            ):
                return

    def read_documents(self) -> None:
        """Read the here-documents that the line before has opened."""
        reader = self.reader
        for command, delimiter, is_quoted, strips_tabs in reader.documents:
            first_line, lines = reader.place.line, []
            while True:
                if reader.is_at_end:
                    raise reader.error(f"the here-document has no {delimiter}; write it on a line of its own")
                line = reader.match(re.compile(r"[^\n]*\n?")) or ""
                text = line.lstrip("\t") if strips_tabs else line
                if text.rstrip("\n") == delimiter:
                    break
                lines.append(text)
            place, text = Place(reader.file, first_line), "".join(lines)
            inner = reader.inside(text, first_line)
            parts = (Literal(text, quoted=True),) if is_quoted else tuple(inner.quoted_text(""))
            if command is not None:
                command.stdin.append(Word(parts, place))
        reader.documents.clear()

    def reserved(self, *keywords: str) -> str | None:
        """The reserved word of `words` that is next, if any; the position stays."""
        for word in keywords:
            following = self.reader.text[self.reader.position + len(word) :][:1]
            if self.reader.at(word) and (not following or following in " \t\r\n;&|<>()" or word == "{"):
                return word
        return None

    def and_or(self) -> Statement:
        members = [("", self._pipeline())]
        while True:
            self.skip_blanks()
            operator = next((item for item in ("&&", "||") if self.reader.take(item)), None)
            if operator is None:
                return members[0][1] if len(members) == 1 else AndOr(tuple(members))
            self._skip_lines()
            members.append((operator, self._pipeline()))

    def _skip_lines(self) -> None:
        self.skip_blanks()
        while self.reader.take("\n"):
            self.read_documents()
            self.skip_blanks()

    def _pipeline(self) -> Statement:
        negated = False
        self.skip_blanks()
        while (word := self.reserved("!", "time")) is not None:
            self.reader.take(word)
            negated ^= word == "!"
            self.skip_blanks()
        commands = [self._command()]
        self.skip_blanks()
        while self.reader.at("|") and not self.reader.at("||"):
            self.reader.match(re.compile(r"\|&?"))
            self._skip_lines()
            commands.append(self._command())
            self.skip_blanks()
        return commands[0] if len(commands) == 1 and not negated else Pipeline(tuple(commands), negated)

    def _command(self) -> Statement:
        place, reader = self.reader.place, self.reader
        keyword = self.reserved(*RESERVED)
        if keyword in ("select", "coproc"):
            raise reader.error(f"{keyword} is not read; take it out of the script")
        if (stray := self.reserved(*CLOSING)) is not None:
            raise reader.error(f"{stray} closes nothing here; take it out")
        compounds = {
            "if": self._if, "for": self._for, "while": self._loop, "until": self._loop, "case": self._case,
            "function": self._function, "[[": self._test,
        }  # fmt: skip
        statement: Statement
        if keyword in compounds:
            reader.take(keyword)
            statement = compounds[keyword](place, keyword)
        elif keyword == "{":
            reader.take("{")
            statement = Group(self._block("}"), subshell=False)
        elif reader.take("(("):
            inner = reader.inside(reader.arithmetic_text(), place.line)
            statement = ArithmeticCommand(Word(tuple(inner.quoted_text("")), place))
        elif reader.take("("):
            statement = Group(statements(reader, until=")"), subshell=True)
            self._take(")", "( of a subshell", place)
        else:
            return self._simple(place)
        while self._redirection(None):
            pass
        return statement

    def _block(self, end: str) -> tuple[Statement, ...]:
        place = self.reader.place
        body = statements(self.reader, until="", keywords=(end,))
        self._take(end, "block", place)
        return body

    def _take(self, text: str, opening: str, place: Place) -> None:
        if not self.reader.take(text):
            raise SettingsError(f"{place}: this {opening} has no {text}; close it")

    def _part_of(self, place: Place, opening: str, *ends: str) -> tuple[tuple[Statement, ...], str]:
        """Parse the body of a compound command up to one of `ends`; return that too."""
        body = statements(self.reader, until="", keywords=ends)
        end = self.reserved(*ends)
        self._take(end or ends[-1], opening, place)
        return body, ends[-1] if end is None else end

    def _if(self, place: Place, _: str) -> If:
        clauses = []
        while True:
            condition, _ = self._part_of(place, "if", "then")
            body, end = self._part_of(place, "if", "elif", "else", "fi")
            clauses.append((condition, body))
            if end != "elif":
                break
        otherwise = self._part_of(place, "if", "fi")[0] if end == "else" else ()
        return If(place, tuple(clauses), otherwise)

    def _loop(self, place: Place, keyword: str) -> Loop:
        condition, _ = self._part_of(place, keyword, "do")
        body, _ = self._part_of(place, keyword, "done")
        return Loop(place, condition, body, negated=keyword == "until")

    def _for(self, place: Place, _: str) -> For | Loop:
        self.skip_blanks()
        if self.reader.take("(("):
            texts = self.reader.arithmetic_text().split(";")
            if len(texts) != 3:
                raise self.reader.error("this for has not three parts; write for ((i=0; i<n; i++))")
            parts = [Word(tuple(self.reader.inside(item, place.line).quoted_text("")), place) for item in texts]
            self.skip_separators()
            return Loop(place, (), self._do(place), arithmetic=(parts[0], parts[1], parts[2]))
        name = self.reader.match(re.compile(r"[A-Za-z_]\w*"))
        if name is None:
            raise self.reader.error("this for has no variable; write for NAME in …")
        self._skip_lines()
        elements = None
        if self.reserved("in"):
            self.reader.take("in")
            elements = tuple(self._words_of_line())
        self.skip_separators()
        return For(place, name, elements, self._do(place))

    def _do(self, place: Place) -> tuple[Statement, ...]:
        if self.reserved("{"):
            self.reader.take("{")
            return self._block("}")
        self._take("do", "for", place)
        return self._part_of(place, "for", "done")[0]

    def _words_of_line(self) -> list[Word]:
        line_words: list[Word] = []
        while True:
            self.skip_blanks()
            word = self.reader.word()
            if word is None:
                return line_words
            line_words.append(word)

    def _case(self, place: Place, _: str) -> Case:
        self.skip_blanks()
        subject = self.reader.word()
        self._skip_lines()
        if subject is None or not self.reader.take("in"):
            raise self.reader.error("this case is not understood; write case WORD in … esac")
        clauses: list[tuple[tuple[Word, ...], tuple[Statement, ...]]] = []
        while True:
            self.skip_separators()
            if self.reserved("esac"):
                self.reader.take("esac")
                return Case(place, subject, tuple(clauses))
            self.reader.take("(")
            patterns = []
            while True:
                self.skip_blanks()
                pattern = self.reader.word()
                if pattern is None:
                    raise self.reader.error("this case has no pattern here; write PATTERN) … ;;")
                patterns.append(pattern)
                self.skip_blanks()
                if not self.reader.take("|"):
                    break
            self._take(")", "case", place)
            clauses.append((tuple(patterns), statements(self.reader, until=";;", keywords=("esac",))))
            self.reader.match(re.compile(r";;&|;;|;&"))

    def _function(self, place: Place, _: str) -> Function:
        self.skip_blanks()
        name = self.reader.match(re.compile(r"[^\s(){};|&<>]+"))
        self.skip_blanks()
        self.reader.match(re.compile(r"\(\s*\)"))
        return self._function_body(place, name or "")

    def _function_body(self, place: Place, name: str) -> Function:
        self._skip_lines()
        if self.reader.at("{") or self.reader.at("("):
            return Function(name, (self._command(),))
        raise self.reader.error(f"the function {name} has no body in braces; write {name}() {{ …; }}")

    def _test(self, place: Place, _: str) -> Test:
        tokens: list[Word | str] = []
        while True:
            self._skip_lines()
            if self.reserved("]]"):
                self.reader.take("]]")
                return Test(place, tuple(tokens))
            operator = self.reader.match(re.compile(r"&&|\|\||[()<>]"))
            if operator is not None:
                tokens.append(operator)
                continue
            word = self.reader.word()
            if word is None:
                raise self.reader.error("this [[ is not understood; close it by ]]")
            tokens.append(word)
            if word.bare == "=~":
                self.skip_blanks()
                pattern = self.reader.match(re.compile(r"(?:(?! \]\]| && | \|\| )[^\n])+")) or ""
                tokens.append(Word((Literal(pattern, quoted=True),), self.reader.place))

    def _simple(self, place: Place) -> Statement:
        command = Simple(place)
        while True:
            self.skip_blanks()
            if self._redirection(command):
                continue
            declares = bool(command.argv) and command.argv[0].bare in DECLARATIONS
            assignment = self._assignment(declares=declares) if declares or not command.argv else None
            if assignment is not None:
                command.assignments.append(assignment)
                continue
            if self.reader.at("<(") or self.reader.at(">("):
                self.reader.position += 1
                command.argv.append(self._process_substitution())
                continue
            word = self.reader.word()
            if word is None:
                break
            command.argv.append(word)
            if len(command.argv) == 1 and word.bare and self.reader.match(re.compile(r"[ \t]*\([ \t]*\)")):
                return self._function_body(place, word.bare)
        return command

    def _process_substitution(self) -> Word:
        """Read `<(…)` as the command substitution that it is for this purpose: its file is not known."""
        place, reader = self.reader.place, self.reader
        reader.take("(")
        body = reader.substitution(quoted=True)
        return Word((body,), place)

    def _assignment(self, *, declares: bool) -> Assignment | None:
        reader, start = self.reader, self.reader.position
        place, name = reader.place, reader.match(re.compile(r"[A-Za-z_]\w*"))
        index = None
        if name and reader.take("["):
            index = reader.word("]\n")
            if not reader.take("]"):
                reader.position = start
                return None
        operator = name and reader.match(re.compile(r"\+?="))
        if not operator:
            ends = reader.is_at_end or reader.text[reader.position] in " \t\r\n;&|)"
            if declares and name and ends:
                return Assignment(name, None, place, index)
            reader.position = start
            return None
        appends = operator == "+="
        if reader.take("("):
            return Assignment(str(name), tuple(self._elements(place)), place, index, appends)
        if (placeholder := reader.match(PLACEHOLDER)) is not None:
            return Assignment(str(name), Word((Literal(placeholder, quoted=True),), place), place, index, appends)
        return Assignment(str(name), reader.word() or Word((), place), place, index, appends)

    def _elements(self, place: Place) -> list[tuple[Word | None, Word]]:
        """Read the elements of an array up to its parenthesis; comments may stand between them."""
        elements: list[tuple[Word | None, Word]] = []
        while True:
            self._skip_lines()
            if self.reader.take(")"):
                return elements
            index = None
            if re.compile(r"\[[^\]\n]*\]=").match(self.reader.text, self.reader.position):
                self.reader.take("[")
                index = self.reader.word("]")
                self.reader.match(re.compile(r"\]="))
            word = self.reader.word()
            if word is None:
                problem = "has no )" if self.reader.is_at_end else "is not understood"
                raise self.reader.error(f"the array that opens in line {place.line} {problem}; mend it here")
            elements.append((index, word))

    def _redirection(self, command: Simple | None) -> bool:
        """Read one redirection, if there is one here; here-documents and here-strings become the command's stdin."""
        self.skip_blanks()
        operator = self.reader.match(REDIRECTION)
        if operator is None:
            return False
        self.skip_blanks()
        target = self.reader.word()
        if target is None:
            if self.reader.at("<(") or self.reader.at(">("):
                self.reader.position += 1
                self._process_substitution()
                return True
            raise self.reader.error(
                "this redirection has no target; name a file, or replace a <PLACEHOLDER> by its value"
            )
        if operator.endswith("<<<"):
            if command is not None:
                command.stdin.append(target)
        elif operator.endswith(("<<", "<<-")):
            delimiter = "".join(part.text for part in target.parts if isinstance(part, Literal))
            is_quoted = any(part.quoted for part in target.parts)
            self.reader.documents.append((command, delimiter, is_quoted, operator.endswith("-")))
        return True
