"""Writes settings as a TOML file that resolves to the same settings."""

from __future__ import annotations

from typing import Any

from slimectl.redaction import redact
from slimectl.settings.root import Settings


def settings_toml(settings: Settings) -> str:
    """Serialise all settings to TOML, defaults included, except values of None where that is the default.

    Secrets are masked and must be supplied again with the file. TOML has no null: None where the default is not None
    is written as the string "none", which the loader reads back.
    """
    import tomli_w

    defaults = type(settings)().model_dump(by_alias=True)
    sections: dict[str, dict[str, Any]] = {}
    for section, keys in redact(settings.model_dump(by_alias=True)).items():
        for key, value in keys.items():
            if value is not None:
                sections.setdefault(section, {})[key] = value
            elif defaults[section].get(key) is not None:
                sections.setdefault(section, {})[key] = "none"
    return tomli_w.dumps(sections)
