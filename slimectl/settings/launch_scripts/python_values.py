"""Values of a Python file that can be read from its syntax tree alone: constants, names that are set once, defaults."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slimectl.settings.launch_scripts.documents import MAX_DEPTH, variable_value
from slimectl.settings.launch_scripts.flags import Flag, texts_of
from slimectl.settings.launch_scripts.shell_values import Field
from slimectl.settings.launch_scripts.shell_words import Place

CONFIGURATIONS = re.compile(r"\w*(?:Config|Arguments|Trainer)$|get_peft_model$")
PARSERS = ("HfArgumentParser", "TrlParser")
MAX_STEPS = 20_000
MAX_EXPONENT = 64


def _root(node: ast.expr | None) -> str:
    """The name that a chain of calls begins with, as in `rows.map(f).select(n)` and `get_peft_model(model, …)`."""
    while isinstance(node, ast.Call | ast.Attribute | ast.Subscript):
        if isinstance(node, ast.Call) and called_name(node) == "get_peft_model" and node.args:
            node = node.args[0]
        else:
            node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def called_name(call: ast.Call) -> str:
    """The last name of what is called."""
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


class PythonFile:
    """Names of a module that are set once, to values that can be read without running it."""

    def __init__(self, tree: ast.Module, path: Path, name: str, environ: Mapping[str, str]) -> None:
        self.path = path
        self.name = name
        self._environ = environ
        self._steps = 0
        self._functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
        self._parameters: set[str] = set()
        self.tree = tree
        self.values: dict[str, ast.expr | None] = {}
        self.classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
        self.imports = dict(_imports(tree))
        self._defaults = dict(_options(tree))
        self.options: Mapping[str, Flag] = {}
        self.used: set[str] = set()
        """Options that decide a value."""
        attributes = {node for kind in self.classes.values() for node in kind.body}
        for node in ast.walk(tree):
            if node in attributes:
                continue
            targets = node.targets if isinstance(node, ast.Assign) else []
            if isinstance(node, ast.AnnAssign | ast.AugAssign | ast.For):
                targets = [node.target]
            value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
            for target in targets:
                for item, part in self._parts(target, value):
                    if not (item in self.values and _root(part) == item):
                        self.values[item] = None if item in self.values else part

    @property
    def modules(self) -> list[str]:
        """The modules that the file imports."""
        return [module for module, _ in self.imports.values()]

    def _parts(self, target: ast.expr, value: ast.expr | None) -> Iterator[tuple[str, ast.expr | None]]:
        """The names that an assignment sets, with their values."""
        if isinstance(target, ast.Name):
            yield target.id, value
        elif isinstance(target, ast.Tuple):
            call = called_name(value) if isinstance(value, ast.Call) else ""
            parsed = self._parsed_classes() if call.startswith("parse_args") else []
            for number, item in enumerate(target.elts):
                part = value.elts[number] if isinstance(value, ast.Tuple) and number < len(value.elts) else None
                if call == "from_pretrained" and number == 0:
                    part = value
                if number < len(parsed):
                    part = ast.Call(parsed[number], [], [])
                if isinstance(item, ast.Name):
                    yield item.id, part

    def _parsed_classes(self) -> list[ast.expr]:
        """The dataclasses that a parser of transformers or TRL fills, in order."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and called_name(node) in PARSERS:
                classes = [*node.args, *(word.value for word in node.keywords if word.arg == "dataclass_types")][:1]
                return list(classes[0].elts) if classes and isinstance(classes[0], ast.Tuple | ast.List) else classes
        return []

    def enter(self, node: ast.AST) -> None:
        """Read names as the functions around a node do, whose parameters only the program knows."""
        self._parameters = {
            argument.arg
            for function in self._functions
            if function.lineno <= getattr(node, "lineno", 0) <= (function.end_lineno or 0)
            for argument in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
        }

    def lookup(self, name: str) -> ast.expr | None:
        """The value that a name is set to, once; None for others."""
        return None if name in self._parameters else self.values.get(name)

    def kind(self, call: ast.Call) -> str:
        """The class that is called: of one of the file's own, the library's class that it derives from."""
        return self.library_class(called_name(call))

    def library_class(self, name: str) -> str:
        for _ in range(MAX_DEPTH):
            definition = self.classes.get(name)
            bases = [called_name(ast.Call(base, [], [])) for base in definition.bases] if definition else []
            base = next((item for item in bases if CONFIGURATIONS.match(item)), "")
            if not base:
                break
            name = base
        return self.imports.get(name, ("", ""))[1] or name

    def value(self, node: ast.expr) -> Any:
        """The value of an expression; None if only the program knows it."""
        try:
            return self.evaluated(node, 0)
        except (ValueError, TypeError, ArithmeticError):
            return None

    def fields(self, node: ast.expr, place: Place) -> Iterator[Field]:
        try:
            yield from (Field(text, place) for text in texts_of(self.evaluated(node, 0)))
        except (ValueError, TypeError, ArithmeticError):
            shown = " ".join(ast.unparse(node).split())[:60]
            yield Field(shown, place, f"{shown} is known when the program runs")

    def evaluated(self, node: ast.expr, depth: int) -> Any:
        """The value of constants, names, lists, tables, f-strings and sums of them. Raises ValueError for others."""
        self._steps += 1
        if depth > MAX_DEPTH or self._steps > MAX_STEPS:
            raise ValueError
        match node:
            case ast.Constant():
                return node.value
            case ast.Name(id=name):
                value = self.lookup(name)
                if value is None:
                    return _function_name(name)
                return self.evaluated(value, depth + 1)
            case ast.List(elts=members) | ast.Tuple(elts=members):
                return [self.evaluated(member, depth + 1) for member in members]
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self.evaluated(operand, depth + 1)
            case ast.BinOp(left=first, op=operator, right=right):
                return _calculated(self.evaluated(first, depth + 1), operator, self.evaluated(right, depth + 1))
            case ast.JoinedStr(values=parts):
                return "".join(str(self.evaluated(part, depth + 1)) for part in parts)
            case ast.FormattedValue(value=value, format_spec=None, conversion=-1):
                return self.evaluated(value, depth + 1)
            case ast.Dict(keys=keys, values=members) if None not in keys:
                pairs = zip(keys, members, strict=True)
                return {self.evaluated(key, depth + 1): self.evaluated(item, depth + 1) for key, item in pairs if key}
            case ast.Call(func=ast.Name(id="dict"), args=[], keywords=keywords):
                return {word.arg: self.evaluated(word.value, depth + 1) for word in keywords if word.arg}
            case ast.Call(keywords=[], args=[ast.Constant(value=str() as name), *defaults]):
                if ast.unparse(node.func) in ("os.environ.get", "os.getenv", "environ.get", "getenv"):
                    default = self.evaluated(defaults[0], depth + 1) if defaults else None
                    return _required(variable_value(name, self._environ, default))
            case ast.Subscript(value=table, slice=ast.Constant(value=str() as name)):
                if ast.unparse(table) in ("os.environ", "environ"):
                    return _required(variable_value(name, self._environ, None))
            case ast.Attribute(value=ast.Name(id=name), attr=attribute):
                return self.evaluated(self._attribute(self.lookup(name), attribute), depth + 1)
        raise ValueError

    def _given(self, name: str) -> ast.expr | None:
        """The value of an option that the program is started with. Raises ValueError if it is unknown."""
        flag = self.options.get(name)
        if flag is None:
            return None
        if flag.problem or len(flag.values) > 1:
            raise ValueError(name)
        self.used.add(name)
        text = flag.text if flag.values else "True"
        try:
            return ast.Constant(ast.literal_eval(text))
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return ast.Constant({"true": True, "false": False}.get(text.lower(), text))

    def _attribute(self, call: ast.expr | None, name: str) -> ast.expr:
        """The value of an attribute of `CLASS(…)`: as given there, else the default of a dataclass or of argparse.

        Raises ValueError for others.
        """
        if isinstance(call, ast.Call) and called_name(call) in ("parse_args", "parse_known_args"):
            if name not in self._defaults:
                raise ValueError(name)
            return self._given(name) or self._defaults[name]
        if not isinstance(call, ast.Call) or (kind := self.classes.get(called_name(call))) is None or call.args:
            raise ValueError(name)
        if option := self._given(name):
            return option
        values = {word.arg: word.value for word in call.keywords}
        if None in values:
            raise ValueError(name)
        for node in kind.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
                values.setdefault(node.target.id, node.value)
        value = values.get(name)
        if isinstance(value, ast.Call) and called_name(value) == "field":
            value = next((word.value for word in value.keywords if word.arg == "default"), None)
        if value is None:
            raise ValueError(name)
        return value


