"""Finds the commands that a Python launcher starts, such as slime's `execute_train`, with the line of every flag."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from slimectl.errors import SettingsError
from slimectl.migrate.launch_scripts.flags import Flag, options
from slimectl.migrate.launch_scripts.python_program import Program, parsed
from slimectl.migrate.launch_scripts.python_values import (
    Function,
    Instance,
    Piece,
    Reference,
    Text,
    Unreadable,
    joined,
    lifted,
    plain,
    to_text,
)
from slimectl.migrate.launch_scripts.shell import Script
from slimectl.migrate.launch_scripts.shell_commands import Command
from slimectl.migrate.launch_scripts.shell_values import Field
from slimectl.migrate.launch_scripts.shell_variables import Note
from slimectl.migrate.launch_scripts.shell_words import Place, read_text

STARTS = re.compile(r"\b(?:execute_train|exec_command|os\.system|subprocess\.\w+|exec_command_all_ray_node)\(")
"""Calls that start a command. A file without such a call is not a launcher."""
RUNNERS = re.compile(
    r"os\.system|subprocess\.(?:run|call|check_call|check_output|Popen)"
    r"|(?:\w*\.)*exec_command(?:_all_ray_node)?"
)
CLASSES = ("ExecuteTrainConfig",)
"""Classes of slime whose fields have the defaults below."""
SWITCHES = {"get_env_enable_infinite_run": "SLIME_TEST_ENABLE_INFINITE_RUN"}
"""Functions of slime that read a switch of the environment."""
TRACKING = "adds wandb flags if WANDB_API_KEY is set in the environment. Set track.with by hand"


def launched(
    path: Path, root: Path, environ: Mapping[str, str], arguments: Sequence[Field] = (), depth: int = 0
) -> Script | None:  # fmt: skip
    """Follow a Python launcher. Return the commands that it starts as a script, or None if it starts none.

    `arguments` are the words of the command line. `depth` counts the launchers that started this one. Raises
    SettingsError with the line of a syntax error.
    """
    name = str(path)
    text = read_text(path, name)
    if STARTS.search(text) is None:
        return None
    launcher = Launcher(parsed(path, name), name, environ, options(arguments)[0])
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


class Launcher(Program):
    """A program that starts commands, including commands that slime's functions start."""

    def __init__(self, tree: ast.Module, name: str, environ: Mapping[str, str], options: Sequence[Flag]) -> None:
        super().__init__(tree, name, environ, options)
        self.commands: list[tuple[Text, str]] = []
        """Commands, and why it is unknown whether each is started."""
        self.notes: list[Note] = []

    def follow_all(self) -> None:
        """Follow the module. If it starts nothing itself, follow its functions that start training."""
        starting = [
            node for node in self.tree.body if isinstance(node, ast.FunctionDef) and STARTS.search(ast.unparse(node))
        ]
        is_short = self.guarded(lambda: self.run(self.tree.body))
        for node in starting if is_short and not self.commands else []:
            is_short = self.guarded(partial(self.follow, Function(node), [], {})) and is_short
        if not is_short and not self.commands and "execute_train(" in ast.unparse(self.tree):
            raise self.limit()

    def call_reference(self, name: str, call: ast.Call, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        last, lines = name.rpartition(".")[2], (call.lineno, call.end_lineno or call.lineno)
        if last == "execute_train":
            self._train(arguments, keywords, lines)
            return None
        if RUNNERS.fullmatch(name):
            self._start(arguments, keywords, lines)
            raise Unreadable("it is the output of a command")
        if last == "get_bool_env_var" or last in SWITCHES:
            values = [lifted(SWITCHES[last], lines)] if last in SWITCHES else [*arguments, *keywords.values()]
            name, default, *_ = [*map(plain, values), "false"]
            return str(self.variable(name, default)).lower() in ("true", "1")
        if last == "get_default_wandb_args":
            self.notes.append(Note(Place(self.name, call.lineno), f"{name}() {TRACKING}"))
            return Text()
        return super().call_reference(name, call, arguments, keywords)

    def attribute(self, owner: Any, name: str) -> Any:
        if owner == Reference("sys") and name == "executable":
            return Text((Piece("python3", (1, 1)),))
        try:
            return super().attribute(owner, name)
        except Unreadable:
            bases = owner.kind.bases if isinstance(owner, Instance) and owner.kind else []
            if not any(ast.unparse(base).endswith(CLASSES) for base in bases):
                raise
        nodes = self.option("num_nodes", "int", int(self.environ.get("SLURM_JOB_NUM_NODES", "1")))
        defaults = {"num_nodes": nodes, "cuda_core_dump": False, "extra_env_vars": Text()}
        if name not in defaults:
            raise Unreadable(f"{name} is given when the program starts")
        return defaults[name]

    def _train(self, arguments: list[Any], keywords: dict[str, Any], lines: tuple[int, int]) -> None:
        """Record the command that `execute_train` would start."""
        flags = arguments[0] if arguments else keywords.get("train_args", Text())
        program = str(plain(keywords.get("train_script", lifted("train.py", lines))))
        start = Text((Piece(f"python3 {program} ", lines),))
        self.commands.append((joined([start, to_text(flags, lines)]), self.condition))

    def _start(self, arguments: list[Any], keywords: dict[str, Any], lines: tuple[int, int]) -> None:
        """Record a command that is given as a text or as a list of words."""
        command = arguments[0] if arguments else keywords.get("cmd", keywords.get("args", Text()))
        if isinstance(command, list):
            blank = Text((Piece(" ", lines),))
            command = joined(part for word in command for part in (_quoted(to_text(word, lines)), blank))
        if isinstance(command, Text):
            self.commands.append((command, self.condition))


def _quoted(text: Text) -> Text:
    """A word of a list, which the shell does not split."""
    return Text(
        tuple(piece if piece.unknown else replace(piece, text=shlex.quote(piece.text)) for piece in text.pieces)
    )


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
    """The text for the shell, with a separate line for each piece if possible, and the source lines of each line."""
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
    """An unknown piece, with a placeholder for each word."""
    place = Place(name, piece.lines[0])
    words = re.split(r"(\s+)", piece.text)
    return "".join(script.mark(Field(word, place, piece.unknown)) if word.strip() else word for word in words)


def _open_quote(text: str, quote: str) -> str:
    """The quote that is still open after a text, or an empty string."""
    for character in re.sub(r"\\.", "", text):
        if character == quote:
            quote = ""
        elif not quote and character in "'\"":
            quote = character
    return quote


def _placed(command: Command, spans: Sequence[tuple[int, int]], source: Sequence[str], name: str) -> Command:
    """The command with the lines of the launcher. A flag and its values have the line that the flag is written in."""
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
