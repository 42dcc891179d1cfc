"""Follows a Python file by its syntax tree: functions, classes and argument parsers. Nothing is executed."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slimectl.errors import SettingsError
from slimectl.migrate.launch_scripts.flags import Flag
from slimectl.migrate.launch_scripts.python_expressions import MAX_STEPS
from slimectl.migrate.launch_scripts.python_statements import UNCERTAIN, Statements
from slimectl.migrate.launch_scripts.python_values import (
    Function,
    Instance,
    Piece,
    Reference,
    Text,
    Unknown,
    Unreadable,
    merged,
    plain,
    truth,
)
from slimectl.migrate.launch_scripts.shell_values import Leave
from slimectl.migrate.launch_scripts.shell_words import read_text

MAX_DEPTH = 30
FIELDS = re.compile(r"(?:\w+\.)*(?:field|Field|Option|Argument)")
"""Functions that hold the default of a field or an option."""
CONFIGURATIONS = re.compile(r"\w*(?:Config|Arguments|Trainer)$|get_peft_model$")
"""Classes and functions of libraries whose arguments are settings."""
PARSERS = ("ArgumentParser", "HfArgumentParser", "TrlParser")


def parsed(path: Path, name: str) -> ast.Module:
    """The syntax tree of a file. Raises SettingsError with the line of a syntax error."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            return ast.parse(read_text(path, name), filename=name)
    except SyntaxError as error:
        raise SettingsError(f"{name}:{error.lineno}: not valid Python: {error.msg}") from None
    except (RecursionError, MemoryError, ValueError):
        raise SettingsError(f"{name}: is nested too deeply to be read") from None


