"""Reads configurations as flags: YAML with the line of every key, and Python by its syntax tree alone."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from slimectl.errors import SettingsError
from slimectl.settings.launch_scripts.flags import Flag, texts_of
from slimectl.settings.launch_scripts.hydra_defaults import with_defaults
from slimectl.settings.launch_scripts.shell_values import Field, checked
from slimectl.settings.launch_scripts.shell_variables import is_secret_variable
from slimectl.settings.launch_scripts.shell_words import Place, read_text

MAX_KEYS = 5_000
MAX_DEPTH = 30
MAX_BRACKETS = 100
MAX_STEPS = 20_000
MAX_EXPONENT = 64
MAX_MERGED = 100
MAX_DEFAULTS = 8
"""Mappings that `<<` takes over in one place."""
REFERENCE = re.compile(r"\$\{([\w.]+)\}")
SELECTION = re.compile(r"\$\{oc\.select:\s*([\w.]+)\s*(?:,([^${}]*))?\}")
"""OmegaConf's reference to a key that may be missing, and its default."""
ENVIRONMENT = re.compile(r"\$\{(?:oc\.)?env:(\w+)(?:,([^${}]*))?\}")
"""OmegaConf's reference to a variable of the environment, and its default."""


def yaml_flags(
    path: Path, name: str, environ: Mapping[str, str] = MappingProxyType({}), root: Path | None = None
) -> list[Flag]:
    """Return every value of a YAML file as a flag with a dotted name, and those of the files that its defaults name.

    Raises SettingsError with the line of an error.
    """
    return _resolved(_joined(path, name, root or path.parent, 0), environ)


def _joined(path: Path, name: str, root: Path, depth: int) -> list[Flag]:
    """Return the unresolved values of a YAML file and of its list of defaults."""
    if depth > MAX_DEFAULTS:
        raise SettingsError(f"{name}: defaults name one another more than {MAX_DEFAULTS} deep; write them flat")

    def read(file: Path, shown: str) -> list[Flag]:
        return _joined(file, shown, root, depth + 1)

    return with_defaults(_values(path, name), path, name, root, read)


def _values(path: Path, name: str) -> list[Flag]:
    """Return the values of a YAML file as they stand."""
    import yaml

    text = read_text(path, name)
    _refuse_nesting(text, name)
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise SettingsError(f"{name}:{line}: not valid YAML: {error.problem}") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise SettingsError(f"{name}: not valid YAML: {' '.join(str(error).split())[:80]}") from None
    if not isinstance(node, yaml.MappingNode):
        raise SettingsError(f"{name}: has no keys with values; give a configuration")
    flags = []
    for flag in _leaves(node, "", name, 0):
        flags.append(flag)
        if len(flags) > MAX_KEYS:
            raise SettingsError(f"{flag.place}: more than {MAX_KEYS} values; give a configuration")
    return flags


def _refuse_nesting(text: str, name: str) -> None:
    """Raise SettingsError for brackets that nest so deeply that the parser of YAML would take minutes."""
    depth = 0
    for position, character in enumerate(text):
        depth += (character in "[{") - (character in "]}")
        if depth > MAX_BRACKETS:
            line = text.count("\n", 0, position) + 1
            raise SettingsError(f"{name}:{line}: more than {MAX_BRACKETS} brackets inside one another; write it flat")


def _leaves(node: Any, prefix: str, file: str, depth: int) -> Iterator[Flag]:
    import yaml

    if depth > MAX_DEPTH:
        raise SettingsError(f"{file}:{node.start_mark.line + 1}: nested more than {MAX_DEPTH} deep; write it flat")
    for key, value in _merged(node.value, file):
        if not isinstance(key, yaml.ScalarNode):
            raise SettingsError(f"{file}:{key.start_mark.line + 1}: this key is not read; write NAME: VALUE")
        place = Place(file, key.start_mark.line + 1)
        name = f"{prefix}{key.value}"
        if isinstance(value, yaml.MappingNode):
            yield from _leaves(value, f"{name}.", file, depth + 1)
        elif isinstance(value, yaml.SequenceNode) and not all(
            isinstance(item, yaml.ScalarNode) for item in value.value
        ):
            paths = [_path_of(item) for item in value.value]
            fields = [Field(path, place) for path in paths if path] if all(paths) else []
            yield Flag(name, f"{name}:", tuple(fields) or (Field("…", place, "it is a list of tables"),), place)
        else:
            nodes = value.value if isinstance(value, yaml.SequenceNode) else [value]
            values = [Field(text, place) for item in nodes for text in _scalar(item)]
            yield Flag(name, f"{name}:", tuple(values), place, "" if values else NULL)


