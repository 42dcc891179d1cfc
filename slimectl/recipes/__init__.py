"""Recipes: named settings files that ship with slimectl."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slimectl.errors import SettingsError
from slimectl.settings.layers import YAML_SUFFIXES, Layer, from_file, settings_document

DEFAULT = Path("slimectl.toml")


@dataclass(frozen=True)
class Recipe:
    """A settings file and its [recipe] table: title, next (commands to try)."""

    layer: Layer | None
    table: dict[str, Any]
    name: str | None = None
    """Name of a shipped recipe, or the absolute path of another file. `find` accepts it."""


def names() -> list[str]:
    return sorted(file.stem for file in Path(__file__).parent.glob("*.toml"))


def find(name: str | None, *, instead: bool, needed: bool) -> Recipe:
    """Return the recipe with a name or path. Without a name, return ./slimectl.toml.

    `instead`: other files were given, so ./slimectl.toml is not read. `needed`: no other settings were given, so it is
    an error if the file is missing. Raises SettingsError, which suggests the nearest name for an unknown one.
    """
    if name is None and (instead or not DEFAULT.exists()):
        if needed:
            raise SettingsError(f"no {DEFAULT} here. Give a recipe ({', '.join(names())}), a TOML file, or -c FILE.")
        return Recipe(None, {})
    path = Path(name or DEFAULT)
    if path.suffix not in (".toml", *YAML_SUFFIXES):
        path = Path(__file__).parent / f"{name}.toml"
        if not path.exists():
            matches = difflib.get_close_matches(str(name), names(), n=1)
            hint = f"Did you mean {matches[0]}?" if matches else f"Available: {', '.join(names())}"
            raise SettingsError(f"unknown recipe {name!r}. {hint}")
    layer = replace(from_file(path), is_recipe=path.parent == Path(__file__).parent)
    recipe_table = settings_document(path).get("recipe", {})
    layer.values.setdefault("run", {}).setdefault("name", path.stem)
    return Recipe(layer, recipe_table, path.stem if layer.is_recipe else str(path.absolute()))
