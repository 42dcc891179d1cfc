"""Checks track.kwargs against the arguments that a tracker or its library accepts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, cast

from slimectl.errors import SettingsError

MOST_NAMES = 40
"""Largest number of names that a message lists. wandb has 140 settings."""

Accepted = Mapping[str, Any]
"""Accepted argument names. The value is the names of the keys for a table, else None."""


def parameters(function: Callable[..., object]) -> dict[str, Any]:
    """Return the names that a function accepts by keyword.

    >>> parameters(lambda run, *, path=None, **more: None)
    {'run': None, 'path': None}
    """
    return dict.fromkeys(each.name for each in inspect.signature(function).parameters.values() if _has_name(each))


def fields(model: type) -> dict[str, Any]:
    """Return the fields of a pydantic model. A field that is a table has the names of its keys."""
    return {name: _table(field.annotation) for name, field in cast(Any, model).model_fields.items()}


def accepted_arguments(tracker: Callable[..., object]) -> Accepted | None:
    """Return the arguments that a tracker accepts, or None if it accepts any.

    They are the parameters of its constructor. A tracker that passes its arguments to a library returns them from a
    static method `accepted_arguments`.
    """
    if declared := getattr(tracker, "accepted_arguments", None):
        return cast(Accepted, declared())
    _, *parameters = inspect.signature(tracker).parameters.values()  # the first is the run
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return None
    section = {"settings"} if getattr(tracker, "settings_class", None) else set()  # not an argument of the user's
    return dict.fromkeys(each.name for each in parameters if _has_name(each) and each.name not in section)


def check_arguments(setting: str, arguments: Mapping[str, Any], accepted: Accepted) -> None:
    """Raise SettingsError for an argument, or a key of a table among them, that is not accepted."""
    for name, value in arguments.items():
        if name not in accepted:
            raise SettingsError(f"{setting}.{name}: no such argument. {_remedy(name, sorted(accepted))}")
        if accepted[name] is not None:
            if not isinstance(value, Mapping):
                raise SettingsError(f"{setting}.{name}: {value!r} is not a table. Write {{NAME = VALUE}}.")
            check_arguments(f"{setting}.{name}", value, accepted[name])


def _remedy(name: str, accepted: list[str]) -> str:
    if near := get_close_matches(name, accepted, n=1):
        return f"Did you mean {near[0]}?"
    names = f" of {len(accepted)}" if len(accepted) > MOST_NAMES else f": {', '.join(accepted)}"
    return f"Drop it, or use one{names}" if accepted else "Drop it: this tracker has no arguments."


def _has_name(parameter: inspect.Parameter) -> bool:
    return parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)


def _table(annotation: Any) -> dict[str, Any] | None:
    return fields(annotation) if hasattr(annotation, "model_fields") else None