def _path_of(node: Any) -> str:
    """The path of a table of a data set; empty for others."""
    import yaml

    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    return next(
        (str(value.value) for key, value in pairs if key.value == "path" and isinstance(value, yaml.ScalarNode)), ""
    )


def _merged(pairs: Sequence[tuple[Any, Any]], file: str) -> Iterator[tuple[Any, Any]]:
    """The keys and values of a mapping: those of its own, then those that `<<` takes over from other mappings."""
    import yaml

    names: set[str] = set()
    waiting: list[Sequence[tuple[Any, Any]]] = [pairs]
    for taken in range(MAX_MERGED):
        if not waiting:
            return
        for key, value in waiting.pop(0):
            name = key.value if isinstance(key, yaml.ScalarNode) else ""
            if name == "<<":
                tables = value.value if isinstance(value, yaml.SequenceNode) else [value]
                waiting += [table.value for table in tables if isinstance(table, yaml.MappingNode)]
            elif name not in names or not taken:
                names.add(name)
                yield key, value
    mark = pairs[0][0].start_mark
    raise SettingsError(f"{file}:{mark.line + 1}: << takes over more than {MAX_MERGED} mappings; write it flat")


NULL = "it is null"


def _scalar(node: Any) -> list[str]:
    """The text of a scalar; none for null."""
    tag = node.tag.rpartition(":")[2]
    if tag == "null":
        return []
    if tag == "bool":
        return ["true" if node.value.lower() in ("true", "yes", "on") else "false"]
    return [node.value]


def _resolved(flags: list[Flag], environ: Mapping[str, str]) -> list[Flag]:
    """Replace `${key}` and `${.key}` by the value of that key, `${oc.select:KEY,DEFAULT}` by that or the default, and
    `${oc.env:NAME,DEFAULT}` by the variable's; other resolvers are unknown, and nulls are left out.
    """
    by_name = {flag.name: flag for flag in flags}
    resolved: dict[str, Field] = {}

    def variable(match: re.Match[str]) -> str:
        name, default = match.groups()
        known = _variable(name, environ, None if default is None else default.strip(" '\""))
        return match[0] if known is None else known

    def selection(match: re.Match[str]) -> str:
        target = by_name.get(match[1])
        return f"${{{match[1]}}}" if target and target.values else (match[2] or "null").strip(" '\"")

    def value(owner: str, field: Field, depth: int = 0) -> Field:
        full = SELECTION.sub(selection, ENVIRONMENT.sub(variable, field.text))
        full = checked(REFERENCE.sub(lambda match: f"${{{_absolute(match[1], owner)}}}", full), field.place)
        for name in REFERENCE.findall(full)[:MAX_DEPTH]:
            target = by_name.get(name)
            if target is None or len(target.values) != 1 or depth > MAX_DEPTH:
                return Field(full, field.place, f"{full} refers to what is not in this file")
            if name not in resolved:
                resolved[name] = value(name, target.values[0], depth + 1)
            if resolved[name].unknown:
                return resolved[name]
            full = checked(full.replace(f"${{{name}}}", resolved[name].text), field.place)
        if "${" in full:
            return Field(full, field.place, f"{full} is resolved when that program runs")
        return Field(full, field.place, field.unknown)

    present = [flag for flag in flags if flag.condition != NULL]
    values = [(flag, tuple(value(flag.name, item) for item in flag.values)) for flag in present]
    return [replace(flag, values=fields) for flag, fields in values if [field.text for field in fields] != ["null"]]


def _absolute(reference: str, owner: str) -> str:
    """Return the whole name of a reference; a dot at its start is the table of `owner`, each further one that above."""
    name = reference.lstrip(".")
    dots = len(reference) - len(name)
    return name if not dots else ".".join([*owner.split(".")[:-dots], name])


