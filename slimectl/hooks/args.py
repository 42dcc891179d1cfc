"""Exposes the settings to hooks as attributes of one flat object, as older scripts expect."""

from __future__ import annotations

from typing import Any

from slimectl.settings import Settings, aliases
from slimectl.settings.base import Section


class FlatSettings:
    """The resolved settings as flat attributes, by the names that slime's scripts use.

    >>> FlatSettings(Settings()).rollout_temperature, FlatSettings(Settings()).lr
    (1.0, 1e-06)

    `args.section` is the section itself; `args.section_key` and, where only one section has it, `args.key` its value.
    Old names of sections and keys work too.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        settings = self._settings
        sections = {section: getattr(settings, section) for section in type(settings).model_fields}
        spellings = sections | {old: sections[section] for old, section in aliases.SECTIONS.items()}
        if name in spellings:
            return spellings[name]
        for section, values in spellings.items():
            key = name.removeprefix(f"{section}_")
            if key != name and _has(values, key):
                return getattr(values, key)
        # [sft_warmup] repeats names of [train], [eval] those of [rollout]; a bare name means the main loop's.
        main = [values for section, values in sections.items() if section not in ("sft_warmup", "eval")]
        matches = [values for values in main if _has(values, name)]
        if len(matches) == 1:
            return getattr(matches[0], name)
        fault = "stands in several sections" if matches else "is no setting"
        raise AttributeError(f"args.{name}: {name} {fault}; use args.SECTION.KEY")


def _has(section: Section, key: str) -> bool:
    """Whether a section has a key of this present or old name."""
    return key in type(section).model_fields or key in aliases.KEYS.get(type(section).section_name, {})
