"""Follows a Python launcher by its syntax tree: assignments, conditions, loops, functions and dataclasses.

Nothing is executed. What the file alone does not tell is an Unknown, or an unknown piece of a text.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from slimectl.settings.launch_scripts.launcher_expressions import READABLE, Expressions
from slimectl.settings.launch_scripts.launcher_values import (
    Function,
    Instance,
    Leave,
    Reference,
    Unknown,
    Unreadable,
    changeable,
    copied,
    merged,
    plain,
    restore,
    truth,
)  # fmt: skip

MAX_DEPTH = 30


class Program(Expressions):
    """A program that is followed: its statements, functions and classes."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        super().__init__(environ)
        self.condition = ""
        """Why it is unknown whether the program reaches a statement; empty if it does."""
        self._pending: list[list[Any]] = []
        """Of each function that is followed, values that it returns under a condition which is not known."""

    def run(self, body: Sequence[ast.stmt]) -> None:
        """Follow statements. Raises Leave where they end early."""
        for statement in body:
            self._count()
            run = getattr(self, f"_run_{type(statement).__name__.lower()}", None)
            if run is not None:
                run(statement)

    def _run_import(self, statement: ast.Import) -> None:
        for name in statement.names:
            self._assign(
                name.asname or name.name.partition(".")[0],
                Reference(name.name if name.asname else name.name.partition(".")[0]),
            )

    def _run_importfrom(self, statement: ast.ImportFrom) -> None:
        for name in statement.names:
            self._assign(name.asname or name.name, Reference(f"{statement.module or ''}.{name.name}"))

    def _run_functiondef(self, statement: ast.FunctionDef) -> None:
        self._assign(statement.name, Function(statement))

    def _run_classdef(self, statement: ast.ClassDef) -> None:
        self._assign(statement.name, statement)

    def _run_expr(self, statement: ast.Expr) -> None:
        self.value(statement.value)

    def _run_return(self, statement: ast.Return) -> None:
        raise Leave("return", self.value(statement.value) if statement.value else None)

    def _run_raise(self, _: ast.Raise) -> None:
        raise Leave("raise")

    def _run_break(self, _: ast.Break) -> None:
        raise Leave("break")

    def _run_continue(self, _: ast.Continue) -> None:
        raise Leave("continue")

    def _run_assign(self, statement: ast.Assign) -> None:
        value = self.value(statement.value)
        for target in statement.targets:
            self.store(target, value)

    def _run_annassign(self, statement: ast.AnnAssign) -> None:
        if statement.value is not None:
            self.store(statement.target, self.value(statement.value))

    def _run_augassign(self, statement: ast.AugAssign) -> None:
        target = ast.copy_location(ast.parse(ast.unparse(statement.target), mode="eval").body, statement.target)
        self.store(
            statement.target, self.value(ast.copy_location(ast.BinOp(target, statement.op, statement.value), statement))
        )

    def _run_with(self, statement: ast.With) -> None:
        self.run(statement.body)

    def _run_try(self, statement: ast.Try) -> None:
        """Follow the body, and what follows an exception as another branch."""
        bodies = [[*statement.body, *statement.orelse], *(handler.body for handler in statement.handlers)]
        if len(bodies) == 1:
            self.run(bodies[0])
        else:
            self._branches(bodies, statement)
        self.run(statement.finalbody)

    def _run_if(self, statement: ast.If) -> None:
        condition = truth(self.value(statement.test))
        if condition is None:
            self._branches([statement.body, statement.orelse], statement)
        else:
            self.run(statement.body if condition else statement.orelse)

    def _run_match(self, statement: ast.Match) -> None:
        subject = self.value(statement.subject)
        for case in statement.cases:
            is_match = self._matches(subject, case.pattern)
            if is_match is None:
                self._branches([case.body for case in statement.cases], statement)
                return
            if is_match and (case.guard is None or truth(self.value(case.guard))):
                self.run(case.body)
                return

    def _matches(self, subject: Any, pattern: ast.pattern) -> bool | None:
        match pattern:
            case ast.MatchAs(pattern=None):
                return True
            case ast.MatchOr(patterns=patterns):
                results = [self._matches(subject, item) for item in patterns]
                return True if True in results else None if None in results else False
            case ast.MatchValue(value=value):
                try:
                    return bool(plain(subject) == plain(self.value(value)))
                except Unreadable:
                    return None
            case ast.MatchSingleton(value=constant):
                return subject is constant
        return None

    def _run_for(self, statement: ast.For) -> None:
        members = self.value(statement.iter)
        if not isinstance(members, list | dict):
            self.store(statement.target, Unknown(ast.unparse(statement.target), "it is a variable of a loop"))
            self._branches([statement.body, []], statement)
            return
        for member in list(members):
            self._count()
            self.store(statement.target, member)
            try:
                self.run(statement.body)
            except Leave as leave:
                if leave.kind not in ("break", "continue"):
                    raise
                if leave.kind == "break":
                    break

    def _run_while(self, statement: ast.While) -> None:
        if truth(self.value(statement.test)) is not False:
            self._branches([statement.body, []], statement)

    def _branches(self, bodies: Sequence[Sequence[ast.stmt]], statement: ast.stmt) -> None:
        """Follow every branch of which one is taken, and keep of each name and object what they agree in."""
        reason = f"it depends on a condition that is not evaluated (line {statement.lineno})"
        frame = self._frames[-1] if self._frames else self._globals
        names, objects = dict(frame), changeable([*frame.values(), *self._globals.values()])
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
        if not results:
            return
        for name in dict.fromkeys(name for after, _ in results for name in after):
            values = [after.get(name) for after, _ in results]
            frame[name] = values[0] if all(value is values[0] for value in values) else merged(values, reason)

    def _completes(self, body: Sequence[ast.stmt]) -> bool:
        """Follow a branch; return whether the program goes on behind it."""
        try:
            self.run(body)
        except Leave as leave:
            if leave.kind == "limit":
                raise
            if leave.kind == "return" and self._pending:
                self._pending[-1].append(leave.value)
            return leave.kind in ("break", "continue")
        return True

    def _assign(self, name: str, value: Any) -> None:
        (self._frames[-1] if self._frames else self._globals)[name] = value

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
                members = value if isinstance(value, list) and len(value) == len(targets) else [value] * len(targets)
                for item, member in zip(targets, members, strict=True):
                    self.store(
                        item,
                        member
                        if isinstance(value, list)
                        else Unknown(ast.unparse(item), "it is a part of what a function returns"),
                    )

    def follow(self, function: Function, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        """Follow a function of the file; return what it returns."""
        if len(self._frames) >= MAX_DEPTH:
            raise Unreadable("its functions call each other too deeply")
        frame = self._bound(function, arguments, keywords)
        self._frames.append(frame)
        self._pending.append([])
        value = None
        try:
            if isinstance(function.node, ast.Lambda):
                return self.value(function.node.body)
            self.run(function.node.body)
        except Leave as leave:
            if leave.kind not in ("return", "break", "continue"):
                raise
            value = leave.value
        finally:
            self._frames.pop()
            returned = self._pending.pop()
        return merged([*returned, value], "it depends on a condition that is not evaluated") if returned else value

    def _bound(self, function: Function, arguments: list[Any], keywords: dict[str, Any]) -> dict[str, Any]:
        """The names of a function's parameters with their values."""
        parameters = function.node.args
        positional = [*parameters.posonlyargs, *parameters.args]
        values = [*([function.owner] if function.owner is not None else []), *arguments]
        frame = dict(zip([parameter.arg for parameter in positional], values, strict=False))
        defaults = dict(zip([item.arg for item in positional][::-1], parameters.defaults[::-1], strict=False))
        defaults |= {
            item.arg: node for item, node in zip(parameters.kwonlyargs, parameters.kw_defaults, strict=True) if node
        }
        for parameter in [*positional, *parameters.kwonlyargs]:
            name = parameter.arg
            if name in keywords:
                frame[name] = keywords[name]
            elif name not in frame:
                frame[name] = self.parameter(parameter, defaults.get(name))
        if parameters.kwarg:
            frame[parameters.kwarg.arg] = {key: value for key, value in keywords.items() if key not in frame}
        if parameters.vararg:
            frame[parameters.vararg.arg] = values[len(positional) :]
        return frame

    def parameter(self, parameter: ast.arg, default: ast.expr | None) -> Any:
        """The value of a parameter that the caller does not give: its default, or an object of its class."""
        if default is not None:
            return self.default(default)
        kind = self.value(parameter.annotation) if parameter.annotation else None
        if isinstance(kind, ast.ClassDef):
            return self.instance(kind, [], {})
        return Unknown(parameter.arg, f"{parameter.arg} is given when the program starts")

    def default(self, node: ast.expr) -> Any:
        """The default of a field or an option: also of `field(default=…)` and `typer.Option(…)`."""
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in (
            "field",
            "Option",
            "Argument",
            "Field",
        ):
            keywords = {word.arg: word.value for word in node.keywords}
            if "default_factory" in keywords:
                function = self.value(keywords["default_factory"])
                return self.follow(function, [], {}) if isinstance(function, Function) else self._empty(function)
            node = keywords.get("default") or (node.args[0] if node.args else node)
            if isinstance(node, ast.Constant) and node.value is Ellipsis:
                return Unknown("…", "it is given when the program starts")
        return self.value(node)

    def _empty(self, kind: Any) -> Any:
        return {"list": [], "dict": {}}.get(
            getattr(kind, "name", ""), Unknown("…", "its default is made by a function")
        )

    def instance(self, kind: ast.ClassDef, arguments: list[Any], keywords: dict[str, Any]) -> Instance:
        """An object of a class of the file: its fields with their defaults, then what its methods set."""
        instance = Instance(kind)
        fields = [node for node in self.members_of(kind) if isinstance(node, ast.AnnAssign | ast.Assign)]
        for node in reversed(fields):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            if isinstance(target, ast.Name) and node.value is not None:
                instance.attributes[target.id] = self.field(target.id, node, self.default(node.value))
        names = [
            node.target.id
            for node in kind.body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        ]
        methods = {node.name: node for node in reversed(self.members_of(kind)) if isinstance(node, ast.FunctionDef)}
        if "__init__" in methods:
            self.follow(Function(methods["__init__"], instance), arguments, keywords)
            return instance
        instance.attributes |= dict(zip(names, arguments, strict=False)) | keywords
        if "__post_init__" in methods:
            self.follow(Function(methods["__post_init__"], instance), [], {})
        return instance

    def field(self, name: str, node: ast.stmt, default: Any) -> Any:
        """The value of a field of an object that the program makes by itself."""
        return default

    def members_of(self, kind: ast.ClassDef | None) -> list[ast.stmt]:
        """The members of a class, then those of its bases; the first of a name counts."""
        members, kinds = list[ast.stmt](), [kind]
        for current in kinds:
            if isinstance(current, ast.ClassDef) and len(kinds) < MAX_DEPTH:
                members += current.body
                kinds += [self.value(base) for base in current.bases]
        return members
