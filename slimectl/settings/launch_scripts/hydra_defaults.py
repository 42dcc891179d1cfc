"""Joins a configuration of Hydra with the files that its list of defaults names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slimectl.settings.launch_scripts.flags import Flag, is_part_of
from slimectl.settings.launch_scripts.shell_values import Field
from slimectl.settings.launch_scripts.shell_words import Place, read_text

MAX_FILES = 50
KEY = "defaults"
STOCK = re.compile(r"(\w+_)?(ppo|sft|dapo)(_megatron)?_trainer(_engine)?")
"""Configurations that come with verl: their values are the defaults of its table."""
PACKAGE = re.compile(r"#\s*@package\s+(\S+)")
HERE = ("_here_", "_global_", "_group_")


@dataclass(frozen=True)
class Entry:
    """One entry of a list of defaults: a file below the configuration's folder, and where its keys are put."""

    file: str
    package: str
    line: int

    @property
    def is_own(self) -> bool:
        """Whether it stands for the keys of the configuration itself."""
        return self.file == "_self_"


def with_defaults(
    own_flags: list[Flag], path: Path, name: str, root: Path, read: Callable[[Path, str], list[Flag]]
) -> list[Flag]:
    """Return the flags of a configuration and of its defaults in Hydra's order; a later flag replaces an earlier one.

    `read` returns the flags of one file, and `root` is the folder whose files may be read. Entries that are not read
    stay in the flag `defaults`. Raises SettingsError as `read` does.
    """
    if not any(is_part_of(flag.name, KEY) for flag in own_flags):
        return own_flags
    joined: dict[str, Flag] = {}
    unread: list[Field] = []
    document = {flag.name: flag for flag in own_flags if not is_part_of(flag.name, KEY)}
    entries = list(_entries(path, name))
    if not any(entry.is_own for entry in entries):
        entries.append(Entry("_self_", "", 0))
    for entry in entries[:MAX_FILES]:
        file = path.parent / f"{entry.file.removesuffix('.yaml')}.yaml"
        if entry.is_own:
            joined = _over(joined, document)
        elif file.is_file() and file.resolve().is_relative_to(root.resolve()) and file.resolve() != path.resolve():
            shown = str(Path(name).parent / f"{entry.file.removesuffix('.yaml')}.yaml")
            package = _package(file, shown, entry.package)
            flags = read(file, shown)
            joined = _over(joined, {f"{package}{flag.name}": _inside(package, flag) for flag in flags})
        elif not STOCK.fullmatch(entry.file.rpartition("/")[2]):
            unread.append(Field(entry.file, Place(name, entry.line)))
    result = list(joined.values())
    return [*result, Flag(KEY, f"{KEY}:", tuple(unread), unread[0].place)] if unread else result


def _inside(package: str, flag: Flag) -> Flag:
    """Return a flag of a file under the name that it has in the whole configuration."""
    return replace(flag, name=f"{package}{flag.name}", spelling=f"{package}{flag.spelling}")


def _over(earlier: dict[str, Flag], later: dict[str, Flag]) -> dict[str, Flag]:
    """Return the flags of both; a later one replaces an earlier one of its name, in its own place."""
    return {name: flag for name, flag in earlier.items() if name not in later} | later


def _entries(path: Path, name: str) -> Iterator[Entry]:
    """Return the entries of the list `defaults`: files, `group: option`, and `…@package`."""
    import yaml

    node = yaml.compose(read_text(path, name), Loader=yaml.SafeLoader)
    lists = [value for key, value in getattr(node, "value", []) if key.value == KEY]
    for item in lists[0].value if lists and isinstance(lists[0], yaml.SequenceNode) else []:
        line = item.start_mark.line + 1
        if isinstance(item, yaml.ScalarNode):
            file, _, package = item.value.partition("@")
            yield Entry(file, _prefix(package or ("" if file.startswith("..") else file.rpartition("/")[0])), line)
        for key, value in item.value if isinstance(item, yaml.MappingNode) else []:
            group, _, package = str(key.value).split()[-1].partition("@")
            options: list[Any] = value.value if isinstance(value, yaml.SequenceNode) else [value]
            for option in options:
                if isinstance(option, yaml.ScalarNode) and option.value not in ("null", "~", ""):
                    yield Entry(f"{group.strip('/')}/{option.value}", _prefix(package or group), line)


def _prefix(package: str) -> str:
    """Return the beginning of the names in a package."""
    return "" if package in ("", *HERE) else f"{package.strip('/').replace('/', '.')}."


def _package(file: Path, name: str, prefix: str) -> str:
    """Return the beginning of the names in a file, which a comment in its first lines may set."""
    head = read_text(file, name)[:500]
    match = PACKAGE.search(head)
    return _prefix(match[1]) if match and match[1] != "_group_" else prefix
