"""Values of shell variables, known or not, and the operators of `${NAME…}` on their text."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeAlias

from slimectl.errors import SettingsError
from slimectl.settings.launch_scripts.shell_words import Place

MAX_TEXT = 1 << 20
"""Characters of one value; more is an attack, not a launch script."""


@dataclass(frozen=True)
class Field:
    """One word after expansion, with the line that it was written in.

    Where `unknown` says why, the text is not what the shell would have there, but the source of it. `unset` names
    variables of the word that nothing sets, which the shell replaces by nothing.
    """

    text: str
    place: Place
    unknown: str = ""
    unset: str = ""

    @property
    def problem(self) -> str:
        """Why the value cannot be taken as it stands; empty if it can."""
        return self.unknown or (f"{self.unset} is not set in the script or in the environment" if self.unset else "")

    def with_text(self, text: str) -> Field:
        return self if self.unknown else replace(self, text=checked(text, self.place))


Array: TypeAlias = dict[str, Field]
"""The elements of an array by index, in order."""
Value: TypeAlias = Field | Array


def checked(text: str, place: Place) -> str:
    """The text. Raises SettingsError if it is so long that no launch script means it."""
    if len(text) > MAX_TEXT:
        raise SettingsError(f"{place}: a value of more than {MAX_TEXT} characters; shorten it")
    return text


def joined(fields: Iterable[Field], place: Place, separator: str = "") -> Field:
    """One field of the texts of several; unknown if one is."""
    members = list(fields)
    return Field(
        checked(separator.join(field.text for field in members), place),
        place,
        next((field.unknown for field in members if field.unknown), ""),
        next((field.unset for field in members if field.unset), ""),
    )


def elements(value: Value | None) -> list[Field]:
    """The fields of a scalar or an array."""
    if value is None:
        return []
    return [value] if isinstance(value, Field) else list(value.values())


def merged(values: list[Value | None], reason: str, place: Place) -> Value | None:
    """A variable after branches of which the taken one is unknown: the values that agree, the others as unknown."""
    first = values[0]
    if all(_texts(value) == _texts(first) for value in values):
        return first
    if not any(isinstance(value, dict) for value in values):
        texts = [value.text for value in values if isinstance(value, Field)]
        return Field(" or ".join(dict.fromkeys(texts)), place, reason)
    arrays = sorted((elements(value) for value in values), key=len)
    longest, agreeing = arrays[-1], 0
    while agreeing < len(arrays[0]) and len({array[agreeing].text for array in arrays}) == 1:
        agreeing += 1
    fields = [*longest[:agreeing], *(replace(field, unknown=field.unknown or reason) for field in longest[agreeing:])]
    return {str(number): field for number, field in enumerate(fields)}


def _texts(value: Value | None) -> object:
    if isinstance(value, dict):
        return [(key, field.text, field.unknown) for key, field in value.items()]
    return value and (value.text, value.unknown)


MAX_COST = 50_000_000


def is_costly(text: str, glob: str) -> bool:
    """Whether trying a pattern may take longer than a launch script deserves: every `*` multiplies the work."""
    return bool((len(text) + 1) ** (glob.count("*") + 1) > MAX_COST)


@lru_cache(maxsize=1024)
def pattern(text: str) -> re.Pattern[str]:
    """A glob pattern of the shell as a regular expression."""
    parts: list[str] = []
    position = 0
    while position < len(text):
        character = text[position]
        bracket = re.compile(r"\[[!^]?\]?[^\]]*\]").match(text, position)
        if character == "*":
            if parts[-1:] != [".*"]:  # `**` is `*`, and several would be slow to try
                parts.append(".*")
        elif character == "?":
            parts.append(".")
        elif character == "[" and bracket:
            inside = bracket[0][1:-1].replace("\\", r"\\")
            parts.append(f"[{'^' + inside[1:] if inside[0] in '!^' else inside}]")
            position = bracket.end() - 1
        elif character == "\\" and position + 1 < len(text):
            position += 1
            parts.append(re.escape(text[position]))
        else:
            parts.append(re.escape(character))
        position += 1
    try:
        return re.compile("".join(parts), re.DOTALL)
    except re.error:
        return re.compile(re.escape(text))


def trimmed(text: str, operator: str, glob: str) -> str:
    """`${NAME#GLOB}` and its relatives: the text without a beginning or an end that matches.

    >>> trimmed("models/qwen3.sh", "##", "*/"), trimmed("qwen3.tar.gz", "%", ".*"), trimmed("qwen3.tar.gz", "%%", ".*")
    ('qwen3.sh', 'qwen3.tar', 'qwen3')
    """
    expression = pattern(glob)
    lengths = range(len(text) + 1) if len(operator) == 1 else range(len(text), -1, -1)
    for length in lengths:
        part = text[:length] if operator[0] == "#" else text[len(text) - length :]
        if expression.fullmatch(part):
            return text[length:] if operator[0] == "#" else text[: len(text) - length]
    return text


def replaced(text: str, operator: str, glob: str, new: str) -> str:
    """`${NAME/GLOB/NEW}` for the first match, `//` for all, `/#` and `/%` for one at the beginning or the end."""
    if not glob:
        return text
    expression = pattern(glob)
    if operator in ("/#", "/%"):
        anchored = re.compile(f"\\A(?:{expression.pattern})" if operator == "/#" else f"(?:{expression.pattern})\\Z")
        return anchored.sub(lambda _: new, text, count=1)
    return expression.sub(lambda _: new, text, count=0 if operator == "//" else 1)
