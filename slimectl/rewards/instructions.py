"""Instructions that a program can check: of the prompt's list, how many does the response follow?"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from slimectl.errors import RecordError
from slimectl.rewards.extraction import trimmed
from slimectl.rewards.verdict import Found, Verdict, Verifier
from slimectl.types import Sample

Check = Callable[..., bool]
"""(text, **what the instruction says) -> whether the text follows it."""

Checks = Mapping[str, Check]


@dataclass(frozen=True)
class Instructions(Verifier):
    """The share of metadata.instruction_id_list that is followed, each with its entry of metadata.kwargs.

    With `count` "prompt" it is all or nothing. `mode` "loose" also tries the response without its first line, its last
    line, both, and without asterisks, as the published rules have it: greetings and emphasis are forgiven. What stands
    before the last </think> is left out. Raises RecordError for an instruction that is not known or lacks an argument.
    """

    mode: Literal["strict", "loose"] = "strict"
    count: Literal["instructions", "prompt"] = "instructions"

    @property
    @abstractmethod
    def checks(self) -> Checks:
        """Every instruction by its id."""

    def explain(self, sample: Sample) -> Verdict:
        given = _given(sample, self.checks)
        found = _answer(sample.response)
        source = "whole response" if found.start == 0 else "response after </think>"
        variants = _loosened(found.text) if self.mode == "loose" else [found.text]
        texts = [text for text in variants if text.strip()]
        missed = [name for name, check, arguments in given if not any(check(text, **arguments) for text in texts)]
        share = 1 - len(missed) / len(given)
        why = f"follows {len(given) - len(missed)} of {len(given)}" + (f", not {', '.join(missed)}" if missed else "")
        return Verdict(float(not missed) if self.count == "prompt" else share, source, why, found.text, found.span)

    def extract(self, sample: Sample) -> str | None:
        return _answer(sample.response).text


def _answer(response: str) -> Found:
    """What is not thought: nothing, where thinking has not ended."""
    thought = response.rfind("</think>")
    if thought >= 0:
        return trimmed(response, thought + len("</think>"))
    return trimmed(response, len(response)) if response.lstrip().startswith("<think>") else trimmed(response)


def _loosened(text: str) -> list[str]:
    rows = text.split("\n")
    kept = [text, "\n".join(rows[1:]).strip(), "\n".join(rows[:-1]).strip(), "\n".join(rows[1:-1]).strip()]
    return [*kept, *(each.replace("*", "") for each in kept)]


def _given(sample: Sample, checks: Checks) -> list[tuple[str, Check, dict[str, Any]]]:
    """(id, check, arguments) of each instruction. Raises RecordError."""
    where = f"sample {sample.index}: metadata"
    names, given = sample.metadata.get("instruction_id_list"), sample.metadata.get("kwargs")
    if not isinstance(names, list) or not names:
        raise RecordError(f"{where}.instruction_id_list: missing or empty; it names the instructions to check")
    entries = [{} for _ in names] if given is None else given
    if not isinstance(entries, list) or len(entries) != len(names):
        raise RecordError(f"{where}.kwargs: not a list of {len(names)} objects, one for each instruction")
    made = []
    for name, entry in zip(names, entries, strict=True):
        if name not in checks:
            raise RecordError(
                f"{where}.instruction_id_list: {name!r} is unknown; known are {', '.join(sorted(checks))}"
            )
        wanted, needed = _parameters(checks[name])
        arguments = {key: value for key, value in (entry or {}).items() if key in wanted and value is not None}
        if missing := [key for key in needed if key not in arguments]:
            raise RecordError(f"{where}.kwargs: {name} needs {', '.join(missing)}")
        made.append((name, checks[name], arguments))
    return made


@cache
def _parameters(check: Check) -> tuple[frozenset[str], tuple[str, ...]]:
    """Names that it takes beside the text, and those without a default."""
    parameters = list(inspect.signature(check).parameters.values())[1:]
    return frozenset(p.name for p in parameters), tuple(p.name for p in parameters if p.default is p.empty)


def compared(number: int, relation: str, bound: float) -> bool:
    """Whether `number` is "at least", or else "less than", `bound`."""
    return number < bound if relation == "less than" else number >= bound
