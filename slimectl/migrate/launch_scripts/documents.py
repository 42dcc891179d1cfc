"""Reads YAML configurations as flags, each with the line of its key."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from slimectl.errors import SettingsError
from slimectl.migrate.launch_scripts.flags import Flag, is_part_of
from slimectl.migrate.launch_scripts.foreign import document_purpose
from slimectl.migrate.launch_scripts.shell_values import Field, checked
from slimectl.migrate.launch_scripts.shell_variables import is_secret_variable
from slimectl.migrate.launch_scripts.shell_words import Place, read_text

MAX_KEYS = 5_000
MAX_DEPTH = 30
MAX_BRACKETS = 100
MAX_MERGED = 100
"""Maximum number of mappings that one `<<` takes over."""
MAX_DEFAULTS = 8
MAX_FILES = 50
"""Maximum number of files in one list of defaults."""
REFERENCE = re.compile(r"\$\{([\w.]+)\}")
SELECTION = re.compile(r"\$\{oc\.select:\s*([\w.]+)\s*(?:,([^${}]*))?\}")
"""OmegaConf's reference to a key that may be missing, and its default."""
ENVIRONMENT = re.compile(r"\$\{(?:oc\.)?env:(\w+)(?:,([^${}]*))?\}")
"""OmegaConf's reference to an environment variable, and its default."""


def yaml_flags(
    path: Path, name: str, environ: Mapping[str, str] = MappingProxyType({}), root: Path | None = None
) -> list[Flag]:
    """Return every value of a YAML file and of the files in its defaults as a flag with a dotted name.

    Raises SettingsError with the line of an error.
    """
    return _resolved(_joined(path, name, root or path.parent, 0), environ)


def _values(path: Path, name: str) -> list[Flag]:
    """Return the values of a YAML file without resolving references."""
    import yaml

    text = read_text(path, name)
    _refuse_nesting(text, name)
    try:
        nodes = list(yaml.compose_all(text, Loader=yaml.SafeLoader))
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise SettingsError(f"{name}:{line}: not valid YAML: {error.problem}") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise SettingsError(f"{name}: not valid YAML: {' '.join(str(error).split())[:80]}") from None
    node = nodes[0] if nodes else None
    if len(nodes) > 1:
        keys = [key.value for key, _ in node.value] if isinstance(node, yaml.MappingNode) else []
        purpose = document_purpose(keys) or "holds several documents. Give a configuration that is one"
        raise SettingsError(f"{name}: {purpose}")
    if not isinstance(node, yaml.MappingNode):
        raise SettingsError(f"{name}: has no keys with values. Give a configuration")
    flags = []
    for flag in _leaves(node, "", name, 0):
        flags.append(flag)
        if len(flags) > MAX_KEYS:
            raise SettingsError(f"{flag.place}: more than {MAX_KEYS} values. Give a configuration")
    return flags


def _refuse_nesting(text: str, name: str) -> None:
    """Raise SettingsError for brackets nested so deeply that the YAML parser would take minutes."""
    depth = 0
    for position, character in enumerate(text):
        depth += (character in "[{") - (character in "]}")
        if depth > MAX_BRACKETS:
            line = text.count("\n", 0, position) + 1
            raise SettingsError(f"{name}:{line}: more than {MAX_BRACKETS} brackets inside one another. Write it flat")


def _leaves(node: Any, prefix: str, file: str, depth: int) -> Iterator[Flag]:
    import yaml

    if depth > MAX_DEPTH:
        raise SettingsError(f"{file}:{node.start_mark.line + 1}: nested more than {MAX_DEPTH} deep. Write it flat")
    for key, value in _merged(node.value, file):
        if not isinstance(key, yaml.ScalarNode):
            raise SettingsError(f"{file}:{key.start_mark.line + 1}: this key is not read. Write NAME: VALUE")
        place = Place(file, key.start_mark.line + 1)
        name = f"{prefix}{key.value}"
        if isinstance(value, yaml.MappingNode):
            yield from _leaves(value, f"{name}.", file, depth + 1)
        elif isinstance(value, yaml.SequenceNode) and not all(
            isinstance(item, yaml.ScalarNode) for item in value.value
        ):
            paths = [_path_of(item) for item in value.value]
            if key.value in LISTS and all(isinstance(item, yaml.MappingNode) for item in value.value):
                for number, item in enumerate(value.value):
                    yield from _leaves(item, f"{name}.{number}.", file, depth + 1)
                continue
            fields = [Field(path, place) for path in paths if path] if all(paths) else []
            yield Flag(name, f"{name}:", tuple(fields) or (Field("…", place, "it is a list of tables"),), place)
        else:
            nodes = value.value if isinstance(value, yaml.SequenceNode) else [value]
            values = [Field(text, place) for item in nodes for text in _scalar(item)]
            yield Flag(name, f"{name}:", tuple(values), place, "" if values else NULL)


