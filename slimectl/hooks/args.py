"""Exposes the settings to hooks as attributes of one flat object, as older scripts expect."""

from __future__ import annotations

from typing import Any

from slimectl.settings import Settings


class FlatSettings:
    """The resolved settings as flat attributes, by the names that slime's scripts use.

    >>> FlatSettings(Settings()).rollout_temperature, FlatSettings(Settings()).lr
    (1.0, 1e-06)

    `args.section` is the section itself; `args.section_key` and, where only one section has it, `args.key` its value.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        settings = self._settings
        if name in type(settings).model_fields:
            return getattr(settings, name)
        sections = {section: getattr(settings, section) for section in type(settings).model_fields}
        for section, values in sections.items():
            key = name.removeprefix(f"{section}_")
            if key != name and key in type(values).model_fields:
                return getattr(values, key)
        # The warm-up repeats names of [train], evaluations those of [rollout]; a bare name means the main loop's.
        main = [values for section, values in sections.items() if section not in ("warmup", "eval")]
        matches = [values for values in main if name in type(values).model_fields]
        if len(matches) == 1:
            return getattr(matches[0], name)
        fault = "stands in several sections" if matches else "is no setting"
        raise AttributeError(f"args.{name}: {name} {fault}; use args.SECTION.KEY")
