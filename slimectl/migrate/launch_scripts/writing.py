"""Writes converted settings as a settings file. Each line has its flag, and all other flags are comments."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slimectl.migrate.launch_scripts.conversion import Conversion, Dialect, Omission
from slimectl.migrate.launch_scripts.shell_variables import Note
from slimectl.settings.keys import keys_of
from slimectl.settings.root import Settings
from slimectl.system.redaction import redact_text

BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def settings_file(conversion: Conversion, source: Path, notes: list[Note]) -> str:
    """The text of the settings file."""
    lines = [f"# From {source.name} ({conversion.dialect.title}), by `slimectl settings from`.", ""]
    for section in Settings.model_fields:
        lines += _section(conversion, section)
    by_hand = [omission for omission in conversion.omissions if omission.by_hand]
    remaining = [omission for omission in conversion.omissions if not omission.by_hand]
    lines += _comments(
        "To be set by hand: values that the file does not tell, and changes of the training that have no setting",
        map(_omission, by_hand),
    )
    lines += _comments("To be settled: settings that contradict each other", conversion.problems)
    lines += _comments("Not followed", (f"{note.text} ({note.place})" for note in notes))
    lines += _comments("Without a counterpart, or without effect here", map(_omission, remaining))
    lines += _comments("The same as the defaults here", conversion.defaults)
    folder = f"{source.parent}/" if str(source.parent) != "." else ""
    text = "\n".join(lines).rstrip("\n") + "\n"
    return redact_text(re.sub(rf"(?<![\w/]){re.escape(folder)}(?=[\w./-]+:\d)", "", text) if folder else text)


def _section(conversion: Conversion, section: str) -> Iterator[str]:
    """The lines of a section: its keys, then its tables."""
    values = conversion.settings.model_dump(by_alias=True)[section]
    names = [key for key in conversion.values if key.partition(".")[0] == section]
    if not names:
        return
    order = keys_of(section, conversion.settings.algorithm.name)
    if section == "algorithm":
        order.sort(key=lambda key: key != "name")
    if section == "custom":
        order = [name.partition(".")[2] for name in names]
    plain = [key for key in order if f"{section}.{key}" in names]
    if plain:
        yield f"[{section}]"
        for key in plain:
            name = f"{section}.{key}"
            is_secret = hasattr(values[key], "get_secret_value")  # written as its reference
            yield _line(key, conversion.values[name] if is_secret else values[key], conversion, name)
        yield ""
    for key in order:
        entries = [name for name in names if name.startswith(f"{section}.{key}.")]
        if entries:
            yield from _table(conversion, f"{section}.{key}", values[key], entries)


def _table(conversion: Conversion, name: str, values: Any, entries: list[str]) -> Iterator[str]:
    """The lines of a table in a section, such as [sglang.args]. Deeper tables are written inline."""
    yield f"[{name}]"
    for key in dict.fromkeys(entry.removeprefix(f"{name}.").partition(".")[0] for entry in entries):
        first = next(entry for entry in entries if entry.removeprefix(f"{name}.").partition(".")[0] == key)
        yield _line(key, values[key], conversion, first)
    yield ""


def _line(key: str, value: Any, conversion: Conversion, name: str) -> str:
    return (
        f"{key if BARE_KEY.fullmatch(key) else json.dumps(key)} = {inline(value)}  # {_one(conversion.sources[name])}"
    )


def inline(value: Any) -> str:
    """A value of TOML in one line.

    >>> inline({"a b": [1, "x"], "c": None})
    '{"a b" = [1, "x"], c = "none"}'
    """
    import tomli_w

    if isinstance(value, dict):
        keys = (key if BARE_KEY.fullmatch(key) else json.dumps(key) for key in map(str, value))
        return "{" + ", ".join(f"{key} = {inline(item)}" for key, item in zip(keys, value.values(), strict=True)) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(inline, value)) + "]"
    return tomli_w.dumps({"v": "none" if value is None else value}).removeprefix("v = ").strip()


def _omission(omission: Omission) -> str:
    place = f" ({omission.place})" if omission.place else ""
    return f"{omission.flag}{place}: {omission.reason}"


def _comments(title: str, entries: Any) -> list[str]:
    lines = [f"#   {_one(entry)}" for entry in entries]
    return [f"# {title}:", *lines, ""] if lines else []


def _one(text: str) -> str:
    """The text on one line, without characters that TOML does not allow in a comment."""
    return "".join(character if character.isprintable() else " " for character in " ".join(text.split()))


def flag_name(dialect: Dialect, name: str) -> str:
    """Return a name as the stack writes it: slime's flags and OpenRLHF's have dashes before them."""
    dashes = "--" if dialect.form == "options" and dialect.name in ("slime", "openrlhf") else ""
    return dashes + (name.replace("_", "-") if dialect.name == "slime" else name)
