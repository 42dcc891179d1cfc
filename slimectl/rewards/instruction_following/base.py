"""Base of the instruction-following verifiers, which check a list of instructions by program."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from slimectl.errors import RecordError
from slimectl.rewards.base import Grade, Verifier, no_answer
from slimectl.rewards.extraction import SOURCE_NAMES, UNCLOSED, composed, find, text_of
from slimectl.types import Sample

Check = Callable[..., bool]
"""(text, **arguments of the instruction) -> whether the text follows it."""

Checks = Mapping[str, Check]


@dataclass(frozen=True)
class Instructions(Verifier):
    """The share of followed instructions in metadata.instruction_id_list, each with its entry in metadata.kwargs.

    With `count` "prompt" the score is all or nothing. `mode` "loose" tolerates greetings and emphasis, as published. It
    also tries the response without its first line, its last line, both, and without asterisks. Only the text after the
    last closed thought is checked. Raises RecordError for an unknown instruction or a missing argument.
    """

    mode: Literal["strict", "loose"] = "strict"
    count: Literal["instructions", "prompt"] = "instructions"

    @property
    @abstractmethod
    def checks(self) -> Checks:
        """Every instruction by its id."""

    def explain(self, sample: Sample) -> Grade:
        checked = _read_instructions(sample, self.checks)
        answer = find(sample, "response")
        if answer is None:
            return no_answer(SOURCE_NAMES["response"], UNCLOSED)
        text = composed(answer.text)
        variants = _loose_variants(text) if self.mode == "loose" else [text]
        texts = [text for text in variants if text.strip()]
        missed = [name for name, check, arguments in checked if not any(check(text, **arguments) for text in texts)]
        share = 1 - len(missed) / len(checked)
        not_followed = f", not {', '.join(missed)}" if missed else ""
        reason = f"follows {len(checked) - len(missed)} of {len(checked)}{not_followed}"
        reward = float(not missed) if self.count == "prompt" else share
        return Grade(reward, SOURCE_NAMES["response"], reason, answer.text, answer.span)

    def extract(self, sample: Sample) -> str | None:
        return text_of(find(sample, "response"))


def _loose_variants(text: str) -> list[str]:
    rows = text.split("\n")
    variants = [text, "\n".join(rows[1:]).strip(), "\n".join(rows[:-1]).strip(), "\n".join(rows[1:-1]).strip()]
    return [*variants, *(variant.replace("*", "") for variant in variants)]


def _read_instructions(sample: Sample, checks: Checks) -> list[tuple[str, Check, dict[str, Any]]]:
    """(id, check, arguments) of each instruction. Raises RecordError."""
    location = f"sample {sample.index}: metadata"
    names, kwargs = sample.metadata.get("instruction_id_list"), sample.metadata.get("kwargs")
    if not isinstance(names, list) or not names:
        raise RecordError(f"{location}.instruction_id_list: missing or empty. List the instructions to check.")
    entries = [{} for _ in names] if kwargs is None else kwargs
    if not isinstance(entries, list) or len(entries) != len(names):
        raise RecordError(f"{location}.kwargs: not a list of {len(names)} objects, one for each instruction")
    instructions = []
    for name, entry in zip(names, entries, strict=True):
        if name not in checks:
            raise RecordError(
                f"{location}.instruction_id_list: {name!r} is unknown. Known: {', '.join(sorted(checks))}"
            )
        accepted, required = _parameters(checks[name])
        pairs = (entry or {}).items()
        arguments = {key: _composed_argument(value) for key, value in pairs if key in accepted and value is not None}
        if missing := [key for key in required if key not in arguments]:
            raise RecordError(f"{location}.kwargs: {name} needs {', '.join(missing)}")
        instructions.append((name, checks[name], arguments))
    return instructions


def _composed_argument(value: Any) -> Any:
    if isinstance(value, list):
        return [_composed_argument(item) for item in value]
    return composed(value) if isinstance(value, str) else value


@cache
def _parameters(check: Check) -> tuple[frozenset[str], tuple[str, ...]]:
    """Return the parameter names of a check except the text, and the ones without a default."""
    parameters = list(inspect.signature(check).parameters.values())[1:]
    return frozenset(p.name for p in parameters), tuple(p.name for p in parameters if p.default is p.empty)


def compared(number: int, relation: str, bound: float) -> bool:
    """Whether `number` is "at least", or else "less than", `bound`."""
    return number < bound if relation == "less than" else number >= bound
