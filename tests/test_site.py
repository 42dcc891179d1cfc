"""The documentation site builds without a warning, and the commands of its guides run."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from slimectl.cli.app import app
from slimectl.data.metrics_catalogue import CATALOGUE
from slimectl.settings.reference import entries

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
DOCS = sorted((ROOT / "docs").rglob("*.md"))
SMALL = {"ROLLOUT_MAX_RESPONSE_LEN": "6", "RUN_ROLLOUT_BATCH_SIZE": "2", "ROLLOUT_N_SAMPLES_PER_PROMPT": "2",
         "TRACK_PLOT": "false"}  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the site, built with every warning an error."""
    pytest.importorskip("material")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def text_of(page: Path) -> str:
    return re.sub(r"<[^>]+>", "", page.read_text(encoding="utf-8")).replace("&gt;", ">").replace("&lt;", "<")


def test_the_site_has_every_command_setting_and_metric(site: Path):
    pages = [text_of(site / f"reference/{name}.html") for name in ("commands", "settings", "metrics")]
    commands, settings, metrics = pages
    commands_named = json.loads((ROOT / "tests" / "interface" / "commands.json").read_text())
    assert [name for name in commands_named if f"slimectl {name}" not in commands] == []
    names = {entry.key.rpartition(".")[2] if entry.key.startswith("algorithm.") else entry.key for entry in entries()}
    assert [name for name in sorted(names) if name not in settings] == []
    assert [metric.name for metric in CATALOGUE if metric.name not in metrics] == []
    assert "generated:" not in "".join(pages)


def test_the_site_loads_nothing_from_other_hosts(site: Path):
    for page in site.rglob("*.html"):
        loaded = re.findall(
            r"<(?:script|img|link|iframe)[^>]+(?:src|href)=\"?(?:https?:)?//", page.read_text(encoding="utf-8")
        )
        assert loaded == [], page
    assert (site / "search" / "search_index.json").exists()


def blocks(page: Path, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def commands(block: str) -> Iterator[list[str]]:
    """Yield the words after `slimectl` of each complete command of a block, one list for each part of a pipe."""
    text = re.sub(r"<<'END'.*?^END$", "", block, flags=re.MULTILINE | re.DOTALL).replace("\\\n", " ")
    for line in text.splitlines():
        words = shlex.shlex("" if "…" in line else line, posix=True, punctuation_chars="|;&<>")
        words.whitespace_split, parts = True, [[]]
        for word in words:
            if set(word) <= set("|;&<>()"):
                parts.append([])
            elif parts[-1] or not re.match(r"[A-Z_]+=", word):  # NAME=value before a command
                parts[-1].append(word)
        yield from (part[1:] for part in parts if part[:1] == ["slimectl"] and "--help" not in part)


@pytest.mark.parametrize("page", [*ROOT.glob("[AR]*.md"), *DOCS], ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_the_docs_parses(page: Path):
    for words in (words for block in blocks(page, r"sh(?: \w+)?") for words in commands(block)):
        command = typer.main.get_command(app)
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]
        command.make_context("slimectl", words)


@pytest.mark.parametrize("name", ["own-data", "evaluation", "distillation"])
def test_the_examples_of_a_guide_run(
    name: str, model_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    for key, value in SMALL.items():
        monkeypatch.setenv(f"SLIMECTL_{key}", value)
    Path("base").symlink_to(model_dir("llama"))
    Path("teacher").symlink_to(model_dir("llama_untied"))
    [prompts] = blocks(ROOT / "docs" / "guides" / "own-data.md", "jsonl")
    Path("prompts.jsonl").write_text(prompts)
    examples = [
        words for block in blocks(ROOT / "docs" / "guides" / f"{name}.md", "sh example") for words in commands(block)
    ]
    assert len(examples) >= 2
    for words in examples:
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, (words, result.output, result.exception)
