"""Describes the flags of an argument parser as JSON, with the standard library only."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from typing import Any


def describe(parser: argparse.ArgumentParser, fields: Collection[str]) -> dict[str, dict[str, Any]]:
    """Describe each of `fields` that has a flag: the flag, its possible values, and the default."""
    flagged = (action for action in parser._actions if action.dest in fields and _flags(action))
    return {action.dest: _describe_action(action) for action in flagged}


def _flags(action: argparse.Action) -> list[str]:
    """Return the long flags of an argument, or [] for a positional one."""
    return [flag for flag in action.option_strings if flag.startswith("--")]


def _describe_action(action: argparse.Action) -> dict[str, Any]:
    flags = _flags(action)
    if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
        takes = "nothing"
    else:
        takes = "many" if action.nargs in ("*", "+") or isinstance(action.nargs, int) else "one"
    return {
        "flag": flags[0],
        "off": next((flag for flag in flags if flag.startswith("--no-")), None),
        "takes": takes,
        "type": getattr(action.type, "__name__", None),
        "choices": sorted(map(str, action.choices)) if action.choices else None,
        "default": action.default if isinstance(action.default, bool) else None,
    }
