"""Reward functions and reward models that a Python file gives to its trainer, as paths that settings can name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slimectl.settings.launch_scripts.foreign import is_training_class
from slimectl.settings.launch_scripts.python_expressions import source_of
from slimectl.settings.launch_scripts.python_program import Program
from slimectl.settings.launch_scripts.python_values import Function, Instance, Reference, Text, Unknown
from slimectl.settings.launch_scripts.shell_values import Field
from slimectl.settings.launch_scripts.shell_words import Place

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def reward_fields(program: Program, path: Path, value: Any, node: ast.AST) -> Iterator[Field]:
    """Reward functions by path, `FILE.py:NAME` or `MODULE:NAME`, and models by name."""
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
    """Whether a statement at the top of the file makes a trainer or trains."""
    for statement in program.tree.body:
        is_guarded = isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test)
        if is_guarded or isinstance(statement, (*FUNCTIONS, ast.ClassDef)):
            continue
        for node in ast.walk(statement):
            name = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
            if name in ("train", "main") or is_training_class(program.library_class(program.globals.get(name), name)):
                return True
    return False
