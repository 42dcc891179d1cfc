"""Follows the statements of a Python file: assignments, conditions and loops. Nothing is executed.

Values that the file does not determine are Unknown, or unknown pieces of a text.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from typing import Any

from slimectl.migrate.launch_scripts.python_expressions import READABLE, Expressions, source_of
from slimectl.migrate.launch_scripts.python_values import (
    Function,
    Instance,
    Reference,
    Unknown,
    changeable,
    copied,
    lifted,
    merged,
    plain,
    restore,
    truth,
)
from slimectl.migrate.launch_scripts.shell_values import Leave

UNCERTAIN = "it depends on a condition that is not evaluated"


class Statements(Expressions):
    """The statements of a program, and the conditions under which they are reached."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        super().__init__(environ)
        self.condition = ""
        """Why it is unknown whether the program reaches a statement, or an empty string if it does."""
        self.entries: list[Function] = []
        """Functions that a command line of typer starts."""
        self.pending: list[list[Any]] = []
        """For each function that is followed, the values that it returns under an unknown condition."""

    def run(self, body: Sequence[ast.stmt]) -> None:
        """Follow statements. Raises Leave if they end early."""
        for statement in body:
            self.count()
            self._step(statement)

    def _step(self, statement: ast.stmt) -> None:
        match statement:
            case ast.Import(names=names):
                for name in names:
                    root = name.name.partition(".")[0]
                    self._assign(name.asname or root, Reference(name.name if name.asname else root))
            case ast.ImportFrom(module=module, names=names):
                for name in names:
                    self._assign(name.asname or name.name, Reference(f"{module or ''}.{name.name}"))
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                function = Function(statement, None, self.frames[-1] if self.frames else {})
                self._assign(statement.name, function)
                if any(re.search(r"\.command\b", ast.unparse(item)) for item in statement.decorator_list):
                    self.entries.append(function)
            case ast.ClassDef():
                self._assign(statement.name, statement)
            case ast.Global(names=names) if self.frames:
                self.frames[-1] |= {f"global {name}": True for name in names}
            case ast.Nonlocal(names=names):
                for frame in self.frames[:-1]:
                    frame |= {name: Unknown(name, "an inner function sets it") for name in names if name in frame}
            case ast.Expr(value=value):
                self.value(value)
            case ast.Return(value=value):
                raise Leave("return", self.value(value) if value else None)
            case ast.Raise() | ast.Break() | ast.Continue():
                raise Leave(type(statement).__name__.lower())
            case ast.Assign(targets=targets, value=value):
                result = self.value(value)
                for target in targets:
                    self.store(target, result)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self.store(target, self.value(value))
            case ast.AugAssign(target=target, op=operator, value=value):
                read = ast.copy_location(ast.parse(ast.unparse(target), mode="eval").body, target)
                self.store(target, self.value(ast.copy_location(ast.BinOp(read, operator, value), statement)))
            case _:
                self._compound(statement)

    def _compound(self, statement: ast.stmt) -> None:
        match statement:
            case ast.Delete(targets=targets):
                for target in targets:
                    self.store(target, Unknown(source_of(target), "it is deleted"))
            case ast.With(body=body) | ast.AsyncWith(body=body):
                for item in statement.items:
                    if item.optional_vars:
                        self.store(item.optional_vars, self.value(item.context_expr))
                self.run(body)
            case ast.Try(body=body, handlers=handlers):
                self._branches([[*body, *statement.orelse], *(handler.body for handler in handlers)], statement)
                self.run(statement.finalbody)
            case ast.If(test=test, body=body, orelse=orelse):
                condition = truth(self.value(test))
                bodies = [body, orelse] if condition is None else [body] if condition else [orelse]
                self._branches(bodies, statement)
            case ast.Match():
                self._match(statement)
            case ast.For():
                self._loop(statement)
            case ast.While(test=test, body=body):
                if truth(self.value(test)) is not False:
                    self._branches([body, []], statement)

    def _match(self, statement: ast.Match) -> None:
        """Follow a match like the equivalent conditions."""
        body: list[ast.stmt] = []
        for case in reversed(statement.cases):
            tests = [_test_of(statement.subject, case.pattern), *([case.guard] if case.guard else [])]
            condition = ast.If(ast.BoolOp(ast.And(), tests), case.body, body)
            body = [ast.fix_missing_locations(ast.copy_location(condition, statement))]
        self.run(body)

    def _loop(self, statement: ast.For) -> None:
        members = self.value(statement.iter)
        if not isinstance(members, list | dict) or len(members) > self.max_loop:
            self.store(statement.target, Unknown(ast.unparse(statement.target), "it is a variable of a loop"))
            self._branches([statement.body, []], statement)
            return
        for member in list(members):
            self.count()
            self.store(statement.target, member if isinstance(members, list) else lifted(member, (1, 1)))
            try:
                self.run(statement.body)
            except Leave as leave:
                if leave.kind not in ("break", "continue"):
                    raise
                if leave.kind == "break":
                    break

    def _branches(self, bodies: Sequence[Sequence[ast.stmt]], statement: ast.stmt) -> None:
        """Follow every branch of which one is taken. Keep what they agree on for each name and object."""
        if len(bodies) == 1:
            self.run(bodies[0])
            return
        reason = f"{UNCERTAIN} (line {statement.lineno})"
        frame = self.frames[-1] if self.frames else self.globals
        names, objects = dict(frame), changeable([*frame.values(), *self.globals.values()])
        contents, results = [copied(item) for item in objects], []
        condition, self.condition = self.condition, self.condition or reason
        for body in bodies:
            if self._completes(body):
                results.append((dict(frame), [copied(item) for item in objects]))
            frame.clear()
            frame.update(names)
            for item, content in zip(objects, contents, strict=True):
                restore(item, copied(content))
        self.condition = condition
        for number, item in enumerate(objects if results else []):
            restore(item, merged([states[number] for _, states in results], reason))
        for name in dict.fromkeys(name for after, _ in results for name in after):
            values = [after.get(name) for after, _ in results]
            frame[name] = values[0] if all(value is values[0] for value in values) else merged(values, reason)

    def _completes(self, body: Sequence[ast.stmt]) -> bool:
        """Follow a branch. Return whether the program continues after it."""
        try:
            self.run(body)
        except Leave as leave:
            if leave.kind == "limit":
                raise
            if leave.kind == "return" and self.pending:
                self.pending[-1].append(leave.value)
            return leave.kind in ("break", "continue")
        return True

    def _assign(self, name: str, value: Any) -> None:
        frame = self.frames[-1] if self.frames else self.globals
        if f"global {name}" in frame:
            frame.pop(name, None)
            self.globals[name] = Unknown(name, self.condition) if self.condition else value
        else:
            frame[name] = value

    def store(self, target: ast.expr, value: Any) -> None:
        match target:
            case ast.Name(id=name):
                self._assign(name, value)
            case ast.Attribute(value=owner, attr=name):
                if isinstance(instance := self.value(owner), Instance):
                    instance.attributes[name] = value
            case ast.Subscript(value=owner, slice=index):
                table = self.value(owner)
                try:
                    if isinstance(table, dict | list):
                        table[plain(self.value(index))] = value
                except READABLE:
                    pass
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                is_list = isinstance(value, list) and not any(isinstance(item, ast.Starred) for item in targets)
                parts = value if is_list else [value] if isinstance(value, Instance) else []
                for number, item in enumerate(targets):
                    part = Unknown(ast.unparse(item), "it is a part of what a function returns")
                    self.store(item, parts[number] if number < len(parts) else part)


def _test_of(subject: ast.expr, pattern: ast.pattern) -> ast.expr:
    """The condition that is equivalent to a pattern, or an unknown name if the pattern is not constant."""
    match pattern:
        case ast.MatchAs(pattern=None):
            return ast.Constant(True)
        case ast.MatchOr(patterns=patterns):
            return ast.BoolOp(ast.Or(), [_test_of(subject, item) for item in patterns])
        case ast.MatchValue(value=value):
            return ast.Compare(subject, [ast.Eq()], [value])
    return ast.Name("pattern", ast.Load())
