"""Parsing of request bodies: a field of the wrong type or size is refused by name."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Collection
from functools import partial
from typing import Any

from aiohttp import web

from slimectl.engines.serve.bodies import BODIES
from slimectl.engines.serve.refusals import Refused
from slimectl.engines.serve.thread import apart

NUMBERS = 2**31
"""Upper bound of counts."""
LARGE = 1 << 20
"""Bytes from which a body is parsed in a separate thread."""


async def read(request: web.Request) -> Fields:
    """Parse the JSON object in a request's body; an empty body is an empty object."""
    if request.body_exists and request.content_type not in ("application/json", "application/octet-stream"):
        raise Refused(f"content type {request.content_type!r} is not application/json", status=415)
    async with request.app[BODIES].body(request) as raw:
        parse = partial(json.loads, raw, parse_constant=_reject_constant)
        try:
            # A large one would block all other requests.
            value = (await apart(parse) if len(raw) > LARGE else parse()) if raw.strip() else {}
        except RecursionError:
            raise Refused("the body is nested too deeply") from None
        except ValueError as error:  # JSON and UTF-8 alike
            raise Refused(f"the body is not JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise Refused("the body is not a JSON object")
    return Fields(value)


def _reject_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


class Fields:
    """JSON object with typed access to its fields; absent and null mean the default."""

    def __init__(self, values: dict[str, Any], *, at: str = "") -> None:
        self._values = values
        self._at = at

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def raw(self, name: str) -> Any:
        return self._values.get(name)

    def refuse(self, name: str, reason: str) -> Refused:
        """Return the error to raise for a field."""
        return Refused(f"{self._at}{name}: {reason}", field=self._at + name)

    def check_names(self, allowed: Collection[str]) -> None:
        for name in self._values:
            if name not in allowed:
                near = difflib.get_close_matches(name[:100], allowed, n=1)
                hint = f"; did you mean {near[0]}?" if near else f"; known are {', '.join(sorted(allowed))}"
                raise self.refuse(_short(name), f"unknown{hint}")

    def refuse_beyond(self, neutral: dict[str, tuple[Any, ...]]) -> None:
        """Refuse unsupported fields, unless they have no effect: null, empty, or a neutral value."""
        for name, values in neutral.items():
            value = self._values.get(name)
            asks_nothing = value is None or value is False or (isinstance(value, str | list | dict) and not value)
            if not asks_nothing and not (isinstance(value, int | float | str) and value in values):
                raise self.refuse(name, "is not supported by `slimectl serve`; leave it out")

    def number(self, name: str, default: float, *, low: float, high: float) -> float:
        value = self._values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refuse(name, f"{_short(value)} is not a number")
        if not low <= value <= high or (isinstance(value, float) and not math.isfinite(value)):
            raise self.refuse(name, f"{_short(value)} is not between {low:g} and {high:g}")
        return float(value)

    def whole(self, name: str, default: int, *, low: int = 0, high: int = NUMBERS) -> int:
        value = self._values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.refuse(name, f"{_short(value)} is not a whole number")
        if not low <= value <= high:
            raise self.refuse(name, f"{_short(value)} is not between {low} and {high}")
        return value

    def seed(self, name: str) -> int | None:
        return self.whole(name, 0, low=-(2**63), high=2**64) if name in self else None

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(name, f"{_short(value)} is not true or false")
        return value

    def text(self, name: str, default: str | None = None, *, longest: int | None = None) -> str | None:
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.refuse(name, f"{_short(value)} is not a string")
        return self.checked(name, value, longest=longest)

    def needed(self, name: str) -> str:
        value = self.text(name, longest=4096)
        if not value:
            raise self.refuse(name, "is missing")
        return value

    def checked(self, name: str, value: str, *, longest: int | None = None) -> str:
        """Return the string, if it can be encoded as UTF-8."""
        if longest is not None and len(value) > longest:
            raise self.refuse(name, f"is longer than {longest} characters")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise self.refuse(name, "holds half of a surrogate pair, which is no text") from None
        return value

    def texts(self, name: str, *, max_count: int) -> list[str]:
        """Return one string or a list of them as a list."""
        value = self._values.get(name)
        values = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(values, list) or not all(isinstance(text, str) for text in values):
            raise self.refuse(name, "is neither a string nor a list of strings")
        if len(values) > max_count:
            raise self.refuse(name, f"are {len(values)} strings, and {max_count} are the most")
        return [self.checked(name, text) for text in values]

    def tokens(self, name: str, value: Any) -> list[int]:
        if not isinstance(value, list) or not all(type(token) is int for token in value):
            raise self.refuse(name, "is not a list of token ids")
        return value

    def objects(self, name: str) -> list[dict[str, Any]] | None:
        value = self._values.get(name)
        if value is not None and (not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value)):
            raise self.refuse(name, "is not a list of objects")
        return value

    def object(self, name: str) -> dict[str, Any]:
        value = self._values.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.refuse(name, "is not an object")
        return value or {}

    def choice(self, name: str, default: str, choices: tuple[str, ...]) -> str:
        value = self._values.get(name)
        if value is None:
            return default
        if value not in choices:
            raise self.refuse(name, f"{_short(value)} is not one of {', '.join(choices)}")
        return str(value)


def _short(value: Any) -> str:
    """Shorten a value for a message; a list or a number of a thousand digits is not printed whole."""
    if isinstance(value, str):
        return ascii(value[:60])
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**18:
        return "the number"
    return str(value)[:60] if isinstance(value, int | float) else f"the {type(value).__name__}"
