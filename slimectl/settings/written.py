"""Settings as a TOML file that resolves to the same settings."""

from __future__ import annotations

from typing import Any

from slimectl.redaction import redact
from slimectl.settings.root import Settings


def settings_toml(settings: Settings) -> str:
    """Every value that differs from its default or might some day; None is left out where it is the default.

    Secrets are masked: whoever goes on from the file gives them again. TOML has no null: a key whose value is None
    against a default that is not is written as the string "none", which the loader reads back.
    """
    import tomli_w

    defaults = type(settings)().model_dump(by_alias=True)
    written: dict[str, dict[str, Any]] = {}
    for section, keys in redact(settings.model_dump(by_alias=True)).items():
        for key, value in keys.items():
            if value is not None:
                written.setdefault(section, {})[key] = value
            elif defaults[section].get(key) is not None:
                written.setdefault(section, {})[key] = "none"
    return tomli_w.dumps(written)