def _path_of(node: Any) -> str:
    """The path in a table of a data set, or an empty string for other tables."""
    import yaml

    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    return next(
        (str(value.value) for key, value in pairs if key.value == "path" and isinstance(value, yaml.ScalarNode)), ""
    )


def _merged(pairs: Sequence[tuple[Any, Any]], file: str) -> Iterator[tuple[Any, Any]]:
    """The keys and values of a mapping: first its own, then the ones that `<<` takes over from other mappings."""
    import yaml

    names: set[str] = set()
    waiting: list[Sequence[tuple[Any, Any]]] = [pairs]
    for taken in range(MAX_MERGED):
        if not waiting:
            return
        for key, value in waiting.pop(0):
            name = key.value if isinstance(key, yaml.ScalarNode) else ""
            if name == "<<":
                tables = value.value if isinstance(value, yaml.SequenceNode) else [value]
                waiting += [table.value for table in tables if isinstance(table, yaml.MappingNode)]
            elif name not in names or not taken:
                names.add(name)
                yield key, value
    mark = pairs[0][0].start_mark
    raise SettingsError(f"{file}:{mark.line + 1}: << takes over more than {MAX_MERGED} mappings. Write it flat")


LISTS = ("filters",)
"""Keys whose lists of tables become flags with numbers in their names, as in `filters.0.enabled`."""
KEY = "defaults"
OWN = "_self_"
"""The entry of the defaults that means the configuration's own keys."""
STOCK = re.compile(r"(\w+_)?(ppo|sft|dapo)(_megatron)?_trainer(_engine)?")
"""Configurations that ship with verl. Their values are the defaults of its table."""
PACKAGE = re.compile(r"#\s*@package\s+(\S+)")
HERE = ("_here_", "_global_", "_group_")


def _joined(path: Path, name: str, root: Path, depth: int) -> list[Flag]:
    """Return the unresolved values of a YAML file and its defaults. Later ones override earlier ones, as in Hydra.

    `root` is the folder whose files may be read. Entries that are not read stay in the flag `defaults`.
    """
    if depth > MAX_DEFAULTS:
        raise SettingsError(f"{name}: defaults refer to one another more than {MAX_DEFAULTS} deep. Write them flat")
    own_flags = _values(path, name)
    if not any(is_part_of(flag.name, KEY) for flag in own_flags):
        return own_flags
    joined: dict[str, Flag] = {}
    unread: list[Field] = []
    document = {flag.name: flag for flag in own_flags if not is_part_of(flag.name, KEY)}
    entries = list(_entries(path, name))
    if OWN not in [entry for entry, _, _ in entries]:
        entries.append((OWN, "", 0))
    for entry, package, line in entries[:MAX_FILES]:
        relative = f"{entry.removesuffix('.yaml')}.yaml"
        file = path.parent / relative
        if entry == OWN:
            joined = _over(joined, document)
        elif file.is_file() and file.resolve().is_relative_to(root.resolve()) and file.resolve() != path.resolve():
            shown = str(Path(name).parent / relative)
            package = _package(file, shown, package)
            flags = _joined(file, shown, root, depth + 1)
            names = [f"{package}{flag.name}" for flag in flags]
            joined = _over(joined, {
                key: replace(flag, name=key, spelling=f"{package}{flag.spelling}")
                for key, flag in zip(names, flags, strict=True)
            })  # fmt: skip
        elif not STOCK.fullmatch(entry.rpartition("/")[2]):
            unread.append(Field(entry, Place(name, line)))
    result = list(joined.values())
    return [*result, Flag(KEY, f"{KEY}:", tuple(unread), unread[0].place)] if unread else result


def _over(earlier: dict[str, Flag], later: dict[str, Flag]) -> dict[str, Flag]:
    """Return the flags of both. A later flag replaces an earlier one of the same name, at its position."""
    return {name: flag for name, flag in earlier.items() if name not in later} | later


