"""Verifiers by the name that `rm_type` gives them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any, Protocol, get_type_hints

from slimectl.errors import SettingsError
from slimectl.rewards.contains import Contains
from slimectl.rewards.exact import Exact
from slimectl.rewards.extraction import SOURCES, Source, last_boxed
from slimectl.rewards.math import Math
from slimectl.rewards.numeric import Numeric
from slimectl.rewards.random import Random
from slimectl.rewards.reasoning_gym import ReasoningGym
from slimectl.rewards.regex import Regex
from slimectl.types import Sample

BOXED = "boxed_"


class Verifier(Protocol):
    """Grades a sample; a picklable value. Raises on a bad label or metadata, never on what a model wrote."""

    def __call__(self, sample: Sample) -> float | dict[str, Any]: ...

    def extract(self, sample: Sample) -> str | None:
        """What of the response is graded, for explanations; None where nothing was found."""
        ...


@dataclass(frozen=True)
class Boxed:
    r"""Grades only what the last \boxed{} holds; 0.0 if there is none."""

    inner: Verifier

    def __call__(self, sample: Sample) -> float | dict[str, Any]:
        boxed = last_boxed(sample.response)
        return 0.0 if boxed is None else self.inner(replace(sample, response=boxed))

    def extract(self, sample: Sample) -> str | None:
        boxed = last_boxed(sample.response)
        return None if boxed is None else self.inner.extract(replace(sample, response=boxed))


_TYPES: dict[str, type[Any]] = {
    "contains": Contains,
    "exact": Exact,
    "math": Math,
    "numeric": Numeric,
    "random": Random,
    "reasoning_gym": ReasoningGym,
    "regex": Regex,
}


def known_types() -> list[str]:
    """Every `rm_type`, sorted; each also works with the prefix `boxed_`."""
    return sorted(_TYPES)


def verifier(rm_type: str, **options: Any) -> Verifier:
    """The verifier of that type.

    >>> verifier("boxed_exact", ignore_case=True)(Sample(response=r"It is \\boxed{Paris}.", label="paris"))
    1.0

    `boxed_math` is `math`, which reads nothing but the box anyhow. Raises SettingsError for an unknown type or option.
    """
    name = rm_type.removeprefix(BOXED)
    if name not in _TYPES:
        hint = _hint(name, known_types())
        known = ", ".join(known_types())
        raise SettingsError(f"score.rm_type: no verifier {rm_type!r}{hint} (known: {known}; each also with {BOXED})")
    made: Verifier = _TYPES[name](**_checked(name, options))
    return Boxed(made) if rm_type.startswith(BOXED) and name != "math" else made


def _checked(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options, when the verifier has them and their values are of the kind it takes."""
    kinds = {field.name: get_type_hints(_TYPES[name])[field.name] for field in fields(_TYPES[name])}
    for option, value in options.items():
        where = f"score.rm_options.{option}"
        if option not in kinds:
            known = ", ".join(kinds) or "none"
            raise SettingsError(f"{where}: no option of {name}{_hint(option, list(kinds))} (it has: {known})")
        if kinds[option] == Source:
            if value not in SOURCES:
                raise SettingsError(f"{where}: {value!r} is no source{_hint(str(value), list(SOURCES))} ({SOURCES})")
        elif not isinstance(value, kinds[option] if kinds[option] is not float else float | int):
            raise SettingsError(f"{where}: {value!r} is of the wrong kind ({kinds[option]} expected)")
    return options


def _hint(given: str, known: list[str]) -> str:
    near = get_close_matches(given, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""
