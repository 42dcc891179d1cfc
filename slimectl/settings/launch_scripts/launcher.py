"""Finds the commands that a Python launcher starts, such as slime's `execute_train`, with the line of every flag."""

from __future__ import annotations

import ast
import re
import shlex
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from slimectl.errors import SettingsError
from slimectl.settings.launch_scripts.launcher_expressions import MAX_STEPS
from slimectl.settings.launch_scripts.launcher_program import Program
from slimectl.settings.launch_scripts.launcher_values import (
    Function,
    Instance,
    Leave,
    Piece,
    Reference,
    Text,
    Unknown,
    Unreadable,
    joined,
    lifted,
    plain,
    to_text,
    truth,
)
from slimectl.settings.launch_scripts.shell import Script
from slimectl.settings.launch_scripts.shell_commands import Command
from slimectl.settings.launch_scripts.shell_values import Field
from slimectl.settings.launch_scripts.shell_variables import Note
from slimectl.settings.launch_scripts.shell_words import Place, read_text

STARTS = re.compile(r"\b(?:execute_train|exec_command|os\.system|subprocess\.\w+|exec_command_all_ray_node)\(")
"""Calls that start a command; a file without one is no launcher."""
RUNNERS = (
    "exec_command", "exec_command_all_ray_node", "os.system", "subprocess.run", "subprocess.call",
    "subprocess.check_call", "subprocess.check_output", "subprocess.Popen",
)  # fmt: skip
CLASSES = ("ExecuteTrainConfig",)
"""Classes of slime whose fields have the defaults below."""
TRACKING = "adds wandb flags if WANDB_API_KEY is set in the environment; set track.with by hand"


def launched(
    path: Path, root: Path, environ: Mapping[str, str], arguments: Sequence[Field] = (), depth: int = 0
) -> Script | None:  # fmt: skip
    """Follow a Python launcher; return the commands that it starts as a script, None if it starts none.

    `arguments` are those of the command line; `depth` counts the launchers that started this one. Raises SettingsError
    with the line of a syntax error.
    """
    name = str(path)
    text = read_text(path, name)
    if STARTS.search(text) is None:
        return None
    launcher = Launcher(_parsed(text, name), name, environ, arguments)
    launcher.follow_all()
    script = Script(path, root, environ, depth=depth)
    script.launched = launched
    script.notes += launcher.notes
    for command, condition in launcher.commands:
        first = len(script.commands)
        _add(script, command, text.split("\n"), name)
        script.commands[first:] = [
            replace(item, condition=item.condition or condition) for item in script.commands[first:]
        ]
    return script if script.commands else None


def _parsed(text: str, name: str) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            return ast.parse(text, filename=name)
    except SyntaxError as error:
        raise SettingsError(f"{name}:{error.lineno}: not valid Python: {error.msg}") from None
    except (RecursionError, MemoryError, ValueError):
        raise SettingsError(f"{name}: is nested too deeply for a launcher") from None


