"""What a reviewer would check by hand: lint, types, and files that are made from others."""

from __future__ import annotations

import ast
import doctest
import importlib
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

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


GPU_MACHINE = {"python_version": "3.12", "sys_platform": "linux", "platform_machine": "x86_64"}
"""The machine that .ci/gpu_constraints.py resolves for."""


@pytest.mark.parametrize(("file", "engine"), [("constraints-gpu.txt", "sglang"), ("constraints-gpu-vllm.txt", "vllm")])
def test_the_versions_for_gpus_are_inside_the_ranges_of_the_extras(file: str, engine: str):
    pins = dict(line.split("==") for line in (ROOT / file).read_text().splitlines() if not line.startswith("#"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [project["optional-dependencies"][name] for name in ("torch", "gpu", "megatron", "ray", engine)]
    for requirement in map(Requirement, sum(extras, project["dependencies"])):
        if requirement.name == "slimectl" or (requirement.marker and not requirement.marker.evaluate(GPU_MACHINE)):
            continue
        version = pins[requirement.name.replace("_", "-")]
        assert requirement.specifier.contains(version), f"{requirement.name} {version}: run .ci/gpu_constraints.py"


COMMAND = re.compile(
    r"slimectl (run|train|inspect|convert|rollout|score|view|eval|report|plan|engines|settings)\b[^`\n]*$"
)
PATHS = re.compile(r"(^|\.)(path|file|folder|run|model|source|target|out|directory)$|/")


def test_commands_in_messages_quote_their_paths():
    found = []
    for file in sorted((ROOT / "slimectl").rglob("*.py")):
        for text in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            before = ""
            for part in text.values if isinstance(text, ast.JoinedStr) else ():
                if isinstance(part, ast.FormattedValue):
                    value = ast.unparse(part.value)
                    if COMMAND.search(before) and PATHS.search(value) and "quote(" not in value:
                        found.append(f"{file.relative_to(ROOT)}:{part.lineno}: {value}")
                before += part.value if isinstance(part, ast.Constant) else "…"
    # What migrate prints are paths of launch files, with the variables of their shell.
    assert [line for line in found if not line.startswith("slimectl/migrate/")] == []
