"""slimectl inspect"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slimectl.cli.options import SETTINGS, CommonOptions, with_options
from slimectl.errors import SettingsError


@with_options("path rows mask model", SETTINGS)
def inspect(
    options: CommonOptions,
    path: Annotated[Path, typer.Argument(help="A run's folder, a samples file, or anything with a manifest")],
    rows: Annotated[int, typer.Option("--rows", help="Samples to print of a file")] = 3,
    mask: Annotated[
        bool, typer.Option("--mask", help="Show which tokens are taught: green, or in [[ ]] without colours")
    ] = False,
) -> None:
    """Say what a run, a samples file or a model directory is and where it came from.

    With --mask, a samples file (or chats to imitate; preferences with -s algorithm.name=dpo) is shown token by token:
    what the model is taught, and what it only reads. The model is the one that the file's manifest names, or --model;
    rows are read as `train` would with the same -c and -s.

    Example:

        slimectl inspect runs/quickstart
    """
    if not path.exists():
        raise SettingsError(f"{path}: no such file or folder")
    if mask:
        from slimectl.cli.inspect_views import show_masks

        show_masks(path, rows, options.resolve().settings)
        return
    from slimectl.cli import inspect_views

    if (path / "run.toml").exists():
        inspect_views.show_run(path)
    elif path.is_dir():
        inspect_views.show_folder(path)
    else:
        inspect_views.show_samples(path, rows)
    inspect_views.show_manifest(path)
