"""Variables of a script, and words after expansion: parameters, arrays, arithmetic."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from slimectl.errors import SettingsError
from slimectl.migrate.launch_scripts import shell_syntax as syntax
from slimectl.migrate.launch_scripts.shell_values import (
    Field,
    ShellExpression,
    Value,
    checked,
    elements,
    is_costly,
    joined,
    replaced,
    trimmed,
)
from slimectl.migrate.launch_scripts.shell_words import Arithmetic, Literal, Parameter, Place, Substitution, Word
from slimectl.system.redaction import is_secret_name

MAX_STEPS = 30_000
"""Maximum number of words and commands that are followed. A script that needs more does not end."""
SECRET = re.compile(r"(?:WANDB|SWANLAB|API|HF|AUTH|ACCESS)_?(?:KEY|TOKEN)$")
"""Names of variables that hold a secret, in addition to the ones in redaction.py."""


@dataclass(frozen=True)
class Note:
    """A part of the script that is not followed here."""

    place: Place
    text: str


class Variables(ABC):
    """The variables of a script, and the expansion of its words."""

    def __init__(self, path: Path, environ: Mapping[str, str]) -> None:
        self.notes: list[Note] = []
        self._environ = environ
        self._variables: dict[str, Value] = {}
        self._associative: set[str] = set()
        self._arguments: list[Field] | None = None
        self._files = [path]
        self._scripts = [path]
        """The subset of the files that are started and not sourced."""
        self._folder = Path.cwd()
        self._steps = 0
        self._unknowns: list[Field] = []

    @abstractmethod
    def _captured(self, substitution: Substitution, place: Place) -> Field:
        """The output of a command substitution."""

    def _count(self, place: Place | None) -> None:
        self._steps += 1
        if self._steps > MAX_STEPS:
            position = place or Place(str(self._files[-1]), 1)
            raise SettingsError(f"{position}: the script runs for more than {MAX_STEPS} steps. Take out the loop")

    def _is_set(self, name: str) -> bool:
        return name in self._variables or name in self._environ

    def _assign(self, assignment: syntax.Assignment) -> None:
        name, value = assignment.name, assignment.value
        if value is None:
            return
        old = self._variables.get(name)
        if isinstance(value, Word):
            field = self._field(value)
            if assignment.index is not None:
                array = dict(old) if isinstance(old, dict) else {}
                array[self._index(name, assignment.index)] = field
                self._variables[name] = array
            elif assignment.appends and isinstance(old, dict):
                self._variables[name] = old | {"0": joined([old.get("0", field), field], assignment.place)}
            else:
                before = elements(old) if assignment.appends else []
                self._variables[name] = joined([*before, field], assignment.place)
            return
        array = {str(number): field for number, field in enumerate(elements(old))} if assignment.appends else {}
        following = len(array)
        for index, word in value:
            if index is not None:
                key = self._index(name, index)
                array[key] = self._field(word)
                following = int(key) + 1 if key.isdigit() else following
                continue
            for field in self._fields(word):
                self._count(field.place)
                array[str(following)] = field
                following += 1
        self._variables[name] = array

    def _index(self, name: str, word: Word) -> str:
        """An index of an array: a number, or the text itself for an associative one."""
        text = self._field(word).text
        if name in self._associative:
            return text
        try:
            return str(self._evaluate(text, word.place))
        except ValueError:
            return text

    def _evaluate(self, text: str, place: Place) -> int:
        return ShellExpression(text, self._number, lambda name, value: self._store(name, value, place)).result()

    def _store(self, name: str, value: int, place: Place) -> None:
        self._variables[name] = Field(str(value), place)

    def _number(self, name: str) -> int:
        field = joined(elements(self._value(name))[:1], Place("", 0))
        if field.unknown:
            raise ValueError(f"has {name}, of which {field.unknown}")
        text = field.text.strip()
        if not text:
            return 0
        try:
            return int(text)
        except ValueError:
            raise ValueError(f"has {name}, which is {short(text)!r} and no integer") from None

    def _calculated(self, expression: Field) -> Field:
        """The value of an arithmetic expression."""
        text, place, problem = expression.text, expression.place, expression.unknown
        try:
            if not problem:
                return Field(str(self._evaluate(text, place)), place)
        except ValueError as error:
            problem = f"$(({short(text)})) {error}"
        return Field(f"$(({text}))", place, problem)

    def _value(self, name: str) -> Value | None:
        """The value of a variable of the script, or else of the environment."""
        if name in self._variables:
            return self._variables[name]
        place = Place("environment", 0)
        if name in ("BASH_SOURCE", "0"):
            path = self._files[-1] if name == "BASH_SOURCE" else self._scripts[-1]
            return Field(os.path.abspath(path), place)
        if name == "PWD":
            return Field(str(self._folder), place)
        if is_secret_variable(name):
            return Field(f"env:{name}", place)  # a reference: the secret itself is never copied into settings
        return Field(self._environ[name], place) if name in self._environ else None

    def _positional(self) -> list[Field]:
        return self._arguments or []

    def _field(self, word: Word) -> Field:
        """Expand a word where the shell does not split it."""
        self._count(word.place)
        return self._resolved(
            joined([field for part in word.parts for field in self._joined_part(part, word.place)], word.place)
        )

    def _mark(self, field: Field) -> Field:
        """A placeholder with a known text for an unknown field, until it is replaced in a word."""
        self._unknowns.append(field)
        return Field(f"\ue000{len(self._unknowns) - 1}\ue001", field.place)

    def _marked(self, word: Word) -> Field:
        """Expand a word whose text is read again, with placeholders for its unknown parts."""
        fields = [field for part in word.parts for field in self._joined_part(part, word.place)]
        return joined([self._mark(field) if field.problem and field.text else field for field in fields], word.place)

    def _resolved(self, field: Field) -> Field:
        """The field with its placeholders replaced."""
        if "\ue000" not in field.text:
            return field
        pieces = re.split("\ue000(\\d{1,6})\ue001", field.text)
        members = [
            self._unknowns[int(piece)] if number % 2 and int(piece) < len(self._unknowns) else Field(piece, field.place)
            for number, piece in enumerate(pieces)
        ]
        return replace(joined(members, field.place), unset=field.unset or joined(members, field.place).unset)

    def _glob(self, word: Word) -> str:
        """Expand a pattern. Quoted characters in it are literal."""
        texts = []
        for part in word.parts:
            text = joined(self._joined_part(part, word.place), word.place).text
            texts.append("".join(f"\\{character}" for character in text) if part.quoted else text)
        return "".join(texts)

    def _joined_part(self, part: object, place: Place) -> list[Field]:
        fields = self._part(part, place)
        return [joined(fields, place, " ")] if len(fields) != 1 else fields

    def _fields(self, word: Word) -> list[Field]:
        """Expand a word into the fields that the shell makes of it."""
        self._count(word.place)
        return [self._resolved(field) for field in self._divided_word(word)]

    def _divided_word(self, word: Word) -> list[Field]:
        """Expand a word. Placeholders in it are kept."""
        if all(isinstance(part, Literal) for part in word.parts):
            texts = [part.text for part in word.parts if isinstance(part, Literal)]
            return [Field(checked("".join(texts), word.place), word.place)]
        fields: list[Field] = []
        open_field: list[Field] = []
        is_open = False
        has_list = any(isinstance(part, Parameter) and _is_list(part) for part in word.parts)
        for part in word.parts:
            if has_list and part == Literal("", quoted=True):
                continue  # the quotes of "$@", which expands to nothing if it is empty
            members = self._part(part, word.place)
            if not getattr(part, "quoted", False):
                members = [piece for member in members for piece in _divided(member)]
            elif not isinstance(part, Parameter) or not _is_list(part):
                members = members or [Field("", word.place)]
            for number, member in enumerate(members):
                if number and is_open:
                    fields.append(joined(open_field, self._first_place(open_field, word.place)))
                    open_field = []
                open_field.append(member)
                is_open = True
        if is_open:
            fields.append(joined(open_field, self._first_place(open_field, word.place)))
        return fields

    @staticmethod
    def _first_place(fields: Sequence[Field], place: Place) -> Place:
        """The line of a field. If the word is an element of an array, it is the line of that element."""
        texts = [field for field in fields if field.text or field.unknown]
        source_place = texts[0].place if len(texts) == 1 else place
        return source_place if source_place.line else place

    def _part(self, part: object, place: Place) -> list[Field]:
        match part:
            case Literal(text):
                return [Field(text, place)]
            case Parameter():
                return self._parameter(part, place)
            case Arithmetic(expression):
                return [self._calculated(self._field(expression))]
            case Substitution():
                return [self._captured(part, place)]
        raise AssertionError(part)

    def _parameter(self, parameter: Parameter, place: Place) -> list[Field]:
        fields, is_set = self._selected(parameter, place)
        if parameter.prefix == "#":
            full = joined(fields, place)
            count = len(fields) if _is_list(parameter) else len(full.text)
            return [Field(str(count), place, full.unknown)]
        if parameter.operator:
            return self._operated(parameter, fields, is_set, place)
        if not is_set and not _is_list(parameter):
            return [Field("", place, unset=parameter.name)]
        if parameter.quoted and "*" in (parameter.name, parameter.index and parameter.index.bare):
            separator = joined(elements(self._variables.get("IFS", Field(" ", place))), place).text[:1]
            return [joined(fields, place, separator)]
        return fields

    def _selected(self, parameter: Parameter, place: Place) -> tuple[list[Field], bool]:
        """The fields of a parameter, and whether it is set."""
        name = parameter.name
        if name in "@*":
            return self._positional(), bool(self._arguments)
        if name == "#" and self._arguments is None:
            return [Field("0", place, "it is the number of the script's arguments")], True
        if name == "#":
            return [Field(str(len(self._positional())), place)], True
        if name.isdigit() and name != "0":
            fields = self._positional()[int(name) - 1 : int(name)]
            return fields, bool(fields)
        if name in "?$!-":
            return [Field({"?": "0"}.get(name, "1"), place)], True
        value = self._value(name)
        if parameter.prefix == "!":
            return self._indirect(parameter, value)
        if parameter.index is None:
            if isinstance(value, dict):
                value = value.get("0")
            return elements(value), value is not None
        if _is_list(parameter):
            if value is None and not parameter.operator:
                self.notes.append(Note(place, f"${{{name}[@]}}: nothing sets it, so it adds no flags"))
            return elements(value), bool(elements(value))
        selected = elements(value)[:1] if isinstance(value, Field) else []
        if isinstance(value, dict):
            index = self._index(name, parameter.index)
            if index.startswith("-") and index[1:].isdigit():
                index = (list(value) or [index])[max(-len(value), int(index))]
            missing = [field for field in value.values() if field.unknown][:1]  # this one may be several elements
            selected = [value[index]] if index in value else missing
        return selected, bool(selected)

    def _indirect(self, parameter: Parameter, value: Value | None) -> tuple[list[Field], bool]:
        """`${!NAME}` is the variable whose name is in NAME. `${!NAME[@]}` are the indices of an array."""
        if parameter.index is not None and isinstance(value, dict):
            return [Field(key, next(iter(value.values())).place) for key in value], True
        target = joined(elements(value), Place("", 0))
        referenced = self._value(target.text) if target.text else None
        return elements(referenced), referenced is not None

    def _operated(self, parameter: Parameter, fields: list[Field], is_set: bool, place: Place) -> list[Field]:
        operator, argument = parameter.operator, parameter.argument or Word((), place)
        text = joined(fields, place, " ")
        if operator in (":-", "-", ":=", "=", ":?", "?", ":+", "+"):
            is_filled = is_set and (":" not in operator or bool(text.text) or bool(text.unknown))
            if operator[-1] == "+":
                return self._alternative(parameter, argument) if is_filled else []
            if is_filled:
                return fields
            if operator[-1] == "?":
                return [Field("", place, unset=parameter.name)]
            default = self._alternative(parameter, argument)
            if operator[-1] == "=":
                self._variables[parameter.name] = joined(default, place, " ")
            return default
        if not is_set and not _is_list(parameter):
            return [Field("", place, unset=parameter.name)]
        return [self._transformed(field, operator, argument) for field in fields]

    def _alternative(self, parameter: Parameter, argument: Word) -> list[Field]:
        is_one = parameter.quoted and not _is_list(parameter)
        return [self._field(argument)] if is_one else self._fields(argument)

    def _transformed(self, field: Field, operator: str, argument: Word) -> Field:
        """Apply an operator to the text of one field."""
        if field.unknown:
            return field
        if operator[0] in "#%/" and is_costly(field.text, self._glob(argument)):
            return replace(field, unknown=f"its pattern {short(self._glob(argument))} has too many *")
        if operator in ("#", "##", "%", "%%"):
            return field.with_text(trimmed(field.text, operator, self._glob(argument)))
        if operator[0] == "/":
            glob, *new = re.split(r"(?<!\\)/", self._glob(argument), maxsplit=1)
            return field.with_text(replaced(field.text, operator, glob, re.sub(r"\\(.)", r"\1", "".join(new))))
        if operator in ("^^", ",,", "^", ","):
            change = str.upper if operator[0] == "^" else str.lower
            single = len(operator) == 1
            return field.with_text(change(field.text[:1]) + field.text[1:] if single else change(field.text))
        if operator == ":":
            offset, _, length = self._field(argument).text.partition(":")
            try:
                start = self._evaluate(offset, field.place)
                start = max(0, len(field.text) + start) if start < 0 else start
                count = self._evaluate(length, field.place) if length else len(field.text)
            except ValueError as error:
                return replace(field, unknown=f"a part of {short(field.text)!r} {error}")
            return field.with_text(field.text[start : start + count] if count >= 0 else field.text[start:count])
        return replace(field, unknown=f"the operator {operator} is not read")


def is_secret_variable(name: str) -> bool:
    """Whether an environment variable holds a secret, by its name."""
    return bool(SECRET.search(name)) or (is_secret_name(name) and name.isidentifier())


def _is_list(parameter: Parameter) -> bool:
    """Whether a parameter means all elements of an array, or all arguments."""
    if parameter.index is not None:
        return parameter.index.bare in ("@", "*")
    return parameter.name in ("@", "*")


def _divided(field: Field) -> Iterator[Field]:
    """Split an unquoted expansion at its blanks. Unknown parts are not split."""
    if field.unknown or field.unset:
        yield field
        return
    for text in field.text.split():
        yield field.with_text(text)


def short(text: str) -> str:
    """The first words of a text, on one line."""
    line = " ".join(text.split())
    return line if len(line) <= 60 else f"{line[:57]}…"
