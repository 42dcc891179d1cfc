"""Exposes the settings to hooks as attributes of one flat object, as older scripts expect."""

from __future__ import annotations

from typing import Any

from slimectl.errors import HookError
from slimectl.settings import Settings, aliases
from slimectl.settings.base import Section


class FlatSettings:
    """The resolved settings as flat attributes, with the names that slime's scripts use.

    >>> FlatSettings(Settings()).rollout_temperature, FlatSettings(Settings()).lr, FlatSettings(Settings()).use_wandb
    (1.0, 1e-06, False)

    `args.section` is the section itself. `args.section_key` is a value, and so is `args.key` if it is unique.
    Old names of sections and keys work too, and so do slime's names of arguments (`hooks/slime/flags.py`), the keys of
    [custom], [megatron.args] and, after `sglang_`, [sglang.args].
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        from slimectl.migrate import (
            slime_flags as flags,  # imports the table of launch scripts, which only calls of hooks need
        )

        settings = self._settings
        sections = {section: getattr(settings, section) for section in type(settings).model_fields}
        spellings = sections | {old: sections[section] for old, section in aliases.SECTIONS.items()}
        if name in spellings:
            return spellings[name]
        if name in (custom := settings.custom.entries()):
            return custom[name]
        if name in flags.COMPUTED:
            return flags.COMPUTED[name](settings)
        for section, values in spellings.items():
            key = name.removeprefix(f"{section}_")
            if key != name and _has(values, key):
                return getattr(values, key)
        if name in settings.megatron.args:
            return settings.megatron.args[name]
        if name.startswith("sglang_") and name.removeprefix("sglang_") in settings.sglang.args:
            return settings.sglang.args[name.removeprefix("sglang_")]
        return self._main_loop(name, sections)

    def _main_loop(self, name: str, sections: dict[str, Any]) -> Any:
        """The value of slime's argument `name`, or of the one section of the main loop that has this key."""
        from slimectl.migrate import slime_flags as flags

        section, _, key = flags.SETTINGS.get(name, "").partition(".")
        if section and hasattr(sections[section], key):
            return getattr(sections[section], key)
        # [sft_warmup] repeats names of [train], and [eval] names of [rollout]. A bare name means the main loop's.
        main = [values for section, values in sections.items() if section not in ("sft_warmup", "eval")]
        matches = [values for values in main if _has(values, name)]
        if len(matches) == 1:
            return getattr(matches[0], name)
        if name in flags.DEFAULTS:
            return flags.DEFAULTS[name]
        fault = "is in several sections" if matches else "is not a setting"
        place = f"sglang.args.{name.removeprefix('sglang_')}" if name.startswith("sglang_") else f"custom.{name}"
        raise AttributeError(f"args.{name}: {name} {fault}. Use args.SECTION.KEY, or set {place}.")


def _has(section: Section, key: str) -> bool:
    """Whether a section has a key with this current or old name."""
    return key in type(section).model_fields or key in aliases.KEYS.get(type(section).section_name, {})


def settings_of(args: Any) -> Settings:
    """Return the settings behind `args`. Raises HookError for an object of another class."""
    if not isinstance(args, FlatSettings):
        raise HookError(
            f"args is of the class {type(args).__name__}. Pass on the args that your function gets, or the result of "
            f"slime.utils.arguments.parse_args."
        )
    return args._settings
