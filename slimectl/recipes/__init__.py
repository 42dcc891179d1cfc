"""Named runs that ship with slimectl."""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimectl.errors import SettingsError
from slimectl.settings.layers import Layer, from_file

DEFAULT = Path("slimectl.toml")


@dataclass(frozen=True)
class Recipe:
    """A settings file and its words about itself: title, next (commands to try)."""

    layer: Layer | None
    words: dict[str, Any]


def names() -> list[str]:
    return sorted(file.stem for file in Path(__file__).parent.glob("*.toml"))


def find(wanted: str | None, *, instead: bool, needed: bool) -> Recipe:
    """The recipe of that name or file; where none is named, ./slimectl.toml.

    `instead`: other files were given, so that one is left alone. `needed`: nothing else was said of the run, so its
    absence is an error. Raises SettingsError, for an unknown name with the nearest one.
    """
    if wanted is None and (instead or not DEFAULT.exists()):
        if needed:
            raise SettingsError(
                f"no {DEFAULT} here; name a recipe ({', '.join(names())}) or a TOML file, or give -c FILE"
            )
        return Recipe(None, {})
    path = Path(wanted or DEFAULT)
    if path.suffix != ".toml":
        path = Path(__file__).parent / f"{wanted}.toml"
        if not path.exists():
            near = difflib.get_close_matches(str(wanted), names(), n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(names())}"
            raise SettingsError(f"recipe {wanted!r}: unknown; {hint}")
    layer = from_file(path)
    words = tomllib.loads(path.read_text(encoding="utf-8")).get("recipe", {})
    layer.values.setdefault("run", {}).setdefault("name", path.stem)
    return Recipe(layer, words)
