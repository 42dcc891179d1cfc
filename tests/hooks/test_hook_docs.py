"""docs/hooks.md: the table is the one of the code, and its example runs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner
from workshop import Workshop

from slimectl.cli.app import app
from slimectl.hooks import HOOKS

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "hooks.md").read_text()
SLIME = (DOCS / "guides" / "slime-functions.md").read_text()


SETTING = re.compile(r"\| `\w+\.\w+`")
"""A row of a table about hooks."""


def row(setting: str) -> str:
    """As the table has it; `settings` is `args` by another name."""
    point = HOOKS[setting]
    names = ", ".join(f"`{name}`" for name in point.offers if name != "settings")
    other = "".join(
        f"; {', '.join(f'`{name}`' for name in names)} in place of {', '.join(f'`{name}`' for name in replaced)}"
        for names, replaced in point.alternatives()
    )
    return f"| `{setting}` | {names}{other} | {point.returns} |"


def test_the_table_has_every_hook_with_its_shape():
    rows = [line for line in TEXT.splitlines() if SETTING.match(line)]
    assert rows == [row(setting) for setting in HOOKS]
    tried = {
        line.split("`")[1]: line.split("|")[3].strip()
        for line in SLIME.partition("## Imports of slime")[0].splitlines()
        if SETTING.match(line)
    }
    assert list(tried) == list(HOOKS)  # and tests/hooks/test_slime_functions.py tries each
    assert [setting for setting, word in tried.items() if not word.startswith("yes")] == []


def called(*words: str) -> str:
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def test_the_worked_example_runs(workshop: Workshop, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(workshop.folder)
    (workshop.folder / "slimectl.toml").unlink()  # as the reader has none
    (example,) = re.findall(r"```python own.py\n(.*?)```", TEXT, re.DOTALL)
    (workshop.folder / "own.py").write_text(example)
    (command,) = re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
    words = shlex.split(command.replace("MODEL", str(workshop.model)).replace("\\\n", " "))
    short = ["run.rollout_batch_size=4", "rollout.n_samples_per_prompt=2", "rollout.max_response_len=6"]
    assert words[0] == "slimectl"
    called(*words[1:], "--name", "doc", *[word for each in short for word in ("-s", each)])
    steps = [line["metrics"] for line in workshop.metrics("doc") if "train/step" in line["metrics"]]
    assert [metrics["rollout/step"] for metrics in steps] == [1, 2, 3]
    assert [metrics["rollout/longest_prompt"] for metrics in steps] == [4, 5, 5]


def test_explain_says_what_a_hook_is_called_with():
    said = called("settings", "explain", "rollout.sample_filter_path")
    assert "called with args, settings, data; returns None; it sets remove_sample (docs/hooks.md)" in said
