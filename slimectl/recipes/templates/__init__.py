"""Templates of `slimectl init`: small projects that train on a CPU, with commented settings, data and functions."""

from __future__ import annotations

import difflib
import re
import textwrap
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from slimectl.errors import SettingsError

SETTINGS_FILE = "slimectl.toml"
DEFAULT = "verifier"
COLUMNS = 100
"""Maximum width of a description in a settings file."""


@dataclass(frozen=True)
class Template:
    """The files of a template. The header of its settings file has the title and the commands."""

    name: str
    title: str
    files: dict[str, str]
    """Texts by file name. Every key of the settings file is described by the manual of settings."""
    commands: list[str]
    """Commands to run in the folder, each with a comment."""


def names() -> list[str]:
    """Return the names of all templates, the default first."""
    found = {file.parent.name for file in Path(__file__).parent.glob(f"*/{SETTINGS_FILE}")}
    return [DEFAULT, *sorted(found - {DEFAULT})]


def load(name: str) -> Template:
    """Return a template. Raises SettingsError, which suggests the nearest name, for an unknown one."""
    if name not in names():
        near = difflib.get_close_matches(name, names(), n=1)
        hint = f"Did you mean {near[0]}?" if near else f"Choose one of {', '.join(names())}."
        raise SettingsError(f"--from {name}: unknown template. {hint}")
    folder = Path(__file__).parent / name
    texts = {file.name: file.read_text(encoding="utf-8") for file in sorted(folder.iterdir()) if file.is_file()}
    settings = texts.pop(SETTINGS_FILE)
    title = settings.partition("\n")[0].removeprefix("# ")
    files = {SETTINGS_FILE: described(settings), **texts}
    return Template(name, title, files, re.findall(r"^#   (\S.*)$", settings, re.MULTILINE))


def described(settings: str) -> str:
    """Return a settings file with the first sentence of the manual above every key."""
    lines, section = [], ""
    for line in settings.splitlines():
        if header := re.match(r"\[(\w+)\]", line):
            section = header[1]
        elif key := re.match(r"(\w+) = ", line):
            first_sentence = re.split(r"(?<=\.)\s", _manual()[f"{section}.{key[1]}"])[0]
            lines += textwrap.wrap(first_sentence, COLUMNS, initial_indent="# ", subsequent_indent="# ")
        lines.append(line)
    return "\n".join(lines) + "\n"


@cache
def _manual() -> dict[str, str]:
    """Return the description of every setting by key. Keys of all algorithms are `algorithm.KEY`."""
    from slimectl.settings.reference import entries

    texts: dict[str, str] = {}
    for entry in entries():
        texts.setdefault(re.sub(r"^algorithm\.\w+\.", "algorithm.", entry.key), entry.text)
    return texts