def _imports(tree: ast.Module) -> Iterator[tuple[str, tuple[str, str]]]:
    """(name here, (module, name there)) of every import; a module itself has no name there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.asname or alias.name.partition(".")[0], (alias.name, "")
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name, (node.module or "", alias.name)


def _options(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """(name, default) of the options that argparse reads."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or called_name(node) != "add_argument":
            continue
        names = [str(arg.value) for arg in node.args if isinstance(arg, ast.Constant)]
        arguments = {word.arg: word.value for word in node.keywords}
        action = arguments.get("action")
        default = arguments.get("default")
        if default is None and isinstance(action, ast.Constant) and action.value in ("store_true", "store_false"):
            default = ast.Constant(action.value == "store_false")
        name = max(names, key=len, default="").lstrip("-").replace("-", "_")
        if isinstance(dest := arguments.get("dest"), ast.Constant):
            name = str(dest.value)
        if name and default is not None:
            yield name, default


def _required(value: Any) -> Any:
    """A value that is there. Raises ValueError for None."""
    if value is None:
        raise ValueError
    return value


def _function_name(name: str) -> str:
    """A name that nothing sets is a function or an argument. Raises ValueError."""
    raise ValueError(name)


def _calculated(first: Any, operator: ast.operator, second: Any) -> Any:
    """The result of an operator between two numbers, or two texts joined. Raises ValueError for others."""
    if isinstance(first, str) and isinstance(second, str) and isinstance(operator, ast.Add):
        return first + second
    if not isinstance(first, int | float) or not isinstance(second, int | float) or max(abs(first), abs(second)) > 1e18:
        raise ValueError
    match operator:
        case ast.Add():
            return first + second
        case ast.Sub():
            return first - second
        case ast.Mult():
            return first * second
        case ast.Div():
            return first / second
        case ast.FloorDiv():
            return first // second
        case ast.Pow() if abs(second) <= MAX_EXPONENT:
            return first**second
    raise ValueError
