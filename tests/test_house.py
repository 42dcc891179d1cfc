"""What a reviewer would check by hand: lint, types, and files that are made from others."""

from __future__ import annotations

import doctest
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def clean(*command: str) -> None:
    result = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_ruff_finds_nothing():
    clean("ruff", "check", ".")
    clean("ruff", "format", "--check", ".")


@pytest.mark.slow
def test_mypy_strict_on_every_file():
    cached = (ROOT / ".mypy_cache").exists()  # to write the first one takes a seventh of the time
    clean("mypy", *([] if cached else ["--cache-dir", os.devnull]))


EXAMPLES = [path for path in sorted((ROOT / "slimectl").rglob("*.py")) if ">>>" in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: str(path.relative_to(ROOT)))
def test_examples_in_docstrings_run(path: Path):
    module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    assert doctest.testmod(module).failed == 0


def test_the_readme_has_the_two_commands_and_names_real_things():
    text = (ROOT / "README.md").read_text()
    assert text.count("```sh quickstart\n") == 1
    assert text.count("```sh test\n") == 1
    for name in ("constraints.txt", "docs/records.md", "benchmarks/RESULTS.md"):
        assert name in text
        assert (ROOT / name).exists()