def _variable(name: str, environ: Mapping[str, str], default: Any) -> Any:
    """The value of a variable of the environment; that of a secret is a reference, and never copied into settings."""
    return f"env:{name}" if is_secret_variable(name) else environ.get(name, default)


DERIVED = (
    "map",
    "shuffle",
    "select",
    "filter",
    "train_test_split",
    "remove_columns",
    "rename_column",
    "cast_column",
    "take",
)
"""Methods of a data set that leave it what it was, in other rows and columns."""
TRAINS = re.compile(
    r"(GRPO|RLOO|PPO|SFT|DPO|Reward|KTO|BCO|ORPO|CPO|GKD|MiniLLM|OnlineDPO|NashMD|XPO|PRM)Config"
)  # fmt: skip
"""Classes that say by their names what trains."""
CONFIGURATIONS = re.compile(r"\w*(?:Config|Arguments|Trainer)$")


def python_flags(path: Path, name: str, environ: Mapping[str, str] = MappingProxyType({})) -> list[Flag]:
    """The keyword arguments of the configurations in a Python file as flags; the file is parsed and never run."""
    text = read_text(path, name)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # of an escape or a number that Python only frowns at
            tree = ast.parse(text, filename=name)
    except SyntaxError as error:
        raise SettingsError(f"{name}:{error.lineno}: not valid Python: {error.msg}") from None
    except (RecursionError, MemoryError, ValueError):
        raise SettingsError(f"{name}: is nested too deeply for a configuration") from None
    flags: list[Flag] = []
    try:
        source = _PythonFile(tree, name, environ)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and CONFIGURATIONS.match(_called(node)):
                flags += source.flags_of(node)
    except RecursionError:
        raise SettingsError(f"{name}: is nested too deeply for a configuration") from None
    if len(flags) > MAX_KEYS:
        raise SettingsError(f"{name}: more than {MAX_KEYS} values; give a configuration")
    return flags


