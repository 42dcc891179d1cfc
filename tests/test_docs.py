"""Documents: links that lead somewhere, names and keys that exist, settings that fit."""

from __future__ import annotations

import ast
import importlib
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_floors import FLOORS

from slimectl import errors
from slimectl.settings.reference import entries
from slimectl.types import Sample

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")])
LIVING = [page for page in PAGES if page.name not in ("CHANGELOG.md", "RESULTS.md", "reliability.md")]
"""Pages about the present; the others tell of earlier versions too."""

EXAMPLES = ("models/smollm2",)
"""Paths that readers make themselves."""


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", without_code(page.read_text(encoding="utf-8")), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_relative_link_leads_somewhere(page: Path):
    targets = re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text(encoding="utf-8")))
    for target in targets:
        if re.match(r"[a-z]+:|\.\./\.\./actions/", target):  # elsewhere, or the workflows next to the repository
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        assert linked.is_relative_to(ROOT), target
        if anchor:
            assert anchor in anchors(linked), target


@pytest.mark.parametrize("page", LIVING, ids=name_of)
def test_every_file_of_the_package_that_is_named_exists(page: Path):
    inside = r"(?<![\w/.-])(?:slimectl|tests|benchmarks|models|docs)/[\w/.-]*\w/?"
    for path in re.findall(inside, page.read_text(encoding="utf-8")):
        placeholder = re.search(r"\b[A-Z]{4,}\b", Path(path).stem)  # docs/NAME.md stands for any
        assert placeholder or (ROOT / path).exists() or path in EXAMPLES, path


def test_readme_and_docs_name_settings_that_exist():
    keys = {entry.key for entry in entries()}
    known = keys | {re.sub(r"^algorithm\.\w+\.", "algorithm.", key) for key in keys}
    sections = {name.partition(".")[0] for name in known}
    for page in LIVING:
        for key in re.findall(r"`(\w+\.\w+)", page.read_text(encoding="utf-8")):
            section, _, name = key.partition(".")
            if section in sections and name not in ("py", "toml", "json", "jsonl", "md"):
                assert any(each == key or each.startswith(f"{key}.") for each in known), (name_of(page), key)


def test_every_page_is_on_the_map_of_the_readme():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    pages = [page.name for page in sorted((ROOT / "docs").glob("*.md")) if page.name != "index.md"]
    assert [name for name in pages if f"(docs/{name})" not in readme] == []


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=name_of)
def test_a_page_has_at_most_250_lines_unless_it_is_generated(page: Path):
    text = page.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 250 or "<!-- tables -->" in text


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_page_has_conflict_markers_of_a_merge(page: Path):
    assert not re.search(r"^(<{7}|>{7}) ", page.read_text(encoding="utf-8"), re.MULTILINE)


def test_the_floors_of_the_architecture_page_are_those_of_the_test():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (.+) \|$", text, flags=re.MULTILINE)
    assert [re.findall(r"`([\w.]+)`", packages) for _, packages in rows] == FLOORS


def test_the_architecture_page_has_every_package():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    packages = [path.parent.name for path in (ROOT / "slimectl").glob("*/__init__.py")]
    assert [name for name in sorted(packages) if f"`{name}/`" not in text] == []


def test_the_guide_for_coding_agents_is_short_and_its_commands_and_files_exist():
    text = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 100
    files = re.findall(r"(?<![\w/.-])(?:[\w-]+/)*[\w-]+\.(?:py|md|txt|toml)\b", text)
    assert {"tests/test_interface.py", "constraints.txt", "slimectl/errors.py"} <= set(files)
    assert [name for name in files if not (ROOT / name).exists()] == []
    for script in re.findall(r"python (tests/[\w/]+\.py)", text):  # run as a script, each writes its file
        assert '__name__ == "__main__"' in (ROOT / script).read_text(encoding="utf-8"), script
    packages = [path.parent.name for path in (ROOT / "slimectl").glob("*/__init__.py")]
    named = re.findall(r"slimectl/(\w+)/", text)
    assert set(named) <= set(packages)


def test_the_page_for_programs_has_every_command_with_json_and_every_exit_code():
    text = (ROOT / "docs" / "reference" / "programs.md").read_text(encoding="utf-8")
    commands = json.loads((ROOT / "tests" / "interface" / "commands.json").read_text(encoding="utf-8"))
    groups = {group: commands.pop(group) for group in ("settings", "engines")}
    grouped = commands | {f"{group} {name}": group_options for group, each in groups.items()
                          for name, group_options in each.items()}  # fmt: skip
    with_json = {name for name, options in grouped.items() if "--json" in options}
    assert set(re.findall(r"^\| `slimectl ((?:settings |engines )?\w+)[^`]* --json`", text, re.MULTILINE)) == with_json
    codes = {int(code) for row in re.findall(r"^\| ([\d, ]+) \|", text, re.MULTILINE) for code in row.split(", ")}
    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    own = {value.exit_code for value in classes if issubclass(value, errors.SlimectlError)}
    assert codes == own | {0, errors.EXIT_INTERRUPTED, errors.EXIT_READER_GONE, 143, 129}


def test_the_glossary_is_in_alphabetical_order():
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    words = re.findall(r"^\| \*\*(.+?)\*\*", text, flags=re.MULTILINE)
    assert words == sorted(words, key=lambda word: re.sub(r"\W", " ", word))


def python_blocks(page: Path) -> list[str]:
    text = page.read_text(encoding="utf-8")
    return [
        textwrap.dedent(block) for block in re.findall(r"^ *```python\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)
    ]


def imported() -> Iterator[tuple[str, str]]:
    """Yield (module, name) of every import from slimectl in Python code of the pages."""
    for page in LIVING:
        for block in python_blocks(page):
            try:
                nodes = list(ast.walk(ast.parse(block)))
            except SyntaxError:
                continue
            for node in nodes:
                if isinstance(node, ast.ImportFrom) and re.match(r"slimectl\b(?!_)", node.module or ""):
                    yield from ((node.module or "", alias.name) for alias in node.names)


def test_code_of_the_pages_imports_names_that_exist():
    found = set(imported())
    assert ("slimectl.agents.environments.port", "Task") in found
    assert ("slimectl.rewards.extraction", "missing") in found
    assert [each for each in sorted(found) if not hasattr(importlib.import_module(each[0]), each[1])] == []


def test_the_verifier_of_contributing_grades():
    [code] = [block for block in python_blocks(ROOT / "CONTRIBUTING.md") if "class StartsWith" in block]
    names: dict[str, Any] = {"__name__": __name__}
    exec(f"from dataclasses import dataclass\nfrom slimectl.types import Sample\n{code}", names)
    verifier = names["StartsWith"]
    assert verifier()(Sample(response="Paris, of course", label="Paris")) == 1.0
    assert verifier()(Sample(response="In Paris", label="Paris")) == 0.0
    assert verifier(ignore_case=True)(Sample(response="paris", label="Paris")) == 1.0
    assert verifier(source="boxed")(Sample(response="Paris", label="Paris")) == 0.0
