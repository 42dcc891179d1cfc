"""Reward functions and reward models that a Python file gives to its trainer, as paths that settings can name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from slimectl.settings.launch_scripts.documents import MAX_DEPTH
from slimectl.settings.launch_scripts.foreign import is_training_class
from slimectl.settings.launch_scripts.python_values import PythonFile, called_name
from slimectl.settings.launch_scripts.shell_values import Field
from slimectl.settings.launch_scripts.shell_words import Place


def reward_fields(source: PythonFile, node: ast.expr, place: Place) -> Iterator[Field]:
    """Reward functions by path, `FILE.py:NAME` or `MODULE:NAME`, and models by name."""
    for _ in range(MAX_DEPTH):
        value = source.lookup(node.id) if isinstance(node, ast.Name) else None
        if not isinstance(value, ast.List | ast.Tuple | ast.Constant | ast.Name):
            break
        node = value
    members = node.elts if isinstance(node, ast.List | ast.Tuple) else [node]
    for member in members:
        yield _reward(source, member, place)


def _reward(source: PythonFile, node: ast.expr, place: Place) -> Field:
    shown = " ".join(ast.unparse(node).split())[:60]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return Field(node.value, place)
    if isinstance(node, ast.Call) and source.kind(node) == "get_soft_overlong_punishment":
        sizes = [*node.args, *(word.value for word in node.keywords)]
        numbers = [source.value(size) for size in sizes]
        if len(numbers) == 2 and None not in numbers:
            return Field(f"get_soft_overlong_punishment:{numbers[0]}:{numbers[1]}", place)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in source.imports:
        module, original = source.imports[node.value.id]
        return Field(_function_path(source, f"{module}.{original}".rstrip("."), node.attr), place)
    if isinstance(node, ast.Name) and node.id in source.imports and source.imports[node.id][1]:
        return Field(_function_path(source, *source.imports[node.id]), place)
    if not isinstance(node, ast.Name):
        return Field(shown, place, f"{shown} is made when the program runs")
    return _own_reward(source, node.id, place)


def _own_reward(source: PythonFile, name: str, place: Place) -> Field:
    """A function of this file, which must be at its top, and in a file that trains nothing when it is imported."""
    functions = [node.name for node in source.tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    if name in functions and not _trains_on_import(source):
        return Field(f"{source.name}:{name}", place)
    is_string = isinstance(value := source.value(ast.Name(name)), str)
    if is_string:
        return Field(str(value), place)
    reason = "importing this file would start its training" if name in functions else "it is no function at the top"
    return Field(name, place, f"{reason}: move {name} to the top of a file of its own and name it FILE.py:{name}")


def _trains_on_import(source: PythonFile) -> bool:
    """Whether a statement at the top of the file makes a trainer or trains."""
    for statement in source.tree.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test):
            continue
        calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
        if any(is_training_class(source.kind(call)) or called_name(call) in ("train", "main") for call in calls):
            return True
    return False


def _function_path(source: PythonFile, module: str, name: str) -> str:
    """`MODULE:NAME`, or the file of a module that lies beside this one."""
    file = f"{module.replace('.', '/')}.py"
    return f"{Path(source.name).parent / file if (source.path.parent / file).is_file() else module}:{name}"
