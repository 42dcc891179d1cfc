"""Reads the configurations in a Python file as flags, by its syntax tree alone; nothing of it is run."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from slimectl.errors import SettingsError
from slimectl.settings.launch_scripts.documents import MAX_DEPTH, MAX_KEYS
from slimectl.settings.launch_scripts.flags import Flag, texts_of
from slimectl.settings.launch_scripts.foreign import algorithm_of, is_training_class, program_purpose
from slimectl.settings.launch_scripts.python_rewards import reward_fields
from slimectl.settings.launch_scripts.python_values import CONFIGURATIONS, PythonFile, called_name
from slimectl.settings.launch_scripts.shell_values import Field
from slimectl.settings.launch_scripts.shell_words import Place, read_text

DERIVED = (
    "map", "shuffle", "select", "filter", "train_test_split", "remove_columns", "rename_column", "cast_column", "take",
)  # fmt: skip
"""Methods of a data set that leave it what it was, in other rows and columns."""
FORMATS = ("json", "csv", "parquet", "text", "arrow")
"""First arguments of `load_dataset` that are no data set: the files are another argument."""
ADAPTERS = ("LoraConfig", "get_peft_model")
STACKS = ("openrlhf", "llamafactory", "swift", "verl", "roll", "slime", "axolotl", "nemo_rl")
POSITIONS = {"GRPOTrainer": ("model", "reward_funcs"), "RLOOTrainer": ("model", "reward_funcs")}
"""Arguments of trainers by position; the first one of any other is the model."""


def python_flags(
    path: Path, name: str, environ: Mapping[str, str] = MappingProxyType({}), *, line: int | None = None
) -> list[Flag]:
    """The keyword arguments of the configurations in a Python file as flags; the file is parsed and never run.

    `line` picks one of several trainings. Raises SettingsError if there are several, or if the file has none.
    """
    source = _Trainings(_parsed(path, name), path, name, environ)
    flags = _flags(source, line)
    if not any(flag.name == "configuration" for flag in flags) and (purpose := source.purpose()):
        raise SettingsError(f"{name}: {purpose}")
    return flags


def program_flags(path: Path, name: str, environ: Mapping[str, str], options: Sequence[Flag]) -> list[Flag]:
    """The flags of a program that is started with options: those that it reads by argparse decide its values.

    Options that decide no value follow, as they stand.
    """
    source = _Trainings(_parsed(path, name), path, name, environ)
    source.options = {flag.name.replace("-", "_"): flag for flag in options}
    flags = _flags(source, None)
    return [*flags, *(flag for flag in options if flag.name.replace("-", "_") not in source.used)]


def has_trainer(path: Path, name: str) -> bool:
    """Whether a Python file names a class that trains."""
    source = _Trainings(_parsed(path, name), path, name, {})
    return any(isinstance(n, ast.Name) and is_training_class(source.library_class(n.id)) for n in ast.walk(source.tree))


def _flags(source: _Trainings, line: int | None) -> list[Flag]:
    flags: list[Flag] = []
    try:
        flags += source.training(line)
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Call) and CONFIGURATIONS.match(source.kind(node)) and not source.skips(node):
                source.enter(node)
                flags += source.flags_of(node)
        flags += source.assignments()
    except RecursionError:
        raise SettingsError(f"{source.name}: is nested too deeply for a configuration") from None
    if len(flags) > MAX_KEYS:
        raise SettingsError(f"{source.name}: more than {MAX_KEYS} values; give a configuration")
    return flags


def _parsed(path: Path, name: str) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # of an escape or a number that Python only frowns at
            return ast.parse(read_text(path, name), filename=name)
    except SyntaxError as error:
        raise SettingsError(f"{name}:{error.lineno}: not valid Python: {error.msg}") from None
    except (RecursionError, MemoryError, ValueError):
        raise SettingsError(f"{name}: is nested too deeply for a configuration") from None


class _Trainings(PythonFile):
    """The configurations and trainers that a Python file makes."""

    _skipped: frozenset[ast.AST] = frozenset()

    def training(self, line: int | None) -> Iterator[Flag]:
        """The class that says what trains. Raises SettingsError if there are several."""
        calls = [node for node in ast.walk(self.tree) if isinstance(node, ast.Call)]
        called = [(self.kind(node), node) for node in calls if is_training_class(self.kind(node))]
        references: list[tuple[str, Any]] = [
            (name, node) for node in ast.walk(self.tree)
            if isinstance(node, ast.Name) and is_training_class(name := self.library_class(node.id))
        ]  # fmt: skip
        if line is not None and any(node.lineno == line for _, node in called):
            picked = next(kind for kind, node in called if node.lineno == line)
            self._skipped = frozenset(
                node for kind, node in called
                if node.lineno != line and (algorithm_of(kind) != algorithm_of(picked) or kind == picked)
            )  # fmt: skip
            called = [(kind, node) for kind, node in called if node not in self._skipped]
        algorithms = {algorithm_of(kind) for kind, _ in called or references}
        configurations = [node for kind, node in called if not kind.endswith("Trainer")]
        if len(algorithms) > 1 or len(configurations) > 1:
            lines = sorted((node.lineno, kind) for kind, node in called or references)
            places = ", ".join(dict.fromkeys(f"{kind} in line {number}" for number, kind in lines))
            remedy = "pick one by --line N" if called else "read a copy that has one"
            raise SettingsError(f"{self.name}: has several trainings ({places}); {remedy}")
        for kind, node in (called or references)[:1]:
            place = Place(self.name, node.lineno)
            yield from self._origin(kind, place)
            yield Flag("configuration", "class", (Field(kind, place),), place)

    def _origin(self, kind: str, place: Place) -> Iterator[Flag]:
        """Yield a flag for a trainer of your own. Raises SettingsError for a class of another stack or of this file."""
        if kind in self.classes and kind not in self.imports:
            raise SettingsError(f"{place}: {kind} is a class of this file, not of TRL, and what it trains is not read")
        module = next((module for module, name in self.imports.values() if name == kind), "trl")
        root = module.partition(".")[0]
        if root in STACKS:
            raise SettingsError(f"{place}: {kind} is of {root}, not of TRL; give the script that starts this program")
        if root not in ("trl", "unsloth"):
            yield Flag("trainer.class", "class", (Field(f"{module}.{kind}", place),), place)

    def purpose(self) -> str:
        """The sentence about a file without a training class; empty where nothing is known of it."""
        calls = {called_name(node) for node in ast.walk(self.tree) if isinstance(node, ast.Call)}
        roots = {name: module.partition(".")[0] for name, (module, _) in self.imports.items()}
        return program_purpose(self.modules, {f"{roots.get(name, '')}.{name}" for name in calls})

    def skips(self, call: ast.Call) -> bool:
        """Whether a call belongs to another training than the one that was picked."""
        return call in self._skipped

    def assignments(self) -> Iterator[Flag]:
        """Arguments that are set after a configuration is made, as in `config.beta = 0.1`."""
        for node in ast.walk(self.tree):
            if not isinstance(node, ast.Assign):
                continue
            self.enter(node)
            target = node.targets[0]
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
                call = self.lookup(target.value.id)
                kind = self.kind(call) if isinstance(call, ast.Call) and not self.skips(call) else ""
                if is_training_class(kind) and not kind.endswith("Trainer"):
                    keyword = ast.keyword(target.attr, node.value)
                    yield from self._argument(target.attr, keyword, Place(self.name, node.lineno))

    def flags_of(self, call: ast.Call) -> Iterator[Flag]:
        """The arguments of a configuration; those of nested ones come by themselves."""
        kind, own_name = self.kind(call), called_name(call)
        is_adapter, is_trainer = kind in ADAPTERS, kind.endswith("Trainer")
        place = Place(self.name, call.lineno)
        if is_adapter:
            yield Flag("use_peft", kind, (Field("true", place),), place)
            yield Flag("peft_class", "class", (Field(kind, place),), place)
        if is_trainer and own_name != kind and own_name in self.classes:
            yield Flag("trainer.class", "class", (Field(own_name, place),), place)
        for keyword in self._keywords(call, kind):
            line = Place(self.name, keyword.value.lineno)
            if keyword.arg is None:
                yield from self._spread(kind, keyword.value, line)
            elif keyword.arg == "reward_funcs":
                fields = tuple(reward_fields(self, keyword.value, line))
                yield Flag("trainer.reward_funcs", f"{keyword.arg} =", fields, line)
            else:
                name = keyword.arg.removeprefix("lora_") if is_adapter else keyword.arg
                prefix = "lora_" if is_adapter else "trainer." if is_trainer else ""
                yield from self._argument(f"{prefix}{name}", keyword, line)

    def _keywords(self, call: ast.Call, kind: str) -> Iterator[ast.keyword]:
        """Arguments by name: those of the call, and the defaults of a class of the file's own."""
        positions = POSITIONS.get(kind, ("model",) if kind.endswith("Trainer") else ())
        if kind in ADAPTERS:
            positions = ()
        elif not positions:
            positions = ("output_dir",)
        yield from (ast.keyword(name, value) for name, value in zip(positions, call.args, strict=False))
        yield from call.keywords
        named = {word.arg for word in call.keywords}
        definition = self.classes.get(called_name(call))
        for node in definition.body if definition and not kind.endswith("Trainer") else []:
            match node:
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as default) if name not in named:
                    yield ast.keyword(name, default)

    def _argument(self, name: str, keyword: ast.keyword, line: Place) -> Iterator[Flag]:
        """A value as a flag; a table as a flag for each of its keys."""
        node = self._dataset(keyword.value)
        if isinstance(node, ast.Constant) and node.value is None:
            return
        if isinstance(node, ast.Call) and CONFIGURATIONS.match(self.kind(node)):
            return
        table = self.value(node)
        if isinstance(table, dict) and table:
            for key, value in table.items():
                fields = tuple(Field(text, line) for text in texts_of(value))
                yield Flag(f"{name}.{key}", f"{keyword.arg}.{key} =", fields, line)
            return
        yield Flag(name, f"{keyword.arg} =", tuple(self.fields(node, line)), line)
        if name.endswith("train_dataset") and (config := self._dataset_config(keyword.value)):
            yield Flag("dataset_config", "load_dataset", tuple(self.fields(config, line)), line)

    def _spread(self, kind: str, node: ast.expr, line: Place) -> Iterator[Flag]:
        """The arguments that `**TABLE` stands for."""
        table = self.value(node)
        if not isinstance(table, dict):
            yield Flag("**", f"{kind} **", (Field("", line, "it is a table that the program makes"),), line)
            return
        prefix = "lora_" if kind in ADAPTERS else "trainer." if kind.endswith("Trainer") else ""
        for name, value in table.items():
            if value is not None:
                key = str(name).removeprefix("lora_") if kind in ADAPTERS else str(name)
                fields = tuple(Field(text, line) for text in texts_of(value))
                yield Flag(f"{prefix}{key}", f"{name} =", fields, line)

    def _load_call(self, node: ast.expr) -> ast.expr:
        """The call that a data set or a model comes from, through names that are set once and derived data sets."""
        for _ in range(MAX_DEPTH):
            value = self.lookup(node.id) if isinstance(node, ast.Name) else None
            if value is not None:
                node = value
            elif isinstance(node, ast.Subscript) and ast.unparse(node.value) not in ("os.environ", "environ"):
                node = node.value
            elif isinstance(node, ast.Call) and called_name(node) in DERIVED and isinstance(node.func, ast.Attribute):
                node = node.func.value
            elif isinstance(node, ast.Call) and called_name(node) == "get_peft_model" and node.args:
                node = node.args[0]
            else:
                return node
        return node

    def _dataset(self, node: ast.expr) -> ast.expr:
        """The path that `load_dataset(PATH)` or `from_pretrained(PATH)` reads."""
        call = self._load_call(node)
        if not isinstance(call, ast.Call):
            return call
        arguments = {word.arg: word.value for word in call.keywords}
        if called_name(call) == "load_dataset":
            first = call.args[0] if call.args else arguments.get("path")
            if isinstance(first, ast.Constant) and first.value in FORMATS:
                return arguments.get("data_files", call)
            return first or call
        if called_name(call) == "from_pretrained":
            names = (arguments.get("pretrained_model_name_or_path"), arguments.get("model_name"), call)
            return call.args[0] if call.args else next(item for item in names if item is not None)
        return call

    def _dataset_config(self, node: ast.expr) -> ast.expr | None:
        """The configuration that `load_dataset(PATH, CONFIG)` names."""
        call = self._load_call(node)
        if not isinstance(call, ast.Call) or called_name(call) != "load_dataset":
            return None
        return call.args[1] if len(call.args) > 1 else next((w.value for w in call.keywords if w.arg == "name"), None)