def _root(node: ast.expr | None) -> str:
    """The name that a chain of calls begins with, as in `rows.map(f).select(n)`."""
    while isinstance(node, ast.Call | ast.Attribute | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _called(call: ast.Call) -> str:
    """The last name of what is called."""
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


class _PythonFile:
    """Names of a module that are set once, to values that can be read without running it."""

    def __init__(self, tree: ast.Module, name: str, environ: Mapping[str, str]) -> None:
        self._name = name
        self._environ = environ
        self._steps = 0
        self._values: dict[str, ast.expr | None] = {}
        self._classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
        attributes = [node for kind in self._classes.values() for node in kind.body]
        for node in ast.walk(tree):
            if node in attributes:
                continue
            targets = node.targets if isinstance(node, ast.Assign) else []
            if isinstance(node, ast.AnnAssign | ast.AugAssign | ast.For):
                targets = [node.target]
            value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
            for target in targets:
                if isinstance(target, ast.Name) and not (target.id in self._values and _root(value) == target.id):
                    self._values[target.id] = None if target.id in self._values else value

    def flags_of(self, call: ast.Call) -> Iterator[Flag]:
        """The arguments of a configuration; those of nested ones come by themselves."""
        kind = _called(call)
        prefix = "lora_" if kind == "LoraConfig" else "trainer." if kind.endswith("Trainer") else ""
        place = Place(self._name, call.lineno)
        if TRAINS.fullmatch(kind):
            yield Flag("configuration", "class", (Field(kind, place),), place)
        for keyword in call.keywords:
            line = Place(self._name, keyword.value.lineno)
            if keyword.arg is None:
                yield from self._spread(kind, keyword.value, line)
                continue
            name = keyword.arg.removeprefix("lora_") if prefix == "lora_" else keyword.arg
            node = self._dataset(keyword.value)
            if isinstance(node, ast.Constant) and node.value is None:
                continue
            if isinstance(node, ast.Call) and CONFIGURATIONS.match(_called(node)):
                continue
            yield Flag(f"{prefix}{name}", f"{keyword.arg} =", tuple(self._fields(node, line)), line)

    def _spread(self, kind: str, node: ast.expr, line: Place) -> Iterator[Flag]:
        """The arguments that `**TABLE` stands for."""
        try:
            table = self._evaluated(node, 0)
        except (ValueError, TypeError, ArithmeticError):
            table = None
        if not isinstance(table, dict):
            yield Flag("**", f"{kind} **", (Field("", line, "it is a table that the program makes"),), line)
            return
        for name, value in table.items():
            if value is not None:
                yield Flag(str(name), f"{name} =", tuple(Field(text, line) for text in texts_of(value)), line)

    def _dataset(self, node: ast.expr) -> ast.expr:
        """The path that `load_dataset(PATH)` reads, through names that are set once."""
        for _ in range(MAX_DEPTH):
            if isinstance(node, ast.Name) and self._values.get(node.id) is not None:
                node = self._values[node.id] or node
            elif isinstance(node, ast.Subscript):
                node = node.value
            elif isinstance(node, ast.Call) and _called(node) in DERIVED:
                node = node.func.value if isinstance(node.func, ast.Attribute) else node
            elif isinstance(node, ast.Call) and _called(node) == "load_dataset" and node.args:
                return node.args[0]
            else:
                return node
        return node

    def _fields(self, node: ast.expr, place: Place) -> Iterator[Field]:
        try:
            yield from (Field(text, place) for text in texts_of(self._evaluated(node, 0)))
        except (ValueError, TypeError, ArithmeticError):
            shown = " ".join(ast.unparse(node).split())[:60]
            yield Field(shown, place, f"{shown} is known when the program runs")

    def _evaluated(self, node: ast.expr, depth: int) -> Any:
        """The value of constants, names, lists, tables, f-strings and sums of them. Raises ValueError for others."""
        self._steps += 1
        if depth > MAX_DEPTH or self._steps > MAX_STEPS:
            raise ValueError
        match node:
            case ast.Constant():
                return node.value
            case ast.Name(id=name):
                value = self._values.get(name)
                if value is None:
                    return _function_name(name)
                return self._evaluated(value, depth + 1)
            case ast.List(elts=members) | ast.Tuple(elts=members):
                return [self._evaluated(member, depth + 1) for member in members]
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._evaluated(operand, depth + 1)
            case ast.BinOp(left=first, op=operator, right=right):
                return _calculated(self._evaluated(first, depth + 1), operator, self._evaluated(right, depth + 1))
            case ast.JoinedStr(values=parts):
                return "".join(str(self._evaluated(part, depth + 1)) for part in parts)
            case ast.FormattedValue(value=value, format_spec=None, conversion=-1):
                return self._evaluated(value, depth + 1)
            case ast.Dict(keys=keys, values=members) if None not in keys:
                pairs = zip(keys, members, strict=True)
                return {self._evaluated(key, depth + 1): self._evaluated(item, depth + 1) for key, item in pairs if key}
            case ast.Call(func=ast.Name(id="dict"), args=[], keywords=keywords):
                return {word.arg: self._evaluated(word.value, depth + 1) for word in keywords if word.arg}
            case ast.Call(keywords=[], args=[ast.Constant(value=str() as name), *defaults]):
                if ast.unparse(node.func) in ("os.environ.get", "os.getenv", "environ.get", "getenv"):
                    default = self._evaluated(defaults[0], depth + 1) if defaults else None
                    return _required(_variable(name, self._environ, default))
            case ast.Subscript(value=table, slice=ast.Constant(value=str() as name)):
                if ast.unparse(table) in ("os.environ", "environ"):
                    return _required(_variable(name, self._environ, None))
            case ast.Attribute(value=ast.Name(id=name), attr=attribute):
                return self._evaluated(self._attribute(self._values.get(name), attribute), depth + 1)
        raise ValueError

    def _attribute(self, call: ast.expr | None, name: str) -> ast.expr:
        """The value of an attribute of `CLASS(…)`: as it is given there, else the default of a dataclass.

        Raises ValueError for others.
        """
        if not isinstance(call, ast.Call) or (kind := self._classes.get(_called(call))) is None or call.args:
            raise ValueError(name)
        values = {word.arg: word.value for word in call.keywords}
        if None in values:
            raise ValueError(name)
        for node in kind.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
                values.setdefault(node.target.id, node.value)
        value = values.get(name)
        if isinstance(value, ast.Call) and _called(value) == "field":
            value = next((word.value for word in value.keywords if word.arg == "default"), None)
        if value is None:
            raise ValueError(name)
        return value


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
