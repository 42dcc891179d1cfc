"""slimectl diff"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slimectl.cli.options import AsJson, Selection
from slimectl.errors import SettingsError


def diff(
    before: Annotated[Path, typer.Argument(metavar="A", help="A run, a round's folder or a samples file")],
    after: Annotated[Path, typer.Argument(metavar="B", help="Another run, round or samples file")],
    as_json: AsJson = False,
) -> None:
    """Compare two runs: settings, curves, and the first step at which metrics differ.

    For two samples files or rounds, compares the responses to the same prompts.

    Example:

        slimectl diff runs/a runs/b
    """
    from slimectl.cli.comparison import show_comparison

    for path in (before, after):
        if not path.exists():
            raise SettingsError(f"{path}: no such file or folder")
    show_comparison(before, after, Selection(as_json=as_json))
