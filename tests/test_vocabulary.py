"""Bounds on the language of the source: names that say nothing, docstrings that open as riddles, fragments of files."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "slimectl"
BARE = {
    "made", "given", "found", "told", "asked", "taken", "chosen", "seen", "said", "left", "kept", "begun",
    "written", "going", "here", "there", "known", "wanted", "held", "own", "other", "others", "each", "one",
    "both", "it", "rest", "most", "least", "whole", "what", "words", "why", "how", "where", "when", "about",
    "facts", "thing", "things", "put", "by",
}  # fmt: skip
"""Participles and function words: as the name of a value they say nothing of it."""
NOUN_CLAUSE = re.compile(r"(What|Where|Who|Whose|How|Which|Whether|As what|That which|When)\b")
MAX_BARE, MAX_NOUN_CLAUSES, MAX_FRAGMENTS = 0.005, 0.02, 25
FRAGMENT_LINES = 70

Trees = dict[Path, ast.Module]


@pytest.fixture(scope="module")
def trees() -> Trees:
    """Parse every file; for as long as they are needed, since they have 135 MiB."""
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}


def names(trees: Trees) -> Iterator[tuple[str, str]]:
    """(name, place) of every stored variable and parameter."""
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id, f"{path}:{node.lineno}"
            elif isinstance(node, ast.arg) and node.arg not in ("self", "cls"):
                yield node.arg, f"{path}:{node.lineno}"


def docstrings(trees: Trees) -> Iterator[tuple[str, str]]:
    """(docstring, place) of every module, class and function."""
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                # "Whether …" is the usual form for the result of a predicate.
                if text and not (text.startswith("Whether") and not isinstance(node, ast.Module)):
                    yield text, f"{path}:{getattr(node, 'lineno', 1)}"


def test_few_names_are_bare_participles_or_function_words(trees: Trees):
    every = list(names(trees))
    bare = [f"{place} {name}" for name, place in every if name in BARE]
    assert len(bare) <= MAX_BARE * len(every), "\n".join(bare)


def test_few_docstrings_open_with_a_noun_clause(trees: Trees):
    every = list(docstrings(trees))
    riddles = [f"{place} {text.splitlines()[0]}" for text, place in every if NOUN_CLAUSE.match(text)]
    assert len(riddles) <= MAX_NOUN_CLAUSES * len(every), "\n".join(riddles)


def test_few_short_files_have_a_single_importer(trees: Trees):
    importers: dict[str, set[Path]] = defaultdict(set)
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("slimectl"):
                importers[node.module or ""].add(path)
                for alias in node.names:
                    importers[f"{node.module}.{alias.name}"].add(path)
    fragments = [
        str(path)
        for path in trees
        if path.read_text(encoding="utf-8").count("\n") <= FRAGMENT_LINES
        and len(importers[".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)]) == 1
    ]
    assert len(fragments) <= MAX_FRAGMENTS, "\n".join(fragments)
