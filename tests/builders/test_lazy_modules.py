"""Modules of builders are imported by the commands that build their parts."""

from __future__ import annotations

import ast
from pathlib import Path

from slimectl.runtime import builders


def test_every_name_of_the_stub_is_found():
    stub = ast.parse(Path(builders.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    declared = {
        alias.name: node.module for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert declared == builders._MODULES


def test_every_part_of_the_table_can_be_had():
    assert all(callable(getattr(builders, name)) or name == "TOKENIZER_REMEDY" for name in builders.__all__)


def test_no_part_has_the_name_of_a_module():
    modules = {path.stem for path in Path(builders.__file__).parent.glob("*.py")}
    assert modules.isdisjoint(builders.__all__)
