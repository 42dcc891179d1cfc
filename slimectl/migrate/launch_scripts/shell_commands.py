"""Commands of a script that is followed. Built-in commands take effect. All others are recorded and not started."""

from __future__ import annotations

import os
import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from slimectl.errors import SettingsError
from slimectl.migrate.launch_scripts import shell_syntax as syntax
from slimectl.migrate.launch_scripts.shell_programs import (
    ENDS_IN_BLANK,
    NOT_EXECUTED,
    RUNNERS,
    SILENT,
    formatted,
    inner_script,
    interruption,
    output,
    script_file,
)
from slimectl.migrate.launch_scripts.shell_values import Condition, Field, Leave, Value, joined
from slimectl.migrate.launch_scripts.shell_variables import Note, Variables, short
from slimectl.migrate.launch_scripts.shell_words import Place, Substitution, Word, read_text

MAX_CALLS = 40


@dataclass(frozen=True)
class Command:
    """An external command as the script would start it."""

    fields: tuple[Field, ...]
    place: Place
    condition: str = ""
    """Why it is unknown whether the script reaches it, or an empty string if it does."""


class Commands(Variables):
    """The commands that a script would start, and the effect of built-in ones."""

    def __init__(self, path: Path, root: Path, environ: Mapping[str, str], *, depth: int = 0) -> None:
        super().__init__(path, environ)
        self.commands: list[Command] = []
        self._root = root.resolve()
        self._functions: dict[str, tuple[syntax.Statement, ...]] = {}
        self._outputs: list[list[Field]] = []
        self._condition = ""
        self._calls = depth
        self._names = {path.resolve(): str(path)}
        self._texts: dict[Path, str] = {}
        self.unread: list[Note] = []
        """Scripts that are started and not read, because they are not in the folder."""

    def _parsed(self, path: Path, name: str) -> tuple[syntax.Statement, ...]:
        """Parse a file, and keep its text."""
        self._texts[path.resolve()] = text = read_text(path, name)
        return syntax.parse(text, name)

    @abstractmethod
    def _run_all(self, statements: Sequence[syntax.Statement]) -> bool | None:
        """Follow statements. Return whether the last one succeeds, or None if that depends on the machine."""

    def _subshell(self, body: Sequence[syntax.Statement]) -> bool | None:
        variables, folder = self._snapshot(), self._folder
        try:
            return self._run_all(body)
        except Leave as leave:
            if leave.kind in ("break", "continue"):
                raise
            return True
        finally:
            self._variables, self._folder = variables, folder

    def _snapshot(self) -> dict[str, Value]:
        return {name: dict(value) if isinstance(value, dict) else value for name, value in self._variables.items()}

    def _captured(self, substitution: Substitution, place: Place) -> Field:
        """The output of a command substitution, which is unknown unless it only uses built-in commands."""
        self._outputs.append([])
        commands = len(self.commands)
        try:
            self._subshell(substitution.body)
        except Leave:
            pass
        finally:
            outputs = self._outputs.pop()
            others = [command for command in self.commands[commands:] if command.place.file != place.file]
            self.commands[commands:] = others  # of a script that is submitted, as in JOB=$(sbatch FILE)
        field = joined(outputs, place)
        if field.unknown == NOT_EXECUTED:
            reason = f"{short(substitution.source)} is a command, and nothing of the script is executed"
            return Field(substitution.source, place, reason)
        return field.with_text(field.text.rstrip("\n"))

    def _simple(self, command: syntax.Simple) -> bool | None:
        is_test = bool(command.argv) and command.argv[0].bare == "[["  # its words are not split
        fields = [field for word in command.argv for field in ([self._field(word)] if is_test else self._fields(word))]
        name = fields[0].text if fields else ""
        if not fields or name in syntax.DECLARATIONS:
            if any(field.text.startswith("-") and "A" in field.text for field in fields[1:]):
                self._associative |= {assignment.name for assignment in command.assignments}
            for assignment in command.assignments:
                self._assign(assignment)
            return True
        if name.startswith("--") and self.commands and not self._outputs:
            self._note_cut(fields, command.place)
            return None
        if fields[0].unknown:
            self._output(Field("", command.place, fields[0].unknown))
            self.commands.append(Command(tuple(fields), command.place, self._condition))
            return None
        if name in self._functions:
            return self._call(name, fields)
        return self._start(name, fields, command)

    def _start(self, name: str, fields: list[Field], command: syntax.Simple) -> bool | None:
        """Follow a built-in command or another script, or record an external command."""
        builtin: Callable[[list[Field], syntax.Simple], bool | None] | None = {
            "source": self._source, ".": self._source, "cd": self._change_folder, "unset": self._unset,
            "shift": self._shift, "set": self._set, "printf": self._printf, "let": self._let, "read": self._read,
            "mapfile": self._read, "readarray": self._read, "eval": self._eval, "test": self._test,
            "[": self._test, "[[": self._test, "exec": self._exec, "command": self._exec, "builtin": self._exec,
        }.get(name)  # fmt: skip
        if builtin is not None:
            return builtin(fields, command)
        if name == "exit" and self._is_guard(fields):
            line = "is skipped, because a condition before it holds here: set the variable that it asks for"
            self.notes.append(Note(command.place, f"exit {fields[1].text}: {line}"))
            return None
        if name in ("break", "continue", "return", "exit"):
            raise Leave(name)
        if name in ("false", "true"):
            return name == "true"
        if self._outputs:
            self._output(self._result(name, fields, command))
        if name in (*SILENT, "cat"):
            return True
        return self._external(fields, command)

    def _external(self, fields: list[Field], command: syntax.Simple) -> bool | None:
        """Follow the script that an external command starts, and record every other command."""
        if (script := inner_script(fields)) is not None:
            return self._follow_inner(self._with_marks(command, script))
        if fields[0].text in RUNNERS and command.stdin:
            return self._follow_inner(self._marked(command.stdin[-1]))
        if (position := script_file(fields)) is not None:
            if (path := self._readable(fields[position])) is not None:
                return self._follow_file(path, fields[position:], command.place)
            text = f"{fields[position].text}: is not read, as no such file lies in {self._root}"
            self.unread.append(Note(command.place, f"{text}. Give that script, or allow a folder by --root"))
        self.commands.append(Command(tuple(fields), command.place, self._condition))
        return None

    def _note_cut(self, fields: Sequence[Field], place: Place) -> None:
        """Report flags in the place of a command, which happens if the line above ends their command."""
        line = self._line(place.line - 1)
        if ENDS_IN_BLANK.search(line):
            last = self.commands[-1]
            self.commands[-1] = replace(last, fields=tuple(field for field in last.fields if field.text.strip(" \t")))
        count = sum(field.text.startswith("--") for field in fields)
        flags, are = ("1 flag", "is") if count == 1 else (f"{count} flags", "are")
        text = f"{flags} after line {place.line - 1} {are} not part of the command: {interruption(line)}"
        self.notes.append(Note(place, f"{text}. The first is {fields[0].text}"))

    def _line(self, number: int) -> str:
        """A line of the file that is followed, or an empty string if there is none."""
        lines = self._texts.get(self._files[-1].resolve(), "").split("\n")
        return lines[number - 1] if 0 < number <= len(lines) else ""

    def _is_guard(self, fields: list[Field]) -> bool:
        """Whether a script exits because something is missing, so that its training command comes later."""
        return len(fields) > 1 and fields[1].text not in ("0", "") and not self._condition and not self._outputs

    def _with_marks(self, command: syntax.Simple, script: Field) -> Field:
        """The text of an inner script with placeholders for unknown parts, so that the rest can be read."""
        matches = [word for word in command.argv if self._field(word) == script]
        return self._marked(matches[-1]) if script.unknown and matches else script

    def _readable(self, field: Field) -> Path | None:
        """The file that a word means, if it is in the folder that may be read and is not already being read."""
        paths = [] if field.problem else [path for path in self._candidates(field.text) if path.is_file()]
        path = next((path for path in paths if path.resolve().is_relative_to(self._root)), None)
        return None if path is None or path.resolve() in [item.resolve() for item in self._files] else path

    def _follow_file(self, path: Path, fields: Sequence[Field], place: Place) -> bool | None:
        """Follow `bash FILE ARGUMENTS` in a separate shell."""
        arguments, self._arguments = self._arguments, list(fields[1:])
        self._scripts.append(path)
        try:
            return self._read_file(path, place, subshell=True)
        finally:
            self._scripts.pop()
            self._arguments = arguments

    def _follow_inner(self, script: Field) -> bool | None:
        """Follow the text of `bash -c TEXT`, with lines counted from the command's own."""
        if script.unknown:
            self.notes.append(Note(script.place, f"bash -c {short(script.text)}: is not read, as {script.unknown}"))
            return None
        if self._calls >= MAX_CALLS:
            raise SettingsError(f"{script.place}: bash -c more than {MAX_CALLS} deep. Write the command itself")
        self._calls += 1
        try:
            lines = "\n" * (script.place.line - 1) + script.text
            return self._subshell(syntax.parse(lines, script.place.file))
        except SettingsError as error:
            self.notes.append(Note(script.place, f"bash -c {short(script.text)}: is not read: {error}"))
            return None
        finally:
            self._calls -= 1

    def _output(self, field: Field) -> None:
        if self._outputs:
            self._outputs[-1].append(field)

    def _result(self, name: str, fields: list[Field], command: syntax.Simple) -> Field:
        """The output of a command, if it depends only on its words and its stdin."""
        place, argv = command.place, fields[1:]
        if name == "pwd":
            return Field(str(self._folder), place)
        if name in ("realpath", "readlink") and argv:
            return argv[-1].with_text(os.path.normpath(self._folder / argv[-1].text))
        return output(name, argv, self._field(command.stdin[-1]) if command.stdin else None, place)

    def _call(self, name: str, fields: list[Field]) -> bool | None:
        if self._calls >= MAX_CALLS:
            raise SettingsError(f"{fields[0].place}: {name} calls itself more than {MAX_CALLS} times. Write a loop")
        arguments, self._arguments = self._arguments, fields[1:]
        self._calls += 1
        try:
            return self._returned(self._functions[name])
        finally:
            self._arguments = arguments
            self._calls -= 1

    def _returned(self, statements: Sequence[syntax.Statement], *, subshell: bool = False) -> bool | None:
        """Follow the statements of a function or a file, up to a `return`."""
        try:
            return self._subshell(statements) if subshell else self._run_all(statements)
        except Leave as leave:
            if leave.kind != "return":
                raise
            return True

    def _source(self, fields: list[Field], command: syntax.Simple) -> bool | None:
        if len(fields) < 2:
            return True
        field, place = fields[1], command.place
        paths = self._candidates(field.text)
        path = next((path for path in paths if path.is_file()), paths[0])
        reason = field.problem
        if not reason and not path.resolve().is_relative_to(self._root):
            reason = f"it lies outside {self._root}. Allow a folder by --root DIR"
        if reason or not path.is_file():
            line = f"source {field.text}: is not read, as {reason or 'there is no such file'}"
            self.notes.append(Note(place, line))
            return None
        if path.resolve() in [item.resolve() for item in self._files]:
            raise SettingsError(f"{place}: source {field.text}: the file reads itself. Take that line out")
        arguments = self._arguments
        self._arguments = fields[2:] or arguments
        try:
            return self._read_file(path, place, subshell=False)
        finally:
            self._arguments = arguments

    def _read_file(self, path: Path, place: Place, *, subshell: bool) -> bool | None:
        """Follow the commands of another file."""
        name = os.path.relpath(path, self._files[0].parent)
        shown = str(self._files[0].parent / name) if not name.startswith("..") else str(path)
        self._names[path.resolve()] = shown
        if len(self._files) > MAX_CALLS:
            raise SettingsError(f"{place}: files that read files, more than {MAX_CALLS} deep. Give the last of them")
        self._files.append(path)
        try:
            return self._returned(self._parsed(path, shown), subshell=subshell)
        finally:
            self._files.pop()

    def _candidates(self, name: str) -> list[Path]:
        """Paths that a file name may mean: relative to the script's current folder, or else to the script itself."""
        paths = [self._folder / name, self._files[-1].parent / name]
        parts = Path(os.path.normpath(name)).parts
        folders = [folder for folder in self._files[0].resolve().parents if folder.is_relative_to(self._root)]
        tails = [Path(*parts[start:]) for start in range(len(parts) - 1) if ".." not in parts[start:]]
        return paths + [folder / tail for tail in tails if not tail.is_absolute() for folder in folders]

    def _name(self, path: Path) -> str:
        return self._names.get(path.resolve(), str(path))

    def _change_folder(self, fields: list[Field], _: syntax.Simple) -> bool | None:
        names = [field for field in fields[1:] if field.text not in ("--", "-P", "-L")]
        if not names or names[0].problem:
            return None
        self._folder = Path(os.path.normpath(self._folder / names[0].text))
        return True

    def _unset(self, fields: list[Field], _: syntax.Simple) -> bool:
        for field in fields[1:]:
            self._variables.pop(field.text, None)
        return True

    def _shift(self, fields: list[Field], _: syntax.Simple) -> bool:
        count = int(fields[1].text) if len(fields) > 1 and fields[1].text.isdigit() else 1
        arguments = self._positional()
        self._arguments = arguments[min(count, len(arguments)) :]
        return True

    def _set(self, fields: list[Field], _: syntax.Simple) -> bool:
        texts = [field.text for field in fields]
        if "--" in texts:
            self._arguments = fields[texts.index("--") + 1 :]
        return True

    def _printf(self, fields: list[Field], command: syntax.Simple) -> bool:
        argv = fields[1:]
        name = None
        if len(argv) > 1 and argv[0].text == "-v":
            name, argv = argv[1].text, argv[2:]
        argv = [word for word in argv if word.text != "--"]
        text = formatted([self._mark(word) if number and word.unknown else word for number, word in enumerate(argv)],
                          command.place)  # fmt: skip
        if name is None:
            self._output(text)
        else:
            self._variables[name] = text
        return True

    def _let(self, fields: list[Field], command: syntax.Simple) -> bool | None:
        value = Field("0", command.place)
        for field in fields[1:]:
            value = self._calculated(field)
        return None if value.unknown else value.text != "0"

    def _read(self, fields: list[Field], command: syntax.Simple) -> None:
        """Set the variables of `read` or `mapfile` to the parts of a text."""
        texts, place, is_line = [field.text for field in fields[1:]], command.place, fields[0].text == "read"
        names = [text for before, text in zip(["", *texts], texts, strict=False) if before != "-d" and text[:1] != "-"]
        if is_line and "-d" in texts and len(names) == 1 and command.stdin:
            document = self._marked(command.stdin[-1])  # `read -r -d '' NAME <<EOF` reads all of the document
            self._variables[names[0]] = document.with_text(document.text.strip())
            return
        text = self._field(command.stdin[-1]) if command.stdin else None
        if text is None or text.problem or not names:
            self._variables |= dict.fromkeys(names, Field("", place, f"it is read from a file ({place})"))
            return
        parts = text.text.removesuffix("\n").split("\n")
        separators = next((self._field(item.value).text for item in command.assignments
                           if item.name == "IFS" and isinstance(item.value, Word)), " \t\n")  # fmt: skip
        if is_line and separators:
            divide = str.split if separators.isspace() else re.compile(f"[{re.escape(separators)}]").split
            parts = divide(parts[0])
        elif is_line:
            parts = parts[:1]
        for _ in parts:
            self._count(place)
        if not is_line or any(re.fullmatch(r"-[a-z]*a", option) for option in texts):
            self._variables[names[-1]] = {str(number): text.with_text(part) for number, part in enumerate(parts)}
            return
        tail = (separators[:1] or " ").join(parts[len(names) - 1 :])
        parts = [*parts[: len(names) - 1], *[""] * len(names)][: len(names) - 1]
        self._variables |= {name: text.with_text(part) for name, part in zip(names, [*parts, tail], strict=True)}

    def _eval(self, fields: list[Field], command: syntax.Simple) -> bool | None:
        if not any(field.problem for field in fields) and self._calls < MAX_CALLS:
            self._calls += 1
            try:
                lines = "\n" * (command.place.line - 1) + " ".join(field.text for field in fields[1:])
                return self._run_all(syntax.parse(lines, command.place.file))
            finally:
                self._calls -= 1
        text = " ".join(field.text for field in fields)
        self.notes.append(Note(command.place, f"{short(text)}: is not executed; what it sets is not known"))
        self._output(Field("", command.place, NOT_EXECUTED))
        return None

    def _test(self, fields: list[Field], _: syntax.Simple) -> bool | None:
        argv = fields[1:-1] if fields[0].text == "[" else fields[1:]
        return Condition(argv, self._is_set, globs=fields[0].text == "[[").result()

    def _exec(self, fields: list[Field], command: syntax.Simple) -> bool | None:
        name, argv = fields[0].text, fields[1:]
        if name == "command" and argv and argv[0].text in ("-v", "-V"):
            return None
        while name == "exec" and argv and argv[0].text.startswith("-"):
            argv = argv[2:] if argv[0].text == "-a" else argv[1:]
        if not argv:
            return True
        self._output(Field("", command.place, NOT_EXECUTED))
        status = self._external(argv, command)
        if name == "exec" and not self._outputs:
            raise Leave("exit")
        return status
