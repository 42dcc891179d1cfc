"""Flags of a training command: options (`--lr 1e-6`) and assignments of Hydra (`trainer.nnodes=1`)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slimectl.migrate.launch_scripts.shell_values import Field
from slimectl.migrate.launch_scripts.shell_words import Place

OPTION = re.compile(r"--?([A-Za-z][\w.-]*)(?:=(.*))?\Z", re.DOTALL)
TYPOGRAPHIC = ("\u201c", "\u201d", "\u2018", "\u2019")
ASSIGNMENT = re.compile(r"(\+\+|\+)?([A-Za-z_][\w./@-]*)=(.*)\Z", re.DOTALL)
DELETION = re.compile(r"~([A-Za-z_][\w./@-]*)(?:=.*)?\Z", re.DOTALL)
"""A key that Hydra removes from the configuration: `~trainer.logger`."""


@dataclass(frozen=True)
class Flag:
    """One flag with its values, as it was written, and its line."""

    name: str
    spelling: str
    values: tuple[Field, ...]
    place: Place
    condition: str = ""
    """Why it is unknown whether the flag is given."""

    @property
    def problem(self) -> str:
        """Why the flag cannot be used, or an empty string if it can."""
        return self.condition or next((value.problem for value in self.values if value.problem), "")

    @property
    def texts(self) -> list[str]:
        return [value.text for value in self.values]

    @property
    def text(self) -> str:
        """The only value. Raises ValueError, with the end of a sentence, unless there is exactly one."""
        if len(self.values) != 1:
            raise ValueError(f"has {len(self.values)} values instead of one")
        return self.values[0].text

    def __str__(self) -> str:
        shown = " ".join([self.spelling, *map(_quoted, self.texts)])
        line = " ".join(shown.split())
        return line if len(line) <= 100 else f"{line[:97]}…"


def _quoted(text: str) -> str:
    """The text in quotes that do not occur in it, if it needs quotes."""
    if re.fullmatch(r"[\w@%+=:,./{}\[\]$-]+", text):
        return text
    quote = next((quote for quote in "'\"" if quote not in text), "")
    return f"{quote}{text}{quote}"


def options(fields: Sequence[Field]) -> tuple[list[Flag], list[Field]]:
    """Split the words after a training script into options with their values, and words before all options."""
    flags: list[Flag] = []
    loose: list[Field] = []
    for field in fields:
        if (match := OPTION.match(field.text)) is not None:
            name, value = match.groups()
            values = () if value is None else (_checked(replace(field, text=value)),)
            condition = "" if "=" in field.text else field.unknown
            flags.append(Flag(name, field.text.partition("=")[0], values, field.place, condition))
        elif flags:
            flags[-1] = replace(flags[-1], values=(*flags[-1].values, _checked(field)))
        else:
            loose.append(field)
    return flags, loose


def expanded(flag: Flag) -> list[Flag]:
    """Split an option whose value is a JSON object into an option for each of its keys."""
    table = _table_of(flag.values[0].text.strip(), flag.values[0]) if len(flag.values) == 1 else None
    if table is None:
        return [flag]
    members = _members(table, flag.name, flag.values[0])
    return [Flag(name, f"--{name}", fields, flag.place, flag.condition) for name, fields in members]


def _checked(value: Field) -> Field:
    """The value. A value in typographic quotes is unknown, because the shell treats these as part of it."""
    is_quoted = not value.problem and any(quote in value.text for quote in TYPOGRAPHIC)
    return replace(value, unknown="it has typographic quotes, which the shell does not read") if is_quoted else value


def assignments(fields: Sequence[Field]) -> tuple[list[Flag], list[Field]]:
    """Split the words after a Hydra script into assignments and other words. A deleted key is null."""
    flags: list[Flag] = []
    loose: list[Field] = []
    for field in fields:
        if deletion := DELETION.match(field.text):
            name = deletion[1]
            flags = [flag for flag in flags if not is_part_of(flag.name, name)]
            flags.append(Flag(name, f"~{name}", (replace(field, text="null"),), field.place))
            continue
        match = ASSIGNMENT.match(field.text)
        if match is None:
            loose.append(field)
            continue
        _, name, text = match.groups()
        table = _table_of(text, field)
        members = {name: hydra_values(text, field)} if table is None else dict(_members(table, name, field))
        flags += [Flag(key, f"{key} =", values, field.place) for key, values in members.items()]
    return flags, loose


def is_part_of(name: str, table: str) -> bool:
    """Whether a dotted name is the name of a table or of a key below it."""
    return name == table or name.startswith(f"{table}.")


def _table_of(text: str, field: Field) -> dict[Any, Any] | None:
    """The table in an assignment, as in `optim={lr: 1e-6}`, or None for other values."""
    if field.problem or "${" in text or not text.startswith("{"):
        return None
    import yaml

    try:
        table = yaml.load(text, Loader=yaml.BaseLoader)  # every scalar stays a string
    except (yaml.YAMLError, ValueError, RecursionError):
        return None
    return table if isinstance(table, dict) and table else None


def _members(table: dict[Any, Any], name: str, field: Field) -> Iterator[tuple[str, tuple[Field, ...]]]:
    """The values of a table by dotted name."""
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from _members(value, f"{name}.{key}", field)
        else:
            yield f"{name}.{key}", tuple(Field(text, field.place) for text in texts_of(value))


def hydra_values(text: str, field: Field) -> tuple[Field, ...]:
    """The values of an assignment: one per element of a list, none for null."""
    import yaml

    if field.problem or "${" in text:
        reason = field.unknown or ("" if field.unset else f"{text} is resolved by Hydra when it runs")
        return (Field(text, field.place, reason, field.unset),)
    try:
        value = yaml.safe_load(text.replace("\t", " ")) if text[:1] in "[{'\"" else text
    except (yaml.YAMLError, ValueError, RecursionError):
        value = text
    return tuple(Field(item, field.place) for item in texts_of(value))


def texts_of(value: Any) -> Iterator[str]:
    """The texts of a YAML value, as a flag would have them."""
    if isinstance(value, list):
        for member in value:
            yield from texts_of(member)
    elif isinstance(value, bool):
        yield "true" if value else "false"
    elif value is not None:
        yield str(value)