def _entries(path: Path, name: str) -> Iterator[tuple[str, str, int]]:
    """Return the entries of the list `defaults` (files, `group: option`, `…@package`) with their package and line."""
    import yaml

    node = yaml.compose(read_text(path, name), Loader=yaml.SafeLoader)
    lists = [value for key, value in getattr(node, "value", []) if key.value == KEY]
    for item in lists[0].value if lists and isinstance(lists[0], yaml.SequenceNode) else []:
        line = item.start_mark.line + 1
        if isinstance(item, yaml.ScalarNode):
            file, _, package = item.value.partition("@")
            yield file, _prefix(package or ("" if file.startswith("..") else file.rpartition("/")[0])), line
        for key, value in item.value if isinstance(item, yaml.MappingNode) else []:
            group, _, package = str(key.value).split()[-1].partition("@")
            options: list[Any] = value.value if isinstance(value, yaml.SequenceNode) else [value]
            for option in options:
                if isinstance(option, yaml.ScalarNode) and option.value not in ("null", "~", ""):
                    yield f"{group.strip('/')}/{option.value}", _prefix(package or group), line


def _prefix(package: str) -> str:
    """Return the prefix of names in a package."""
    return "" if package in ("", *HERE) else f"{package.strip('/').replace('/', '.')}."


def _package(file: Path, name: str, prefix: str) -> str:
    """Return the prefix of names in a file, which a comment in its first lines may set."""
    head = read_text(file, name)[:500]
    match = PACKAGE.search(head)
    return _prefix(match[1]) if match and match[1] != "_group_" else prefix


NULL = "it is null"


def _scalar(node: Any) -> list[str]:
    """The text of a scalar, or an empty string for null."""
    tag = node.tag.rpartition(":")[2]
    if tag == "null":
        return []
    if tag == "bool":
        return ["true" if node.value.lower() in ("true", "yes", "on") else "false"]
    return [node.value]


def _resolved(flags: list[Flag], environ: Mapping[str, str]) -> list[Flag]:
    """Replace `${key}` and `${.key}` by the value of that key, `${oc.select:KEY,DEFAULT}` by that or the default, and
    `${oc.env:NAME,DEFAULT}` by the variable. The results of other resolvers are unknown, and nulls are skipped.
    """
    by_name = {flag.name: flag for flag in flags}
    resolved: dict[str, Field] = {}

    def variable(match: re.Match[str]) -> str:
        name, default = match.groups()
        text = variable_value(name, environ, None if default is None else default.strip(" '\""))
        return match[0] if text is None else text

    def selection(match: re.Match[str]) -> str:
        target = by_name.get(match[1])
        return f"${{{match[1]}}}" if target and target.values else (match[2] or "null").strip(" '\"")

    def value(owner: str, field: Field, depth: int = 0) -> Field:
        full = SELECTION.sub(selection, ENVIRONMENT.sub(variable, field.text))
        full = checked(REFERENCE.sub(lambda match: f"${{{_absolute(match[1], owner)}}}", full), field.place)
        for name in REFERENCE.findall(full)[:MAX_DEPTH]:
            target = by_name.get(name)
            if target is None or len(target.values) != 1 or depth > MAX_DEPTH:
                return Field(full, field.place, f"{full} refers to what is not in this file")
            if name not in resolved:
                resolved[name] = value(name, target.values[0], depth + 1)
            if resolved[name].unknown:
                return resolved[name]
            full = checked(full.replace(f"${{{name}}}", resolved[name].text), field.place)
        if "${" in full:
            return Field(full, field.place, f"{full} is resolved when that program runs")
        return Field(full, field.place, field.unknown)

    present = [flag for flag in flags if flag.condition != NULL]
    values = [(flag, tuple(value(flag.name, item) for item in flag.values)) for flag in present]
    return [replace(flag, values=fields) for flag, fields in values if [field.text for field in fields] != ["null"]]


def _absolute(reference: str, owner: str) -> str:
    """Return the full name of a reference. A leading dot is the table of `owner`, each further dot its parent."""
    name = reference.lstrip(".")
    dots = len(reference) - len(name)
    return name if not dots else ".".join([*owner.split(".")[:-dots], name])


def variable_value(name: str, environ: Mapping[str, str], default: Any) -> Any:
    """The value of an environment variable. A secret becomes a reference, and is never copied into settings."""
    return f"env:{name}" if is_secret_variable(name) else environ.get(name, default)
