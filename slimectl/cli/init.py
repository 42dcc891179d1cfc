"""slimectl init"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slimectl.cli.options import AsJson
from slimectl.errors import SettingsError, StorageError
from slimectl.system import stdio

if TYPE_CHECKING:
    from slimectl.recipes.templates import Template


def init(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="Folder for the files. It is created if missing")
    ] = Path(),
    template: Annotated[
        str,
        typer.Option("--from", metavar="TEMPLATE", help="Template: verifier, reward, sft, dpo, agent or environment"),
    ] = "verifier",
    lists_templates: Annotated[bool, typer.Option("--list", help="List the templates, and write nothing")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a small project that trains at once: commented settings, data and your own function.

    Change it into your task file by file. Existing files are never replaced. The paths of the new files go to stdout.

    Example:

        slimectl init my-task --from reward
    """
    from slimectl.recipes import templates

    selected = [templates.load(name) for name in (templates.names() if lists_templates else [template])]
    if not lists_templates:
        _write(selected[0], path)
    if as_json:
        for item in selected:
            record = {"name": item.name, "title": item.title, "files": list(item.files), "commands": item.commands}
            stdio.emit(json.dumps(record))
    elif lists_templates:
        for item in selected:
            stdio.emit(f"{item.name:<12} {item.title}")
    else:
        for name in selected[0].files:
            stdio.emit(str(path / name))
        enter = [] if path == Path() else [f"cd {shlex.quote(str(path))}"]
        stdio.note("next:\n" + "\n".join(f"  {line}" for line in [*enter, *selected[0].commands]))


def _write(template: Template, folder: Path) -> None:
    """Write the files of a template into a folder. Raises SettingsError if one of them exists."""
    from slimectl.data.atomic_replace import write_text

    if existing := [name for name in template.files if (folder / name).exists()]:
        raise SettingsError(
            f"{folder / existing[0]}: already exists and is not replaced. Give another folder: "
            f"slimectl init FOLDER --from {template.name}"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{folder}: {error.strerror}. Give a folder that you may write to.") from error
    for name, text in template.files.items():
        write_text(folder / name, text)
