"""slimectl inspect"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slimectl.errors import SettingsError


def inspect(
    path: Annotated[Path, typer.Argument(help="A run's folder, a samples file, or anything with a manifest")],
    rows: Annotated[int, typer.Option("--rows", help="Samples to print of a file")] = 3,
) -> None:
    """Say what a run, a samples file or a model directory is and where it came from.

    Example:

        slimectl inspect runs/quickstart
    """
    if not path.exists():
        raise SettingsError(f"{path}: no such file or folder")
    from slimectl.cli import looking

    if (path / "run.toml").exists():
        looking.at_run(path)
    elif path.is_dir():
        looking.at_folder(path)
    else:
        looking.at_samples(path, rows)
    looking.at_manifest(path)
