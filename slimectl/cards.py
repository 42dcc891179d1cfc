"""Model cards: data about an architecture for when there is no checkpoint yet (models/*.toml)."""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Any

from slimectl.errors import SettingsError


def folder() -> Path:
    """Where the cards lie: inside the installed package, or at the top of a source tree."""
    installed = Path(__file__).parent / "models"
    return installed if installed.is_dir() else Path(__file__).parent.parent / "models"


def names() -> list[str]:
    return sorted(file.stem for file in folder().glob("*.toml"))


def load(name: str) -> dict[str, Any]:
    """The card of that name. Raises SettingsError with the nearest name."""
    path = folder() / f"{name}.toml"
    if not path.is_file():
        near = difflib.get_close_matches(name, names(), n=1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(names())}"
        raise SettingsError(f"model.card: no card {name!r}; {hint}")
    with path.open("rb") as file:
        return tomllib.load(file)
