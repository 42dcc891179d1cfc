"""The judge's side of a case. A test's statements run here, and the program under test runs in another process.

Names that the program defines are proxies for values in its process. Results of calls arrive as plain data and are
compared here. For an object that is not plain data, only its attributes and methods can be used. So the program knows
neither the statements nor the values that they expect, and it cannot give the verdict itself.
"""

from __future__ import annotations

import ast
import builtins
import json
import os
import sys
from typing import Any

from slimectl.sandbox.peer import BrokenChannelError, Peer, exception_class
from slimectl.sandbox.privileges import confine
from slimectl.sandbox.program import write_all
from slimectl.sandbox.program_server import remote_iterator
from slimectl.sandbox.remote import RemoteClass, RemoteFunction, RemoteObject
from slimectl.sandbox.wire import CannotCrossError

CHANNEL, VERDICT = 3, 4
MODULES = sys.stdlib_module_names | {"numpy"}
"""Modules that a test may use even if only the program imports them. The test gets its own copy."""


def judge_case(job: dict[str, Any], test: str) -> None:
    """Run a test's statements in this process, confined like the program, and write the verdict."""
    confine(job)
    sys.set_int_max_str_digits(0)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    judge = ProgramJudge(CHANNEL)
    reason = judge.verdict(test)
    write_all(VERDICT, json.dumps({"passed": reason == "", "reason": reason[:500]}).encode())


class ProgramJudge(Peer):
    """Requests the values that a test uses from the program."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        self.failure = ""
        """Why the verdict is missing, even if the test continued."""

        self.note = ""
        """Which value of the program could not be compared."""

        self._references: dict[int, Any] = {}

    def verdict(self, test: str) -> str:
        """Return why the test failed, or "" if it passed."""
        reason = ""
        try:
            self.receive()  # wait until the program has run to its end
            code = compile(test, "test.py", "exec", dont_inherit=True)
            exec(code, Names(self, names_of_program(test)))
            self.ask("len", [])  # check that it is still alive
        except BaseException as error:
            text = " ".join(str(error).split())
            is_reason = isinstance(error, BrokenChannelError | CannotCrossError)
            reason = text if is_reason else f"{type(error).__name__}: {text}".removesuffix(": ")
        if self.failure:
            return self.failure
        return f"{reason} ({self.note})" if reason and self.note else reason

    def ask(self, operation: str, *arguments: Any, keywords: dict[str, Any] | None = None) -> Any:
        """Like Peer.ask, but a failure of the channel fails the test even if its statements catch the exception."""
        try:
            return super().ask(operation, *arguments, keywords=keywords)
        except BrokenChannelError as error:
            self.failure = self.failure or str(error)
            raise
        except CannotCrossError as error:
            self.failure = self.failure or str(error)
            raise
        except StopIteration:
            if operation == "next":
                raise
            # In `for got in map(f, inputs)` it would end the loop, and with it the test.
            raise RuntimeError("the program raised StopIteration") from None

    def kind_of(self, value: Any) -> list[Any]:
        kind = type(value)
        if callable(value):
            return ["callable", getattr(value, "__name__", kind.__name__)]
        if hasattr(value, "__next__"):
            return ["iterator", kind.__name__]
        if kind.__module__ == "__main__":
            return ["object", kind.__name__]
        raise CannotCrossError(f"{kind.__name__} cannot cross to the program")

    def number_of(self, value: Any) -> int | None:
        return object.__getattribute__(value, "_number") if isinstance(value, RemoteObject) else None

    def reference(self, number: int, kind: list[Any]) -> Any:
        """Return the proxy for a value of the program, always the same for the same value."""
        if number not in self._references:
            self._references[number] = self._reference(number, *kind)
        return self._references[number]

    def _reference(self, number: int, kind: str, name: Any, module: str = "") -> Any:
        if kind == "exception":
            return exception_class([str(part) for part in name], str(module))
        if kind == "module" and str(name).partition(".")[0] in MODULES:
            return __import__(name, fromlist=["*"])
        remote_types = {"class": RemoteClass, "callable": RemoteFunction}
        remote = remote_types.get(kind, RemoteObject)(self, number, name[0] if isinstance(name, list) else name)
        if kind == "iterator":
            return remote_iterator(self, remote)
        return _awaitable(self, remote) if kind == "coroutine" else remote

    def perform(self, operation: str, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        """Call functions that the test passed to the program, or use public attributes of its objects. No others."""
        target = arguments[0]
        if not any(target is value for value in self.objects):
            raise TypeError("the test passed no such value")
        if operation == "call" and callable(target):
            return target(*arguments[1:], **keywords)
        if operation == "next":
            return next(target)
        if type(target).__module__ == "__main__" and not str(arguments[1]).startswith("_"):
            if operation == "getattr":
                return getattr(target, arguments[1])
            if operation == "setattr":
                return setattr(target, arguments[1], arguments[2])
        raise AttributeError(str(arguments[1])[:100])


async def _awaitable(judge: ProgramJudge, remote: Any) -> Any:
    return judge.ask("run", remote)


class Names(dict[str, Any]):
    """Globals of a test: its own names, then the builtins, then what the program defines.

    Builtins come first so that a program's own `abs` or `len` cannot decide a test. If a test uses only names of
    builtins, the program's definition counts, because it is the one under test: `assert sum(10, 15) == 6`.
    """

    def __init__(self, judge: ProgramJudge, from_program: set[str]) -> None:
        super().__init__(__name__="__main__", __builtins__=builtins)
        self._judge = judge
        self._from_program = from_program

    def __missing__(self, name: str) -> Any:
        if name not in self._from_program:
            raise KeyError(name)
        value = self._judge.ask("global", name)
        if isinstance(value, RemoteObject):
            self[name] = value
        return value


def names_of_program(test: str) -> set[str]:
    """Return the names that a test takes from the program.

    >>> sorted(names_of_program("assert abs(f(2) - x) < len('a')")), names_of_program("assert sum(max(1, 2)) == 1")
    (['f', 'x'], {'max'})

    Builtins count only if there is no other name, and then only the innermost ones that are called.
    """
    tree = ast.parse(test)
    nodes = list(ast.walk(tree))
    used = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    names = {name for name in used if not hasattr(builtins, name)}
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    bound |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef)}
    bound |= {
        (alias.asname or alias.name).partition(".")[0]
        for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names
    }  # fmt: skip
    if names - bound:
        return names
    innermost = set()
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            arguments = [*node.args, *node.keywords]
            if not any(isinstance(inner, ast.Call) for argument in arguments for inner in ast.walk(argument)):
                innermost.add(node.func.id)
    return names | (innermost - bound)
