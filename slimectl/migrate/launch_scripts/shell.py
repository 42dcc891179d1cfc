"""Follows a shell script without executing anything: pipelines, conditions, loops, functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from slimectl.errors import SettingsError
from slimectl.migrate.launch_scripts import shell_syntax as syntax
from slimectl.migrate.launch_scripts.shell_commands import MAX_CALLS, Commands
from slimectl.migrate.launch_scripts.shell_programs import RUNNERS, inner_script, output
from slimectl.migrate.launch_scripts.shell_values import Field, Leave, is_costly, merged, pattern
from slimectl.migrate.launch_scripts.shell_words import Place, Substitution

Launched: TypeAlias = "Callable[[Path, Path, Mapping[str, str], Sequence[Field], int], Script | None]"
"""Gets a launcher, the folder that may be read, variables, arguments and depth. Returns None if nothing is started."""


class Script(Commands):
    """A script that is followed. Each statement returns whether it succeeds, or None if that is unknown."""

    launched: Launched | None = None
    """Follows a Python launcher. If it is None, a launcher that a script starts is a command like any other."""

    def follow(self) -> None:
        """Follow the whole script."""
        path = self._files[0]
        try:
            self._run_all(self._parsed(path, str(path)))
        except Leave:
            pass
        except RecursionError:
            raise SettingsError(f"{path}: is nested too deeply. Write it flat") from None

    def follow_text(self, text: str, name: str) -> None:
        """Follow a text that may contain placeholders for unknown parts."""
        with suppress(Leave):
            self._run_all(syntax.parse(text, name))

    def mark(self, field: Field) -> str:
        """A placeholder for an unknown field."""
        return self._mark(field).text

    def _external(self, fields: list[Field], command: syntax.Simple) -> bool | None:
        """Follow a Python launcher that a command starts, or return what the command is."""
        position = next((number for number, field in enumerate(fields) if field.text.endswith(".py")), None)
        path = None if position is None or inner_script(fields) else self._readable(fields[position])
        if position is None or path is None or self.launched is None or self._calls >= MAX_CALLS:
            return super()._external(fields, command)
        variables = {name: value.text for name, value in self._variables.items() if isinstance(value, Field)}
        environ = {**self._environ, **variables}
        script = self.launched(path, self._root, environ, fields[position + 1 :], self._calls + 1)
        if script is None:
            return super()._external(fields, command)
        self.commands += script.commands
        self.notes += script.notes
        return None

    def _run_all(self, statements: Sequence[syntax.Statement]) -> bool | None:
        status: bool | None = True
        for statement in statements:
            status = self._run(statement)
        return status

    def _run(self, statement: syntax.Statement) -> bool | None:
        self._count(getattr(statement, "place", None))
        match statement:
            case syntax.Simple():
                return self._simple(statement)
            case syntax.Pipeline(commands, negated):
                status = self._pipeline(commands)
                return (None if status is None else not status) if negated else status
            case syntax.AndOr(members):
                return self._and_or(members)
            case syntax.If():
                return self._if(statement)
            case syntax.Loop():
                return self._loop(statement)
            case syntax.For():
                return self._for(statement)
            case syntax.Case():
                return self._case(statement)
            case syntax.Function(name, body):
                self._functions[name] = body
                return True
            case syntax.CommandGroup(body, subshell):
                return self._subshell(body) if subshell else self._run_all(body)

    def _pipeline(self, commands: Sequence[syntax.Statement]) -> bool | None:
        if len(commands) == 1:
            return self._run(commands[0])
        if self._outputs:
            self._outputs[-1].append(self._filtered(commands))
            return None
        runner = commands[-1]
        if isinstance(runner, syntax.Simple) and runner.argv and runner.argv[0].bare in RUNNERS and not runner.stdin:
            return self._follow_inner(self._captured(Substitution("", (commands[0],), quoted=True), runner.place))
        statuses = [self._subshell([command]) for command in commands]
        return statuses[-1]

    def _filtered(self, commands: Sequence[syntax.Statement]) -> Field:
        """The output of a pipe. It is known if the first command's output is, and the others only change text."""
        text = self._captured(Substitution("", (commands[0],), quoted=True), Place("", 0))
        for command in commands[1:]:
            argv = [field for word in getattr(command, "argv", ()) for field in self._fields(word)]
            name = argv[0].text if argv else ""
            text = output(name, argv[1:], text, Place("", 0))
        return text

    def _branches(self, bodies: Sequence[Sequence[syntax.Statement]], place: Place) -> None:
        """Follow every branch of which one is taken, and keep the values that they agree on for each variable."""
        reason = f"it depends on a condition that is not evaluated ({place})"
        before, condition, results = self._snapshot(), self._condition, []
        self._condition = condition or reason
        for body in bodies:
            self._variables = {
                name: dict(value) if isinstance(value, dict) else value for name, value in before.items()
            }
            try:
                self._run_all(body)
            except Leave as leave:
                if leave.kind in ("exit", "return"):
                    continue
            results.append(self._variables)
        self._condition = condition
        results = results or [before]
        names = dict.fromkeys(name for variables in results for name in variables)
        values = {name: merged([variables.get(name) for variables in results], reason, place) for name in names}
        self._variables = {name: value for name, value in values.items() if value is not None}
        if self._outputs:
            self._outputs[-1].append(Field("", place, reason))

    def _and_or(self, members: Sequence[tuple[str, syntax.Statement]]) -> bool | None:
        status: bool | None = True
        for operator, member in members:
            if operator and status is None:
                self._branches([[member], []], self._place_of(member))
            elif not operator or status == (operator == "&&"):
                status = self._run(member)
        return status

    def _place_of(self, statement: syntax.Statement) -> Place:
        place = getattr(statement, "place", None)
        return place if isinstance(place, Place) else Place(self._name(self._files[-1]), 1)

    def _if(self, statement: syntax.If) -> bool | None:
        status = self._run_all(statement.condition)
        if status is None:
            self._branches([statement.body, statement.otherwise], statement.place)
            return None
        return self._run_all(statement.body if status else statement.otherwise)

    def _loop(self, loop: syntax.Loop) -> bool | None:
        while True:
            self._count(loop.place)
            status = self._run_all(loop.condition)
            if status is None:
                self._branches([loop.body, []], loop.place)
                return None
            if status == loop.negated or not self._iterate(loop.body):
                return True
            self._run_all(loop.step)

    def _iterate(self, body: Sequence[syntax.Statement]) -> bool:
        """Follow the body of a loop once. Return whether the loop continues."""
        try:
            self._run_all(body)
        except Leave as leave:
            if leave.kind not in ("break", "continue"):
                raise
            return leave.kind == "continue"
        return True

    def _for(self, loop: syntax.For) -> bool | None:
        argv = [field for word in loop.elements for field in self._fields(word)] if loop.elements is not None else []
        if loop.elements is None:
            argv = self._positional()
        if any(field.unknown for field in argv):
            self._variables[loop.name] = next(field for field in argv if field.unknown)
            self._branches([loop.body, []], loop.place)
            return None
        for field in argv:
            self._variables[loop.name] = field
            if not self._iterate(loop.body):
                break
        return True

    def _case(self, case: syntax.Case) -> bool | None:
        subject = self._field(case.subject)
        if subject.unknown:
            self._branches([*(body for _, body in case.clauses), []], case.place)
            return None
        for patterns, body in case.clauses:
            globs = [self._glob(item) for item in patterns]
            if any(not is_costly(subject.text, glob) and pattern(glob).fullmatch(subject.text) for glob in globs):
                return self._run_all(body)
        return True
