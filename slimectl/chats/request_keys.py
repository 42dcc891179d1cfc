"""Checks the keys of request bodies: which ones an endpoint supports, and which values of others have no effect.

A key that an endpoint does not support is an error, unless its value asks for what the server does anyway. Null is
accepted for every key.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slimectl.chats.messages import MessageError

FEW = 8
"""Maximum number of keys that a message lists."""


@dataclass(frozen=True)
class ObjectKeys:
    """Keys of a JSON object.

    `acts` are implemented. `labels` are accepted with any value, because they only identify users and requests or have
    no effect on responses. `neutral` lists the values of other keys that have no effect. Empty values and false are
    accepted too, but not false if true is listed. `remedies` say what to do instead of sending a key. `server` and
    `docs` are how messages refer to the server and its documentation.
    """

    acts: frozenset[str]
    labels: frozenset[str] = frozenset()
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    remedies: Mapping[str, str] = field(default_factory=dict)
    server: str = "by `slimectl serve`"
    docs: str = "docs/reference/http-api.md"

    def check(self, values: Mapping[str, Any], at: str = "") -> None:
        """Raise MessageError for the first key that would be ignored, with the path `at` of the object."""
        for name, value in values.items():
            if value is None or name in self.acts or name in self.labels:
                continue
            if name not in self.neutral or not is_neutral(value, self.neutral[name]):
                shown = name[:60] if name.isidentifier() and name.isascii() else ascii(name[:60])
                raise MessageError(f"{at}{shown}", self._remedy(name))

    def _remedy(self, name: str) -> str:
        if name in self.remedies:
            return self.remedies[name]
        if name in self.neutral:
            values = ", ".join(map(json.dumps, self.neutral[name]))
            allowed = f" except as {values}" if values else ""
            return f"is not supported {self.server}{allowed}. Leave it out."
        near = difflib.get_close_matches(name[:100], self.acts, n=1)
        if near:
            return f"unknown key. Did you mean {near[0]}?"
        if 0 < len(self.acts) <= FEW:
            return f"unknown key. Known are {', '.join(sorted(self.acts))}."
        return f"unknown key. {self.docs} lists the keys of each endpoint."


def is_neutral(value: Any, values: tuple[Any, ...]) -> bool:
    """Return whether a value has no effect: one of `values`, an empty one, or false unless true is in `values`."""
    if value is False or (isinstance(value, str | list | dict) and not value):
        return not (value is False and any(neutral is True for neutral in values))
    return any(value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in values)


def names(text: str) -> frozenset[str]:
    """Return the whitespace-separated names in a text."""
    return frozenset(text.split())


def unset(text: str) -> dict[str, tuple[Any, ...]]:
    """Return keys that are accepted only with null, false or an empty value."""
    return dict.fromkeys(text.split(), ())


LABELS = names(
    "model user metadata service_tier safety_identifier prompt_cache_key prompt_cache_retention session_id "
    "custom_labels log_metrics no_logs received_time external_trace_header"
)
