"""Settings that refer to other settings: ${run.name}, or ROLL's ${exp_name}."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from slimectl.errors import SettingsError
from slimectl.system.redaction import is_reference

if TYPE_CHECKING:
    from slimectl.settings.root import Settings

PLACEHOLDER = re.compile(r"\$\{([^{}]*)\}")
ROLL_NAMES = {"exp_name": "run.name"}
DEFAULTS = {"run.name": "run"}
"""Values used for settings that are unset."""


def filled(value: Any, settings: Settings, *, setting: str) -> Any:
    """Return a value, or a table or list of values, with every placeholder replaced.

    Raises SettingsError for a placeholder that is not a setting, or whose setting is not a string or a number.
    """
    if isinstance(value, dict):
        return {key: filled(item, settings, setting=f"{setting}.{key}") for key, item in value.items()}
    if isinstance(value, list):
        return [filled(item, settings, setting=setting) for item in value]
    if not isinstance(value, str) or is_reference(value):
        return value
    return PLACEHOLDER.sub(lambda match: _text(match[1], settings, setting), value)


def _text(name: str, settings: Settings, setting: str) -> str:
    section, _, key = ROLL_NAMES.get(name, name).partition(".")
    fields = type(getattr(settings, section)).model_fields if section in type(settings).model_fields else {}
    if key not in fields:
        raise SettingsError(
            f"{setting}: ${{{name}}} is not a setting. Write ${{SECTION.KEY}}, for example ${{run.name}}, or the value."
        )
    value = getattr(getattr(settings, section), key)
    value = DEFAULTS.get(f"{section}.{key}") if value is None else value
    if not isinstance(value, str | int | float):
        raise SettingsError(
            f"{setting}: ${{{name}}} is not set to a string or a number. Set {section}.{key}, or write the value."
        )
    return str(value)
