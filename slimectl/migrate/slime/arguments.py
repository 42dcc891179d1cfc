"""`parse_args` for slime's flags, and loading functions by path."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any, ClassVar

from slimectl.errors import HookError
from slimectl.hooks.args import FlatSettings
from slimectl.migrate.launch_scripts.conversion import Conversion, canonical, convert, typed
from slimectl.migrate.launch_scripts.flags import Flag, options
from slimectl.migrate.launch_scripts.shell_values import Field
from slimectl.migrate.launch_scripts.shell_words import Place
from slimectl.migrate.launch_scripts.slime import SLIME
from slimectl.plugins.callables import load_callable

COMMAND_LINE = Place("command line", 1)


class ProgramArguments(FlatSettings):
    """Arguments of a standalone program. Its number of rollouts comes from --num-rollout only."""

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if name == "num_rollout" and value is None and self.num_epoch is None:
            raise HookError("args.num_rollout: the command line has no --num-rollout. Add --num-rollout N.")
        return value


def parse_args(add_custom_arguments: Callable[[argparse.ArgumentParser], Any] | None = None) -> FlatSettings:
    """Parse slime's flags on this program's command line and return them as the `args` that hooks get.

    `add_custom_arguments` adds the program's own arguments to a parser. Flags without a setting of slimectl become
    attributes too. Like argparse, it exits the program for an unknown flag or a wrong value.
    """
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        epilog="All other options are flags of slime. docs/from-slime.md of slimectl lists the settings that they set.",
    )
    if add_custom_arguments is not None:
        parser = add_custom_arguments(parser) or parser
    own, words = parser.parse_known_args()
    flags, loose = options([Field(word, COMMAND_LINE) for word in words])
    unknown = [word.text for word in loose] + [flag.spelling for flag in flags if not _is_known(flag)]
    if unknown:
        parser.error(f"{unknown[0]} is not a flag of slime. Add it to add_custom_arguments.")
    conversion = convert(SLIME, flags)
    if faults := [*filter(None, map(_fault, flags)), *conversion.problems, *_refusals(conversion)]:
        parser.error(faults[0].replace(" (launch)", ""))
    return _with_attributes(conversion, flags, vars(own))


def _is_known(flag: Flag) -> bool:
    return SLIME.row(SLIME.name_of(flag.name)) is not None or canonical(flag.name).startswith("sglang_")


def _fault(flag: Flag) -> str:
    """Return why a flag's values cannot be read, or an empty string if they can."""
    row = SLIME.row(SLIME.name_of(flag.name))
    try:
        if row is not None and row.convert is not None:
            row.convert(flag)
    except ValueError as error:
        return f"{flag}: {str(error).removesuffix('. Set the key by hand')}"
    return ""


def _refusals(conversion: Conversion) -> list[str]:
    """Return the errors of values that a setting rejects, such as `run.num_rollout: input should be …`."""
    return [item.reason for item in conversion.omissions if re.match(r"[a-z_]+\.[\w.]+: ", item.reason)]


def _with_attributes(conversion: Conversion, flags: list[Flag], own: dict[str, Any]) -> FlatSettings:
    """Return the settings as arguments, with the flags that have no setting and the program's own arguments."""
    args = ProgramArguments(conversion.settings)
    omitted = {item.flag for item in conversion.omissions}
    for flag in flags:
        if str(flag) in omitted:
            setattr(args, canonical(flag.name), typed(flag))
    for name, value in own.items():
        setattr(args, name, value)
    return args


def load_function(path: str) -> Callable[..., Any]:
    """Return the function at a path. Raises HookError if there is none."""
    return load_callable(path, setting="load_function")


class SingletonMeta(type):
    """Metaclass of classes with one instance per process."""

    _instances: ClassVar[dict[type, Any]] = {}

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls not in cls._instances:
            cls._instances[cls] = super().__call__(*args, **kwargs)
        return cls._instances[cls]
