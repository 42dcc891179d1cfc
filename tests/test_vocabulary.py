"""Bounds on the language of the source: names that say nothing, docstrings that open as riddles, fragments of files."""

from __future__ import annotations

import ast
import re
import tokenize
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


STILTED = re.compile(
    r"\b(for ever|anew|mend(s|ed)?|whoever|nobody|of its own accord|up to now|by now|learnt|besides?|no word|in words"
    r"|of then|words? (goes|go|to) stderr|sa(y|ys|id) (so|why|how|what|which|whose|where|that it|when)"
    r"|(is|are) no [a-z]+|goes on|go on|went on|that of|those (of|that|who)|as (it|they) stands?|for nothing|much as"
    r"|what (is|was|are) (left|there|sampled|shown|taught|kept|asked|given)|in the way of|without a word|has its say"
    r"|stands? (in|for|behind)|in turns?|ends? in (a|an|one))\b",
    re.IGNORECASE,
)
"""Phrases that read as a translation: each has a plainer form."""
SENTENCE_END = re.compile(r"(?<=[.!?:])\s+(?=[A-Z`\"(*\[])")
LONG_SENTENCE = 28
MAX_STILTED, MAX_SEMICOLONS, MAX_SEMICOLONS_OF_MESSAGES, MAX_LONG = 0.006, 0.05, 0.10, 0.08


def paragraphs(page: Path) -> Iterator[str]:
    """Paragraphs, list items and longer table cells of a Markdown page, without code."""
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "CODE", text))
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*|]|\d\.) )|^#.*$", text, flags=re.MULTILINE):
        yield from (cell for cell in block.split("|") if len(cell.split()) > 5) if "|" in block else [block]


@pytest.fixture(scope="module")
def texts_of_code(trees: Trees) -> dict[str, list[str]]:
    """Docstrings (also those below fields), messages (every other string of some words) and comments of the package."""
    kinds: dict[str, list[str]] = {"docstrings": [], "messages": [], "comments": []}
    for path, tree in trees.items():
        nodes = list(ast.walk(tree))
        documents = {
            id(node.value)
            for node in nodes
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        }
        for node in nodes:
            if isinstance(node, ast.JoinedStr):
                text = "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value
            else:
                continue
            if id(node) in documents:
                kinds["docstrings"].append(re.sub(r"`[^`]*`", "CODE", text))
            elif len(text.split()) > 4 and re.search("[a-z] [a-z]", text):
                kinds["messages"].append(text)
        with path.open("rb") as file:
            tokens = tokenize.tokenize(file.readline)
            comments = [token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT]
        kinds["comments"] += [comment for comment in comments if len(comment.split()) > 3]
    return kinds


@pytest.mark.parametrize("kind", ["README", "docs", "other pages", "docstrings", "messages", "comments"])
def test_texts_are_plain_english(kind: str, texts_of_code: dict[str, list[str]]):
    root = PACKAGE.parent
    pages = {
        "README": [root / "README.md"],
        "docs": sorted((root / "docs").rglob("*.md")),
        "other pages": sorted(set(root.glob("*.md")) - {root / "README.md"}),
    }
    texts = [text for page in pages[kind] for text in paragraphs(page)] if kind in pages else texts_of_code[kind]
    sentences = [sentence for text in texts for sentence in SENTENCE_END.split(text) if len(sentence.split()) > 2]
    stilted = [f"{match[0]}: {sentence}" for sentence in sentences for match in STILTED.finditer(sentence)]
    assert len(stilted) <= MAX_STILTED * len(sentences), "\n".join(stilted)
    semicolons = [sentence for sentence in sentences if ";" in sentence]
    most = MAX_SEMICOLONS_OF_MESSAGES if kind == "messages" else MAX_SEMICOLONS
    assert sum(sentence.count(";") for sentence in semicolons) <= most * len(sentences), "\n".join(semicolons)
    long = [sentence for sentence in sentences if len(sentence.split()) > LONG_SENTENCE]
    assert len(long) <= MAX_LONG * len(sentences), "\n".join(long)