class Launcher(Program):
    """A program that starts commands; those of slime's functions are known."""

    def __init__(self, tree: ast.Module, name: str, environ: Mapping[str, str], arguments: Sequence[Field]) -> None:
        super().__init__(environ)
        self.commands: list[tuple[Text, str]] = []
        """Commands, and why it is unknown whether each is started."""
        self.notes: list[Note] = []
        self._tree, self._name = tree, name
        self._options = _options(arguments)
        self._entries: list[Function] = []
        """Functions that a command line of typer starts."""
        self._may_continue = True

    def follow_all(self) -> None:
        """Follow the module, then, if it starts nothing by itself, its functions that start training."""
        self._guarded(lambda: self.run(self._tree.body))
        if self.commands or not self._may_continue:
            return
        for node in self._tree.body:
            if isinstance(node, ast.FunctionDef) and STARTS.search(ast.unparse(node)):
                self._guarded(lambda node=node: self.follow(Function(node), [], {}))

    def _guarded(self, follow: Any) -> None:
        try:
            follow()
        except Leave as leave:
            if leave.kind == "limit" and not self.commands:
                self._may_continue = False
                if "execute_train(" in ast.unparse(self._tree):
                    raise SettingsError(f"{self._name}: takes more than {MAX_STEPS} steps; take out the loop") from None
        except RecursionError:
            raise SettingsError(f"{self._name}: is nested too deeply for a launcher") from None
        self._frames.clear()
        self._pending.clear()
        self.condition = ""

    def _run_functiondef(self, statement: ast.FunctionDef) -> None:
        super()._run_functiondef(statement)
        if any(re.search(r"\.command\b", ast.unparse(item)) for item in statement.decorator_list):
            self._entries.append(Function(statement))

    def call_reference(self, name: str, call: ast.Call, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        last, lines = name.rpartition(".")[2], (call.lineno, call.end_lineno or call.lineno)
        if last == "execute_train":
            self._train(arguments, keywords, lines)
            return None
        if name in RUNNERS or last in ("exec_command", "exec_command_all_ray_node"):
            self._start(arguments, keywords, lines)
            raise Unreadable("it is the output of a command")
        if last == "get_bool_env_var":
            default = plain(arguments[1]) if len(arguments) > 1 else plain(keywords.get("default", "false"))
            return str(self.variable(plain(arguments[0]), default)).lower() in ("true", "1")
        if last == "get_env_enable_infinite_run":
            return str(self.variable("SLIME_TEST_ENABLE_INFINITE_RUN", "false")).lower() in ("true", "1")
        if last == "get_default_wandb_args":
            self.notes.append(Note(Place(self._name, call.lineno), f"{name}() {TRACKING}"))
            return Text()
        if name in ("typer.run", "fire.Fire") and arguments and isinstance(arguments[0], Function):
            return self.follow(arguments[0], [], {})
        if name == "tyro.cli" and arguments and isinstance(arguments[0], ast.ClassDef):
            return self.instance(arguments[0], [], {})
        if last in ("Typer", "ArgumentParser"):
            return Instance(None, {"kind": last})
        raise Unreadable(f"{name}() is known when the program runs")

    def call_object(self, owner: Instance, name: str, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        """The result of a method of a parser of arguments, or of a call of a typer application."""
        if name == "" and owner.attributes.get("kind") == "Typer":
            for entry in self._entries:
                self.follow(entry, [], {})
            return None
        if name == "add_argument":
            self._add_option(owner, [str(plain(item)) for item in arguments], keywords)
            return None
        if name in ("add_argument_group", "add_mutually_exclusive_group"):
            return owner
        if name in ("parse_args", "parse_known_args"):
            options = Instance(None, {key: value for key, value in owner.attributes.items() if key != "kind"})
            return options if name == "parse_args" else [options, []]
        raise Unreadable(f"{name}() is known when the program runs")

    def _add_option(self, parser: Instance, names: list[str], keywords: dict[str, Any]) -> None:
        long_names = [name for name in names if name.startswith("--")] or names
        name = str(plain(keywords["dest"])) if "dest" in keywords else long_names[0].lstrip("-").replace("-", "_")
        action = str(keywords.get("action", ""))
        switch = {"store_true": False, "store_false": True}.get(action)
        default = keywords.get("default", switch)
        if default is None and (truth(keywords.get("required", False)) or not names[0].startswith("-")):
            default = Unknown(name, f"{name} is given when the program starts")
        kind = keywords["type"].name if isinstance(keywords.get("type"), Reference) else ""
        if name in self._options:
            default = (not switch) if switch is not None else _converted(self._options[name], kind)
        parser.attributes[name] = default

    def field(self, name: str, node: ast.stmt, default: Any) -> Any:
        if name not in self._options:
            return default
        annotation = ast.unparse(node.annotation) if isinstance(node, ast.AnnAssign) else ""
        return _converted(self._options[name], annotation)

    def parameter(self, parameter: ast.arg, default: ast.expr | None) -> Any:
        if parameter.arg in self._options and len(self._frames) < 2:
            return _converted(self._options[parameter.arg], ast.unparse(parameter.annotation or ast.Constant("")))
        return super().parameter(parameter, default)

    def _attribute(self, owner: Any, name: str) -> Any:
        if isinstance(owner, Reference) and f"{owner.name}.{name}" == "sys.executable":
            return Text((Piece("python3", (1, 1)),))
        try:
            return super()._attribute(owner, name)
        except Unreadable:
            bases = (
                [ast.unparse(base) for base in owner.kind.bases] if isinstance(owner, Instance) and owner.kind else []
            )
            if not any(base.endswith(CLASSES) for base in bases):
                raise
        lines = (1, 1)
        nodes = self._options.get("num_nodes") or lifted(self._environ.get("SLURM_JOB_NUM_NODES", "1"), lines)
        defaults = {"num_nodes": _converted(nodes, "int"), "cuda_core_dump": False, "extra_env_vars": Text()}
        if name not in defaults:
            raise Unreadable(f"{name} is given when the program starts")
        return defaults[name]

    def _train(self, arguments: list[Any], keywords: dict[str, Any], lines: tuple[int, int]) -> None:
        """Note the command that `execute_train` would start."""
        flags = arguments[0] if arguments else keywords.get("train_args", Text())
        program = str(plain(keywords.get("train_script", lifted("train.py", lines))))
        start = Text((Piece(f"python3 {program} ", lines),))
        self.commands.append((joined([start, to_text(flags, lines)]), self.condition))

    def _start(self, arguments: list[Any], keywords: dict[str, Any], lines: tuple[int, int]) -> None:
        """Note a command that is given as a text or as a list of words."""
        command = arguments[0] if arguments else keywords.get("cmd", keywords.get("args", Text()))
        if isinstance(command, list):
            blank = Text((Piece(" ", lines),))
            command = joined(part for word in command for part in (_quoted(to_text(word, lines)), blank))
        if isinstance(command, Text):
            self.commands.append((command, self.condition))


def _quoted(text: Text) -> Text:
    """A word of a list, which the shell does not divide."""
    return Text(
        tuple(piece if piece.unknown else replace(piece, text=shlex.quote(piece.text)) for piece in text.pieces)
    )


def _options(arguments: Sequence[Field]) -> dict[str, Any]:
    """The options of a command line by name: a text, True for a switch, False for `--no-NAME`."""
    options: dict[str, Any] = {}
    name = ""
    for field in arguments:
        lines = (field.place.line, field.place.line)
        if field.text.startswith("--"):
            name, equals, value = field.text[2:].partition("=")
            name = name.replace("-", "_")
            options[name.removeprefix("no_")] = lifted(value, lines) if equals else not name.startswith("no_")
        elif name:
            piece = Piece(field.text, lines, field.problem)
            options[name] = Text((piece,))
    return options


def _converted(value: Any, kind: str) -> Any:
    """The value of an option as its type has it."""
    if isinstance(value, Text) and not value.unknown:
        text = str(value)
        if re.search(r"\bbool\b", kind):
            return text.lower() in ("true", "1", "yes")
        if re.search(r"\bint\b", kind) and re.fullmatch(r"-?\d{1,18}", text):
            return int(text)
        if re.search(r"\bfloat\b", kind) and re.fullmatch(r"[-+.\deE]{1,30}", text):
            return float(text)
    return value


def _add(script: Script, command: Text, source: Sequence[str], name: str) -> None:
    """Follow a command in a shell, and give its words the lines of the launcher."""
    text, spans = _shell_text(script, command, name)
    first = len(script.commands)
    try:
        script.follow_text(text, name)
    except SettingsError as error:
        line = command.pieces[0].lines[0] if command.pieces else 1
        script.notes.append(Note(Place(name, line), f"this command is not read: {str(error).partition(': ')[2]}"))
    script.commands[first:] = [_placed(item, spans, source, name) for item in script.commands[first:]]


def _shell_text(script: Script, command: Text, name: str) -> tuple[str, list[tuple[int, int]]]:
    """The text for the shell, where each piece has a line of its own if possible, and the source lines of each line."""
    text, spans, quote = "", [(1, 1)], ""
    for piece in command.pieces:
        if not text.rpartition("\n")[2]:
            spans[-1] = piece.lines
        part = _marked(script, piece, name) if piece.unknown else piece.text
        if text and not quote and part[:1] in (" ", "\t") and not text.endswith("\n"):
            text += "\\\n"
            spans.append(piece.lines)
        quote = _open_quote(part, quote)
        text += part
        spans += [piece.lines] * part.count("\n")
        if not quote and part.endswith((" ", "\t")):
            text += "\\\n"
            spans.append(piece.lines)
    return text, spans


def _marked(script: Script, piece: Piece, name: str) -> str:
    """A piece that is not known, with a mark in place of each word."""
    place = Place(name, piece.lines[0])
    words = re.split(r"(\s+)", piece.text)
    return "".join(script.mark(Field(word, place, piece.unknown)) if word.strip() else word for word in words)


def _open_quote(text: str, quote: str) -> str:
    """The quote that is open behind a text; empty if there is none."""
    for character in re.sub(r"\\.", "", text):
        if character == quote:
            quote = ""
        elif not quote and character in "'\"":
            quote = character
    return quote


def _placed(command: Command, spans: Sequence[tuple[int, int]], source: Sequence[str], name: str) -> Command:
    """The command with the lines of the launcher: a flag has the line that it is written in, its values too."""
    fields, line = [], spans[0][0]
    for field in command.fields:
        if field.place.file == name and 0 < field.place.line <= len(spans):
            first, last = spans[field.place.line - 1]
            if field.text.startswith("-") or not first <= line <= last:
                flag = re.compile(re.escape(field.text.partition("=")[0]) + r"(?![\w-])")
                line = next((number for number in range(first, last + 1) if flag.search(source[number - 1])), first)
            field = replace(field, place=Place(name, line))
        fields.append(field)
    return replace(command, fields=tuple(fields), place=Place(name, spans[0][0]))