class Program(Statements):
    """A program that is followed from its module on, and the options that it is started with."""

    def __init__(self, tree: ast.Module, name: str, environ: Mapping[str, str], options: Sequence[Flag] = ()) -> None:
        super().__init__(environ)
        self.tree, self.name = tree, name
        names = [(flag.name.replace("-", "_"), flag) for flag in options]
        self.options = {name.removeprefix("no_"): flag for name, flag in names} | dict(names)
        self.used: set[str] = set()
        """Options that determine a value."""
        self.followed: set[ast.AST] = set()
        """Functions that the program calls."""

    def guarded(self, follow: Callable[[], Any]) -> bool:
        """Follow a part of the program. Return whether it stays within the limit on steps."""
        try:
            follow()
        except Leave as leave:
            return leave.kind != "limit"
        except RecursionError:
            raise SettingsError(f"{self.name}: is nested too deeply to be read") from None
        finally:
            self.frames.clear()
            self.pending.clear()
            self.condition = ""
        return True

    def limit(self) -> SettingsError:
        """The error for a program that needs too many steps."""
        return SettingsError(f"{self.name}: needs more than {MAX_STEPS} steps. Take out the loop")

    def call_reference(self, name: str, call: ast.Call, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        """The result of a function that the file does not define. Raises Unreadable if it is unknown."""
        if name in ("typer.run", "fire.Fire") and arguments and isinstance(arguments[0], Function):
            return self.follow(arguments[0], [], {})
        if name == "tyro.cli" and arguments and isinstance(arguments[0], ast.ClassDef):
            return self.instance(arguments[0], [], {})
        if name.rpartition(".")[2] in ("Typer", *PARSERS):
            classes = [] if name.endswith("ArgumentParser") and "Hf" not in name else [*arguments, *keywords.values()]
            return Instance(None, {"": classes[0] if classes and isinstance(classes[0], list) else classes[:1]}, name)
        raise Unreadable(f"{name}() is known when the program runs")

    def call_object(self, owner: Instance, name: str, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        """The result of a method of an argument parser, or of a call of a typer application."""
        if name == "" and owner.name.endswith("Typer"):
            for entry in self.entries:
                self.follow(entry, [], {})
            return None
        if name == "add_argument":
            self._add_option(owner, [str(plain(item)) for item in arguments], keywords)
            return None
        if name in ("add_argument_group", "add_mutually_exclusive_group"):
            return owner
        if name.startswith("parse_") and owner.name.endswith(PARSERS):
            parsed = [self.parsed_object(kind) for kind in owner.attributes[""]]
            options = Instance(None, {key: value for key, value in owner.attributes.items() if key})
            return parsed if parsed else [options, []] if name == "parse_known_args" else options
        raise Unreadable(f"{name}() is known when the program runs")

    def parsed_object(self, kind: Any) -> Any:
        """The object of a class that a parser fills."""
        return self.instance(kind, [], {}) if isinstance(kind, ast.ClassDef) else Instance(None, {}, kind.name)

    def _add_option(self, parser: Instance, names: list[str], keywords: dict[str, Any]) -> None:
        long_names = [name for name in names if name.startswith("--")] or names
        name = str(plain(keywords["dest"])) if "dest" in keywords else long_names[0].lstrip("-").replace("-", "_")
        switch = {"store_true": False, "store_false": True}.get(str(keywords.get("action", "")))
        default = keywords.get("default", switch)
        if default is None and (truth(keywords.get("required", False)) or not names[0].startswith("-")):
            default = Unknown(name, f"{name} is given when the program starts")
        kind = keywords["type"].name if isinstance(keywords.get("type"), Reference) else ""
        is_switched = switch is not None and name in self.options
        parser.attributes[name] = self.option(name, kind, default)
        if is_switched:
            parser.attributes[name] = not switch

    def option(self, name: str, kind: str, default: Any) -> Any:
        """The value of an option that the program is started with, converted to its type, or else the default."""
        if (flag := self.options.get(name)) is None:
            return default
        if flag.problem or len(flag.values) > 1:
            return Unknown(name, flag.problem or f"{name} has several values")
        self.used.add(flag.name)
        if not flag.values:
            return flag.name.replace("-", "_") == name
        text = flag.text
        if re.search(r"\bbool\b", kind):
            return text.lower() in ("true", "1", "yes")
        if re.search(r"\bint\b", kind) and re.fullmatch(r"-?\d{1,18}", text):
            return int(text)
        if re.search(r"\bfloat\b", kind) and re.fullmatch(r"[-+.\deE]{1,30}", text):
            return float(text)
        return Text((Piece(text, (flag.place.line, flag.place.line)),))

    def apply(self, function: Any, call: ast.Call, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        if isinstance(function, Function) and isinstance(function.node, str):
            assert function.owner is not None
            return self.call_object(function.owner, function.node, arguments, keywords)
        if isinstance(function, Function):
            return self.follow(function, arguments, keywords)
        if isinstance(function, ast.ClassDef):
            return self.instance(function, arguments, keywords)
        if isinstance(function, Instance) and function.kind is None:
            return self.call_object(function, "", arguments, keywords)
        if isinstance(function, Reference):
            return self.call_reference(function.name, call, arguments, keywords)
        raise Unreadable

    def attribute(self, owner: Any, name: str) -> Any:
        if isinstance(owner, Reference):
            return Reference(f"{owner.name}.{name}")
        if not isinstance(owner, Instance):
            raise Unreadable(owner.reason if isinstance(owner, Unknown) else "")
        if name in owner.attributes or owner.kind is None:
            return owner.attributes.get(name, Function(name, owner))
        method = next((node for node in self.members_of(owner.kind) if getattr(node, "name", "") == name), None)
        if not isinstance(method, ast.FunctionDef):
            raise Unreadable
        is_property = any(ast.unparse(item).endswith("property") for item in method.decorator_list)
        return self.follow(Function(method, owner), [], {}) if is_property else Function(method, owner)

    def follow(self, function: Function, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        """Follow a function of the file and return its result."""
        if len(self.frames) >= MAX_DEPTH:
            raise Unreadable("its functions call each other too deeply")
        assert not isinstance(function.node, str)
        self.followed.add(function.node)
        self.frames.append({**function.scope, **self._bound(function, arguments, keywords)})
        self.pending.append([])
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
            self.frames.pop()
            returned = self.pending.pop()
        return merged([*returned, value], UNCERTAIN) if returned else value

    def _bound(self, function: Function, arguments: list[Any], keywords: dict[str, Any]) -> dict[str, Any]:
        """The names of a function's parameters with their values."""
        assert not isinstance(function.node, str)
        parameters = function.node.args
        positional = [*parameters.posonlyargs, *parameters.args]
        values = [*([function.owner] if function.owner is not None else []), *arguments]
        frame = dict(zip([parameter.arg for parameter in positional], values, strict=False))
        defaults = dict(zip([item.arg for item in positional][::-1], parameters.defaults[::-1], strict=False))
        named = zip(parameters.kwonlyargs, parameters.kw_defaults, strict=True)
        defaults |= {item.arg: node for item, node in named if node}
        for parameter in [*positional, *parameters.kwonlyargs]:
            name = parameter.arg
            if name in keywords or name not in frame:
                frame[name] = keywords[name] if name in keywords else self.parameter(parameter, defaults.get(name))
                if "**" in keywords and name not in keywords:
                    frame[name] = Unknown(name, f"{name} is known when the program runs")
        if parameters.kwarg:
            frame[parameters.kwarg.arg] = {key: value for key, value in keywords.items() if key not in frame}
        if parameters.vararg:
            frame[parameters.vararg.arg] = values[len(positional) :]
        return frame

    def parameter(self, parameter: ast.arg, default: ast.expr | None) -> Any:
        """The value of a parameter that the caller does not pass: its default, or an object of its class."""
        if len(self.frames) < 2 and parameter.arg in self.options:
            return self.option(parameter.arg, ast.unparse(parameter.annotation or ast.Constant("")), None)
        if default is not None:
            return self.default(default)
        kind = self.value(parameter.annotation) if parameter.annotation else None
        if isinstance(kind, ast.ClassDef):
            return self.instance(kind, [], {})
        return Unknown(parameter.arg, f"{parameter.arg} is given when the program starts")

    def default(self, node: ast.expr) -> Any:
        """The default of a field or an option, including `field(default=…)` and `typer.Option(…)`."""
        if not isinstance(node, ast.Call) or FIELDS.fullmatch(ast.unparse(node.func)) is None:
            return self.value(node)
        keywords = {word.arg: word.value for word in node.keywords}
        if "default_factory" in keywords:
            function = self.value(keywords["default_factory"])
            if isinstance(function, Function | ast.ClassDef):
                return self.apply(function, node, [], {})
            return {"list": [], "dict": {}}.get(getattr(function, "name", ""), Unknown("…", "a function makes it"))
        value = keywords.get("default") or (node.args[0] if node.args else ast.Constant(Ellipsis))
        if isinstance(value, ast.Constant) and value.value is Ellipsis:
            return Unknown("…", "it is given when the program starts")
        return self.value(value)

    def instance(self, kind: ast.ClassDef, arguments: list[Any], keywords: dict[str, Any]) -> Instance:
        """An object of a class of the file: its fields with their defaults, then attributes that its methods set."""
        instance, members = Instance(kind), self.members_of(kind)
        names = []
        for node in reversed(members):
            target = node.target if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [None])[0]
            if isinstance(node, ast.AnnAssign | ast.Assign) and isinstance(target, ast.Name):
                names += [target.id] if isinstance(node, ast.AnnAssign) and node in kind.body else []
                annotation = ast.unparse(node.annotation) if isinstance(node, ast.AnnAssign) else ""
                if node.value is not None:
                    instance.attributes[target.id] = self.option(target.id, annotation, self.default(node.value))
        methods = {node.name: node for node in reversed(members) if isinstance(node, ast.FunctionDef)}
        if "__init__" in methods:
            self.follow(Function(methods["__init__"], instance), arguments, keywords)
            return instance
        instance.attributes |= dict(zip(names[::-1], arguments, strict=False)) | keywords
        if "__post_init__" in methods:
            self.follow(Function(methods["__post_init__"], instance), [], {})
        return instance

    def library_class(self, value: Any, name: str) -> str:
        """The library class that a value has or derives from, with its module. `name` if the value has no class."""
        for _ in range(MAX_DEPTH):
            bases = value.bases if isinstance(value, ast.ClassDef) else []
            bases = [base for base in bases if CONFIGURATIONS.match(ast.unparse(base).rpartition(".")[2])]
            if not bases:
                break
            value = self.value(bases[0])
        return value.name if isinstance(value, ast.ClassDef | Reference) else name

    def members_of(self, kind: ast.ClassDef | None) -> list[ast.stmt]:
        """The members of a class, then the members of its bases. The first of a name counts."""
        members, kinds = list[ast.stmt](), [kind]
        for current in kinds:
            if isinstance(current, ast.ClassDef) and len(kinds) < MAX_DEPTH:
                members += current.body
                kinds += [self.value(base) for base in current.bases]
        return members
