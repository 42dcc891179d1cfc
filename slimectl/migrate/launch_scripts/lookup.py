"""Finds the setting for a flag or key of another stack, in the tables for launch scripts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches

from slimectl.migrate.launch_scripts.conversion import Conversion, Dialect, Row, canonical
from slimectl.migrate.launch_scripts.flags import Flag
from slimectl.migrate.launch_scripts.reading import DIALECTS
from slimectl.migrate.launch_scripts.shell_values import Field
from slimectl.migrate.launch_scripts.shell_words import Place
from slimectl.migrate.launch_scripts.writing import flag_name, inline


@dataclass(frozen=True)
class Counterpart:
    """A flag of another stack, its setting here (or ""), and a line that explains how its value changes."""

    name: str
    key: str
    line: str


def counterparts(name: str) -> list[Counterpart]:
    """Return the meaning of a name in each stack that has it. The last part of a dotted name is enough if it is unique.

    >>> [(flag.name, flag.key) for flag in counterparts("--use-rollout-routing-replay")]
    [('use_rollout_routing_replay', 'train.use_rollout_routing_replay')]
    """
    name = canonical(name.lstrip("-"))
    return [flag for dialect in DIALECTS.values() for flag in _counterparts(dialect, name)]


def near_names(name: str) -> list[str]:
    """Return similar names of other stacks, for a name that none of them has."""
    names = {flag for dialect in DIALECTS.values() for flag in dialect.rows if not flag.endswith("NAME")}
    return get_close_matches(canonical(name.lstrip("-")), sorted(names), n=1, cutoff=0.8)


def _counterparts(dialect: Dialect, name: str) -> Iterator[Counterpart]:
    exact = dialect.name_of(name)
    if row := dialect.row(exact):
        yield _described(dialect, name, row)
    elif key := _handed_over(dialect, name):
        yield Counterpart(name, key, f"{dialect.title}: {flag_name(dialect, name)} is {key}, with the same value")
    elif "." not in name:
        ends = [(full, row) for full, row in dialect.rows.items() if full.endswith(f".{name}") and row.key]
        if len({row.key for _, row in ends}) == 1:
            yield _described(dialect, *ends[0])


def _handed_over(dialect: Dialect, name: str) -> str:
    """Return the setting of a flag that is passed to an engine under its own name, such as --sglang-NAME, or ""."""
    place = Place("", 0)
    conversion = Conversion(dialect)
    dialect.unlisted(conversion, Flag(name, name, (Field("1", place),), place))
    return next(iter(conversion.values), "")


def _described(dialect: Dialect, name: str, row: Row) -> Counterpart:
    default = "" if row.default is None else f"{inline(row.default)} there if it is not given"
    details = "; ".join(filter(None, (row.text, default)))
    meaning = f"is {row.key}" if row.key else "has no setting"
    line = f"{dialect.title}: {flag_name(dialect, name)} {meaning}{f': {details}' if details else ''}"
    return Counterpart(name, row.key, line)
