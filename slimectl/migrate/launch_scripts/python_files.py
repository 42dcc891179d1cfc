"""Reads the configurations and trainers of a Python file as flags, from its syntax tree. Nothing in it is run."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from slimectl.errors import SettingsError
from slimectl.migrate.launch_scripts.documents import MAX_KEYS
from slimectl.migrate.launch_scripts.flags import Flag, texts_of
from slimectl.migrate.launch_scripts.foreign import (
    CALLS,
    LIBRARIES,
    READ,
    algorithm_of,
    is_training_class,
    program_purpose,
)
from slimectl.migrate.launch_scripts.python_expressions import source_of
from slimectl.migrate.launch_scripts.python_program import CONFIGURATIONS, Program, parsed
from slimectl.migrate.launch_scripts.python_values import (
    Function,
    Instance,
    Reference,
    Text,
    Unknown,
    Unreadable,
    plain,
)
from slimectl.migrate.launch_scripts.shell_values import Field
from slimectl.migrate.launch_scripts.shell_words import Place

DERIVED = (
    "map", "shuffle", "select", "filter", "train_test_split", "remove_columns", "rename_column", "cast_column", "take",
    "rename_columns", "select_columns", "sort", "shard", "to", "cuda",
)  # fmt: skip
"""Methods that return the same data set or model, with other rows and columns or on another device."""
CHANGES = ("map", "select", "filter", "train_test_split", "rename_column", "rename_columns", "take", "shard")
"""The subset that changes which rows, columns or values a training reads."""
ORIGINS: dict[str, tuple[str, ...]] = {
    "load_dataset": ("0", "path"), "load_from_disk": ("0", "dataset_path"),
    "from_pretrained": ("0", "pretrained_model_name_or_path", "model_name"), "get_soft_overlong_punishment": (),
}  # fmt: skip
"""Functions whose result is determined by one argument, by position or by name."""
DATASETS = ("load_dataset", "load_from_disk")
FORMATS = ("json", "csv", "parquet", "text", "arrow")
"""First arguments of `load_dataset` that are not data sets. The files are another argument."""
MODEL_OPTION = "model_name_or_path"
ADAPTERS = ("LoraConfig", "get_peft_model")
STACKS = ("openrlhf", "llamafactory", "swift", "verl", "roll", "slime", "axolotl", "nemo_rl")
OF_STACK = "not of TRL. Give the script that starts this program"
POSITIONS = {
    "GRPOTrainer": ("model", "reward_funcs"), "RLOOTrainer": ("model", "reward_funcs"), **dict.fromkeys(ADAPTERS, ()),
}  # fmt: skip
"""Names of positional arguments. Other trainers start with the model, other configurations with the output folder."""


def python_flags(
    path: Path, name: str, environ: Mapping[str, str] = MappingProxyType({}), *, line: int | None = None
) -> list[Flag]:
    """The keyword arguments of the configurations in a Python file as flags. The file is parsed and never run.

    `line` selects one of several trainings. Raises SettingsError if there are several, or if the file has none.
    """
    program = Trainings(path, name, environ)
    flags = program.flags(line)
    if not any(flag.name == "configuration" for flag in flags) and (purpose := _purpose(program.tree, name)):
        raise SettingsError(purpose)
    return flags


def program_flags(path: Path, name: str, environ: Mapping[str, str], options: Sequence[Flag]) -> list[Flag]:
    """The flags of a program that is started with options. Options that it reads by argparse determine its values.

    Options that determine no value follow unchanged.
    """
    program = Trainings(path, name, environ, options)
    flags = program.flags(None)
    if MODEL_OPTION in [flag.name.replace("-", "_") for flag in options]:
        flags = [flag for flag in flags if flag.name != "trainer.model" or MODEL_OPTION not in "".join(flag.texts)]
    return [*flags, *(flag for flag in options if flag.name not in program.used)]


def has_trainer(path: Path, name: str) -> bool:
    """Whether a Python file uses a class that trains."""
    program = Trainings(path, name, {})
    program.guarded(lambda: program.run(program.tree.body))
    return bool(program.references())


def _imports(tree: ast.Module) -> dict[str, str]:
    """The names that a file imports anywhere, with their modules."""
    return {
        alias.asname or alias.name.partition(".")[0]: getattr(node, "module", alias.name) or ""
        for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names
    }  # fmt: skip


def _purpose(tree: ast.Module, name: str) -> str:
    """The sentence about a file without a known training class, or an empty string if nothing is known about it."""
    modules = _imports(tree)
    calls: dict[str, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func).rpartition(".")[2]
            calls.setdefault(f"{modules.get(called, '').partition('.')[0]}.{called}", node.lineno)
    by_name = program_purpose(modules.values(), calls)
    trainers = [(line, called) for called, line in calls.items() if called.endswith("Trainer") and called not in CALLS]
    if trainers and by_name not in LIBRARIES.values():
        line, called = min(trainers)
        root, _, kind = called.partition(".")
        if root in STACKS:
            return f"{Place(name, line)}: {kind} is of {root}, {OF_STACK}"
        return f"{Place(name, line)}: {kind} is not a trainer that is read. {READ}"
    return by_name and f"{name}: {by_name}"


@dataclass(eq=False)
class Record:
    """A configuration or trainer that a program creates: its class, its location, and its arguments as expressions."""

    name: str
    """The class of the library with its module."""
    own_name: str
    """The name of the class in the file."""
    node: ast.AST
    result: Instance
    nodes: dict[str, ast.AST]
    is_called: bool = True

    @property
    def kind(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def line(self) -> int:
        return getattr(self.node, "lineno", 1)


class Trainings(Program):
    """A program that creates configurations and trainers of TRL."""

    max_loop = 500

    def __init__(self, path: Path, name: str, environ: Mapping[str, str], options: Sequence[Flag] = ()) -> None:
        super().__init__(parsed(path, name), name, environ, options)
        self.path = path
        self.records: dict[ast.AST, Record] = {}

    def flags(self, line: int | None) -> list[Flag]:
        """The arguments of the configurations and trainers as flags. Raises SettingsError for several trainings."""
        self._follow_all(line)
        try:
            skipped = self._skipped(line)
            flags = list(self._training(skipped))
            for record in self.records.values():
                if record not in skipped:
                    flags += self._flags_of(record)
        except RecursionError:
            raise SettingsError(f"{self.name}: is nested too deeply to be read") from None
        if len(flags) > MAX_KEYS:
            raise SettingsError(f"{self.name}: more than {MAX_KEYS} values. Give a configuration")
        return flags

    def _follow_all(self, line: int | None) -> None:
        """Follow the module. If it creates no trainer itself, follow its functions that create something."""
        is_short = self.guarded(lambda: self.run(self.tree.body))
        has_trainer = any(record.kind.endswith("Trainer") for record in self.records.values())
        is_picked = line is None or line in [record.line for record in self.records.values()]
        for node in ast.walk(self.tree) if not has_trainer or not is_picked else ():
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and self._makes(node):
                parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                unknown = {
                    item.arg: _unknown(ast.Name(item.arg)) for item in parameters
                    if not isinstance(self.globals.get(ast.unparse(item.annotation or item)), ast.ClassDef)
                }  # fmt: skip
                is_short = self.guarded(partial(self.follow, Function(node), [], unknown)) and is_short
        if not is_short and (self.records or self.references()):
            raise self.limit()

    def _makes(self, function: ast.AST) -> bool:
        """Whether a function that was not followed creates a configuration or a trainer."""
        calls = [node for node in ast.walk(function) if isinstance(node, ast.Call) and node not in self.records]
        names = [ast.unparse(call.func).rpartition(".")[2] for call in calls]
        return function not in self.followed and any(map(CONFIGURATIONS.match, names))

    def references(self) -> list[Record]:
        """Names of classes that train, whether they are called or not."""
        names = [node for node in ast.walk(self.tree) if isinstance(node, ast.Name)]
        records = [
            Record(self.library_class(self.globals.get(node.id), node.id), node.id, node, Instance(), {}, False)
            for node in names
        ]
        return [record for record in records if is_training_class(record.kind)]

    def apply(self, function: Any, call: ast.Call, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        if isinstance(function, Unknown) and isinstance(call.func, ast.Name):
            function = Reference(call.func.id)
        name = self.library_class(function, "")
        kind, own_name = name.rpartition(".")[2], getattr(function, "name", "").rpartition(".")[2]
        is_own = isinstance(function, ast.ClassDef) and name == own_name and not is_training_class(kind)
        if is_own or CONFIGURATIONS.match(kind) is None or not isinstance(function, Reference | ast.ClassDef):
            return super().apply(function, call, arguments, keywords)
        positions = POSITIONS.get(kind, ("model",) if kind.endswith("Trainer") else ("output_dir",))
        spread = [word.value for word in call.keywords if word.arg is None]
        expressions = dict(zip(positions, call.args, strict=False)) | {word.arg: word.value for word in call.keywords}
        named = dict(zip(positions, arguments, strict=False)) | keywords
        nodes: dict[str, ast.AST] = {key: expressions.get(key, (*spread, call)[0]) for key in named}
        result = Instance(None, named, name)
        if isinstance(function, ast.ClassDef) and not kind.endswith("Trainer"):
            result.attributes |= self.instance(function, arguments, keywords).attributes
            nodes = _defaults(function) | nodes
        if (record := self.records.get(call)) is not None:
            before = record.result.attributes
            record.result.attributes = {
                key: value if before.get(key) == value else _unknown(nodes.get(key, call))
                for key, value in (before | result.attributes).items()
            }
        record = self.records.setdefault(call, Record(name, own_name, call, result, nodes))
        if kind == "get_peft_model":
            return arguments[0] if arguments else keywords.get("model")
        return Instance(None, {}, name) if kind.endswith("Trainer") else record.result

    def parsed_object(self, kind: Any) -> Any:
        result, name = super().parsed_object(kind), self.library_class(kind, "")
        if is_training_class(name.rpartition(".")[2]):
            node = kind if isinstance(kind, ast.ClassDef) else ast.Pass()
            self.records[node] = Record(name, name, node, result, _defaults(node), is_called=False)
        return result

    def store(self, target: ast.expr, value: Any) -> None:
        super().store(target, value)
        owner = self.value(target.value) if isinstance(target, ast.Attribute) else None
        for record in self.records.values():
            if isinstance(target, ast.Attribute) and record.result is owner:
                record.nodes[target.attr] = target

    def attribute(self, owner: Any, name: str) -> Any:
        return owner if name == "[]" else super().attribute(owner, name)

    def call_object(self, owner: Instance, name: str, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        if name in CHANGES and owner.name.rpartition(".")[2] in DATASETS:
            before = owner.attributes.get("changes", "").split()
            owner.attributes["changes"] = " ".join(dict.fromkeys([*before, name]))
        return owner if name in DERIVED else super().call_object(owner, name, arguments, keywords)

    def call_reference(self, name: str, call: ast.Call, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        if name.rpartition(".")[2] in ORIGINS:
            return Instance(None, {str(number): item for number, item in enumerate(arguments)} | keywords, name)
        return super().call_reference(name, call, arguments, keywords)

    def _skipped(self, line: int | None) -> list[Record]:
        """The trainings that `line` did not select."""
        called = [record for record in self.records.values() if record.is_called and is_training_class(record.kind)]
        picked = next((record.kind for record in called if record.line == line), "")
        if line is not None and not picked:
            lines = ", ".join(map(str, sorted({record.line for record in called}))) or "none"
            raise SettingsError(f"{self.name}: --line {line} starts no training. Lines that do: {lines}")
        return [
            record for record in called if picked and record.line != line
            and (algorithm_of(record.kind) != algorithm_of(picked) or record.kind == picked)
        ]  # fmt: skip

    def _training(self, skipped: Sequence[Record]) -> Iterator[Flag]:
        """The class that determines the training. Raises SettingsError if there are several."""
        present = [
            record for record in self.records.values() if record not in skipped and is_training_class(record.kind)
        ]
        called = [record for record in present if record.is_called]
        records = called or present or self.references()
        algorithms = {algorithm_of(record.kind) for record in records}
        configurations = [record for record in called if not record.kind.endswith("Trainer")]
        if len(algorithms) > 1 or len(configurations) > 1:
            lines = sorted((record.line, record.kind) for record in records)
            places = ", ".join(dict.fromkeys(f"{kind} in line {number}" for number, kind in lines))
            remedy = "Pick one by --line N" if called else "Read a copy that has one"
            raise SettingsError(f"{self.name}: has several trainings ({places}). {remedy}")
        for record in records[:1]:
            place = Place(self.name, record.line)
            yield from self._origin(record, place)
            yield Flag("configuration", "class", (Field(record.kind, place),), place)

    def _origin(self, record: Record, place: Place) -> Iterator[Flag]:
        """Yield a flag for a trainer of your own. Raises SettingsError for a class of another stack or of this file."""
        kind, (root, _, module) = record.kind, record.name.partition(".")
        if isinstance(self.globals.get(record.name), ast.ClassDef):
            raise SettingsError(f"{place}: {kind} is a class of this file, not of TRL, and what it trains is not read")
        local_root = _imports(self.tree).get(record.own_name, "").partition(".")[0]
        if root := next((stack for stack in (root, local_root) if stack in STACKS), ""):
            raise SettingsError(f"{place}: {kind} is of {root}, {OF_STACK}")
        if module and record.name.partition(".")[0] not in ("trl", "unsloth"):
            yield Flag("trainer.class", "class", (Field(record.name, place),), place)

    def _flags_of(self, record: Record) -> Iterator[Flag]:
        """The arguments of a configuration. Nested configurations have flags of their own."""
        kind, place = record.kind, Place(self.name, record.line)
        is_adapter, is_trainer = kind in ADAPTERS, kind.endswith("Trainer")
        if is_adapter:
            yield Flag("use_peft", kind, (Field("true", place),), place)
            yield Flag("peft_class", "class", (Field(kind, place),), place)
        if is_trainer and record.own_name in self.globals and record.own_name != kind:
            yield Flag("trainer.class", "class", (Field(record.own_name, place),), place)
        for name, value in record.result.attributes.items():
            node = record.nodes.get(name, record.node)
            line = Place(self.name, getattr(node, "lineno", record.line))
            if name == "**":
                yield Flag("**", f"{kind} **", (Field("", line, "it is a table that the program makes"),), line)
            elif name == "reward_funcs":
                fields = tuple(reward_fields(self, self.path, value, node))
                yield Flag("trainer.reward_funcs", f"{name} =", fields, line)
            elif value is not None:
                prefix = "lora_" if is_adapter else "trainer." if is_trainer else ""
                key = f"{prefix}{name.removeprefix('lora_') if is_adapter else name}"
                yield from self._argument(key, f"{name} =", value, node, line)

    def _argument(self, name: str, spelling: str, value: Any, node: ast.AST, line: Place) -> Iterator[Flag]:
        """A value as a flag, or a table as a flag for each of its keys."""
        if isinstance(value, Instance) and any(record.result is value for record in self.records.values()):
            return
        origin = _origin_of(value)
        if isinstance(origin, dict) and origin:
            for key, member in origin.items():
                yield Flag(f"{name}.{key}", f"{spelling[:-2]}.{key} =", tuple(_fields(member, node, line)), line)
            return
        yield Flag(name, spelling, tuple(_fields(origin, node, line)), line)
        if name.endswith("train_dataset") and isinstance(value, Instance) and value.name.endswith("load_dataset"):
            config = value.attributes.get("1", value.attributes.get("name"))
            if config is not None:
                yield Flag("dataset_config", "load_dataset", tuple(_fields(config, node, line)), line)
        changes = value.attributes.get("changes") if isinstance(value, Instance) else None
        if changes and name == "trainer.train_dataset":
            yield Flag("trainer.dataset_changes", f"{spelling[:-2]}:", (Field(changes, line),), line)


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def reward_fields(program: Program, path: Path, value: Any, node: ast.AST) -> Iterator[Field]:
    """Reward functions by path (`FILE.py:NAME` or `MODULE:NAME`), and models by name."""
    nodes = node.elts if isinstance(node, ast.List | ast.Tuple) else []
    members = value if isinstance(value, list) else [value]
    for number, member in enumerate(members):
        expression = nodes[number] if len(nodes) == len(members) else node
        yield _reward(program, path, member, expression)


def _reward(program: Program, path: Path, value: Any, node: ast.AST) -> Field:
    place = Place(program.name, getattr(node, "lineno", 1))
    match value:
        case Text(unknown=""):
            return Field(str(value), place)
        case Instance(name=name) if name.endswith("get_soft_overlong_punishment"):
            sizes = list(value.attributes.values())
            if len(sizes) == 2 and all(isinstance(size, int) for size in sizes):
                return Field(f"get_soft_overlong_punishment:{sizes[0]}:{sizes[1]}", place)
        case Reference(name=name) if "." in name:
            module, _, function = name.rpartition(".")
            file = f"{module.replace('.', '/')}.py"
            source = Path(program.name).parent / file if (path.parent / file).is_file() else module
            return Field(f"{source}:{function}", place)
        case Function(node=ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name), owner=None) if (
            value.node in program.tree.body
        ):
            if _trains_on_import(program):
                return Field(name, place, f"importing this file would start its training. {_move(name)}")
            return Field(f"{program.name}:{name}", place)
        case Reference(name=name) | Function(node=ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name)):
            return Field(name, place, f"{name} is not a function at the top of this file. {_move(name)}")
    shown = (value.source if isinstance(value, Unknown) else source_of(node))[:60]
    return Field(shown, place, f"{shown} is made when the program runs")


def _move(name: str) -> str:
    return f"Move {name} to a file that holds only rewards and give FILE.py:{name}"


def _trains_on_import(program: Program) -> bool:
    """Whether a statement at the top of the file creates a trainer or trains."""
    for statement in program.tree.body:
        is_guarded = isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test)
        if is_guarded or isinstance(statement, (*FUNCTIONS, ast.ClassDef)):
            continue
        for node in ast.walk(statement):
            name = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
            if name in ("train", "main") or is_training_class(program.library_class(program.globals.get(name), name)):
                return True
    return False


def _defaults(node: ast.AST) -> dict[str, ast.AST]:
    """The fields of a class with the expressions of their defaults."""
    return {
        item.target.id: item.value for item in getattr(node, "body", [])
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and item.value
    }  # fmt: skip


def _unknown(node: ast.AST) -> Unknown:
    shown = source_of(node)[:60]
    return Unknown(shown, f"{shown} is known when the program runs")


def _origin_of(value: Any) -> Any:
    """The path that `load_dataset(PATH)` or `from_pretrained(PATH)` reads, or any other value itself."""
    names = ORIGINS.get(value.name.rpartition(".")[2], ()) if isinstance(value, Instance) else ()
    path = next((value.attributes[name] for name in names if name in value.attributes), value)
    return value.attributes.get("data_files", value) if isinstance(path, Text) and str(path) in FORMATS else path


def _fields(value: Any, node: ast.AST, place: Place) -> Iterator[Field]:
    try:
        yield from (Field(text, place) for text in texts_of(plain(value)))
    except Unreadable as error:
        shown = (value.source if isinstance(value, Unknown) else source_of(node))[:60]
        is_general = str(error) in ("", "it is an object") or str(error).endswith("known when the program runs")
        yield Field(shown, place, f"{shown} is known when the program runs" if is_general else str(error))
