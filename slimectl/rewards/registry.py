"""Creates verifiers by type, with options, for a box, or in a weighted sum with users' functions."""

from __future__ import annotations

import asyncio
import functools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from difflib import get_close_matches
from inspect import isabstract
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from slimectl.errors import BackendError, HookError, SettingsError
from slimectl.plugins.registry import VERIFIERS
from slimectl.rewards.base import Grade, Remote, Verifier, is_number, no_answer
from slimectl.rewards.components import TOTAL
from slimectl.rewards.extraction import SOURCE_NAMES, find, missing, with_response
from slimectl.types import Sample

if TYPE_CHECKING:
    from slimectl.system.client import HttpClient


LoadPart = Callable[[str, str], Verifier]
"""Loads the function at a setting's path. Raises HookError if its signature is wrong."""


@dataclass(frozen=True)
class RewardTerm:
    """One verifier or function of a sum. `key` selects the number in a dict reward."""

    name: str
    weight: float
    verifier: Verifier
    key: str = TOTAL

    def number(self, reward: float | dict[str, Any] | None, *, skip_none: bool = False) -> float | None:
        """The part's reward as a number, or None for None with `skip_none`.

        Raises HookError for a dict without `key`, as a server may send.
        """
        number = reward.get(self.key) if isinstance(reward, dict) and self.key in reward else reward
        if number is None and skip_none:
            return None
        if not is_number(number):
            raise HookError(f"score.rm: {self.name}: no number under {self.key!r} in {str(reward)[:60]}")
        return float(number)


@dataclass(frozen=True)
class WeightedSum(Verifier):
    """{score: sum of weight times part, NAME: each part, unweighted}. Extracts the first verifier's answer.

    With `skip_none` a part whose reward is None has no opinion and adds nothing. If no part has an opinion, the reward
    is None.
    """

    parts: tuple[RewardTerm, ...]
    skip_none: bool = False

    @property
    def bounds(self) -> tuple[float, float]:
        weighing = [part for part in self.parts if part.weight]  # 0 times infinity is NaN
        ends = [sorted(part.weight * end for end in part.verifier.bounds) for part in weighing]
        return sum(low for low, _ in ends), sum(high for _, high in ends)

    @property
    def slow(self) -> bool:
        return any(part.verifier.slow for part in self.parts)

    def prepare(self) -> None:
        for part in self.parts:
            part.verifier.prepare()

    @property
    def is_async(self) -> bool:
        return any(part.verifier.is_async for part in self.parts)

    @property
    def patience_s(self) -> float:
        return sum(part.verifier.patience_s for part in self.parts)

    @property
    def together(self) -> int:
        """The largest number that a part accepts, or 1 with a slow part, which limits the time of each sample."""
        return 1 if self.slow else max(part.verifier.together for part in self.parts)

    @property
    def takes_groups(self) -> bool:
        return any(part.verifier.takes_groups for part in self.parts)

    @property
    def runs_user_code(self) -> bool:
        return any(part.verifier.runs_user_code for part in self.parts)

    def explain(self, sample: Sample) -> Grade:
        return self._combine([part.verifier.explain(sample) for part in self.parts])

    def grade_all(self, samples: Sequence[Sample]) -> list[Grade]:
        if self.is_async:
            return super().grade_all(samples)
        by_part = [
            [grade for batch in _batches(part.verifier, samples) for grade in part.verifier.grade_all(batch)]
            for part in self.parts
        ]
        return [self._combine(verdicts) for verdicts in zip(*by_part, strict=True)]

    async def grade_async(self, samples: Sequence[Sample], http: HttpClient) -> list[Grade]:
        by_part = await asyncio.gather(*(_grade_in_batches(part.verifier, samples, http) for part in self.parts))
        return [self._combine(verdicts) for verdicts in zip(*by_part, strict=True)]

    def _combine(self, verdicts: Sequence[Grade]) -> Grade:
        numbers = [
            part.number(verdict.reward, skip_none=self.skip_none)
            for part, verdict in zip(self.parts, verdicts, strict=True)
        ]
        products = [part.weight * n for part, n in zip(self.parts, numbers, strict=True) if n is not None]
        names = [part.name for part in self.parts]
        reasons = [
            f"{part.weight:g} x {part.name} {'no opinion' if number is None else f'{number:g}'} ({verdict.why})"
            for part, number, verdict in zip(self.parts, numbers, verdicts, strict=True)
        ]
        reward = {TOTAL: sum(products), **dict(zip(names, numbers, strict=True))} if products else None
        shown = verdicts[self._answering]
        return Grade(reward, shown.source, "; ".join(reasons), shown.extracted, shown.span)

    def extract(self, sample: Sample) -> str | None:
        return self.parts[self._answering].verifier.extract(sample)

    def same_answer(self, sample: Sample, first: str, second: str) -> bool:
        return self.parts[self._answering].verifier.same_answer(sample, first, second)

    @property
    def _answering(self) -> int:
        """Index of the first part that can extract an answer. Users' functions cannot."""
        return next((i for i, part in enumerate(self.parts) if not part.verifier.runs_user_code), 0)


async def _grade_in_batches(verifier: Verifier, samples: Sequence[Sample], http: HttpClient) -> list[Grade]:
    """Grade samples in batches of the size that the verifier accepts."""
    return [grade for batch in _batches(verifier, samples) for grade in await verifier.grade_async(batch, http)]


def _batches(verifier: Verifier, samples: Sequence[Sample]) -> list[Sequence[Sample]]:
    size = verifier.together
    return [samples[start : start + size] for start in range(0, len(samples), size)]


BOXED = "boxed_"


@dataclass(frozen=True)
class Boxed(Verifier):
    r"""Grades only the content of the last \boxed{} after the thoughts. 0.0 if there is none."""

    inner: Verifier

    @property
    def bounds(self) -> tuple[float, float]:
        low, high = self.inner.bounds
        return min(0.0, low), max(0.0, high)

    @property
    def slow(self) -> bool:
        return self.inner.slow

    def prepare(self) -> None:
        self.inner.prepare()

    @property
    def is_async(self) -> bool:
        return self.inner.is_async

    @property
    def patience_s(self) -> float:
        return self.inner.patience_s

    def explain(self, sample: Sample) -> Grade:
        boxed = find(sample, "boxed")
        if boxed is None:
            return self._grade_without_box(sample)
        return self.inner.explain(with_response(sample, boxed.text)).moved(boxed.start, SOURCE_NAMES["boxed"])

    async def grade_async(self, samples: Sequence[Sample], http: HttpClient) -> list[Grade]:
        return [await self._grade_sample(sample, http) for sample in samples]

    async def _grade_sample(self, sample: Sample, http: HttpClient) -> Grade:
        boxed = find(sample, "boxed")
        if boxed is None:
            return self._grade_without_box(sample)
        (inner,) = await self.inner.grade_async([with_response(sample, boxed.text)], http)
        return inner.moved(boxed.start, SOURCE_NAMES["boxed"])

    def _grade_without_box(self, sample: Sample) -> Grade:
        """Grade a response without a box with 0.0, or like an empty response if the verifier returns dicts."""
        empty = 0.0 if self.inner.is_async else self.inner.explain(with_response(sample, "")).reward
        return no_answer(SOURCE_NAMES["boxed"], missing(sample, "boxed"), empty if isinstance(empty, dict) else 0.0)

    def extract(self, sample: Sample) -> str | None:
        boxed = find(sample, "boxed")
        return None if boxed is None else self.inner.extract(with_response(sample, boxed.text))

    def same_answer(self, sample: Sample, first: str, second: str) -> bool:
        return self.inner.same_answer(sample, first, second)


def known_types() -> list[str]:
    """Return every `rm_type`, sorted. Each also works with the prefix `boxed_`."""
    return VERIFIERS.names()


def weighted(
    parts: list[dict[str, Any]], *, load: LoadPart | None = None, skip_none: bool = False, setting: str = "score.rm"
) -> WeightedSum:
    """Build the weighted sum that a `setting` describes: type or path, weight, name, key and options of each part.

    >>> weighted([{"type": "exact"}, {"type": "length_penalty", "weight": -0.1, "limit": 8}])(
    ...     Sample(response="4", label="4", response_length=2))
    {'score': 0.975, 'exact': 1.0, 'length_penalty': 0.25}

    A part with a `path` and no `type` is a user's function, which `load` loads. With `skip_none` a part whose
    reward is None is left out of the sum. Raises SettingsError for an invalid part, or two parts of the same name, and
    HookError for a function that does not fit.
    """
    for index, entry in enumerate(parts):
        if not isinstance(entry, dict):
            raise SettingsError(f"{setting}[{index}]: {entry!r} is not a table. Write {{type = ..., weight = ...}}.")
    built: list[RewardTerm] = []
    names = _part_names(parts)
    for index, (entry, name) in enumerate(zip(parts, names, strict=True)):
        options, location = dict(entry), f"{setting}[{index}]"
        rm_type, weight = options.pop("type", None), options.pop("weight", 1.0)
        if not isinstance(rm_type, str) and not ("path" in entry and "type" not in entry):
            raise SettingsError(
                f"{location}.type: missing. Name a verifier ({', '.join(known_types())}), or give the path of your "
                f"own function: path = 'file.py:name'"
            )
        if isinstance(weight, bool) or not is_number(weight):
            raise SettingsError(f"{location}.weight: {weight!r} is not a finite number")
        options.pop("name", None)
        key = str(options.pop("key", TOTAL))
        if name == TOTAL or name in names[:index]:
            raise SettingsError(f"{location}.name: {name!r} is taken. Give each part its own name.")
        part = _own_function(location, options, load) if rm_type is None else _typed(location, rm_type, options)
        built.append(RewardTerm(name, float(weight), part, key))
    if not built:
        raise SettingsError(f"{setting}: no parts. Give [{{type = ..., weight = ...}}, ...].")
    return WeightedSum(tuple(built), skip_none)


def part_weights(parts: list[dict[str, Any]]) -> dict[str, float]:
    """Return the weight of each part of a sum by its name, for parts that `weighted` accepts.

    >>> part_weights([{"type": "exact"}, {"path": "my_rewards.py:brief", "weight": 0.2}])
    {'exact': 1.0, 'brief': 0.2}
    """
    weights = [float(part.get("weight", 1.0)) for part in parts]
    return dict(zip(_part_names(parts), weights, strict=True))


def _part_names(parts: list[dict[str, Any]]) -> list[str]:
    """Return the name of each part: its `name`, its type, or its function's name.

    A function has its path as its name if another part has its name.
    """
    names = []
    for part in parts:
        source = str(part.get("type") or part.get("path"))
        names.append(str(part.get("name", source if "type" in part else re.split("[:.]", source)[-1])))
    counts = Counter([*names, TOTAL])
    return [
        name if counts[name] == 1 or {"name", "type"} & part.keys() else str(part.get("path"))
        for name, part in zip(names, parts, strict=True)
    ]


def _typed(location: str, rm_type: str, options: dict[str, Any]) -> Verifier:
    """Create the verifier of a part of a sum. Raises SettingsError that names the part."""
    try:
        return verifier(rm_type, **options)
    except SettingsError as error:
        message = re.sub(r"score\.rm_(?:options|type)", location, str(error), count=1)
        is_path = rm_type.removeprefix(BOXED) not in VERIFIERS and re.search("[:.]", rm_type)
        hint = f". For your own function write path = {rm_type!r} instead of type." if is_path else ""
        raise SettingsError(message + hint) from None


def _own_function(location: str, options: dict[str, Any], load: LoadPart | None) -> Verifier:
    """Load the user's function of a part of a sum. Raises SettingsError or HookError that names the part."""
    path = options.pop("path")
    if options:
        raise SettingsError(
            f"{location}.{min(options)}: your own function has no options. The keys of such a part are path, weight, "
            f"name and key."
        )
    if not isinstance(path, str) or load is None:
        raise SettingsError(f"{location}.path: {path!r} is not a path. Write file.py:name or package.module:name.")
    return load(path, f"{location}.path")


def verifier(rm_type: str, **options: Any) -> Verifier:
    """Create the verifier of a type.

    >>> verifier("boxed_exact", ignore_case=True)(Sample(response=r"It is \\boxed{Paris}.", label="paris"))
    1.0

    `boxed_math` and `boxed_deepscaler` equal the types without the prefix, which already read only a box.
    `boxed_dapo` reads a box instead of the Answer: line. Raises SettingsError for an unknown type or option.
    """
    boxed, name = rm_type.startswith(BOXED), rm_type.removeprefix(BOXED)
    cls = _verifier_class(name, rm_type)
    if boxed and cls.BOXED_OPTIONS is not None:
        return cls(**_validate_options(name, cls, {**cls.BOXED_OPTIONS, **options}))
    instance = cls(**_validate_options(name, cls, options))
    return Boxed(instance) if boxed else instance


def _verifier_class(name: str, rm_type: str) -> type[Verifier]:
    """The class of a type without prefix. Raises SettingsError for an unknown one, BackendError for a broken one."""
    if name not in VERIFIERS:
        raise SettingsError(f"score.rm_type: {VERIFIERS.unknown(name, spelling=rm_type)}; each also with {BOXED}")
    cls: type[Verifier] = VERIFIERS.load(name)
    if not (isinstance(cls, type) and issubclass(cls, Verifier)):
        lack = "does not derive from slimectl.rewards.Verifier"
    elif not is_dataclass(cls):
        lack = "lacks the decorator @dataclass(frozen=True)"
    elif isabstract(cls):
        lack = f"lacks the method {' and '.join(sorted(cls.__abstractmethods__))}"
    else:
        return cls
    raise BackendError(f"{VERIFIERS.package(name)}: its verifier {name} {lack}. Repair or uninstall that package.")


def takes_url(rm_type: str) -> bool:
    """Whether a type calls a server at its option `url`. An unknown type does not."""
    name = rm_type.removeprefix(BOXED)
    cls: Any = _verifier_class(name, rm_type) if name in VERIFIERS else Verifier
    return issubclass(cls, Remote) and "url" in {field.name for field in fields(cls)}


def _validate_options(name: str, verifier_type: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Options with current names, validated against the verifier's fields. Raises SettingsError."""
    options = _with_current_names(verifier_type, options)
    kinds = _kinds(verifier_type)
    for option, value in options.items():
        location = f"score.rm_options.{option}"
        if option not in kinds:
            option_names = ", ".join(kinds) or "none"
            raise SettingsError(f"{location}: no option of {name}{_hint(option, list(kinds))} (it has: {option_names})")
        if get_origin(kinds[option]) is Literal:
            if value not in (allowed := get_args(kinds[option])):
                raise SettingsError(
                    f"{location}: {value!r} is not a {option}{_hint(str(value), list(allowed))} {allowed}"
                )
        elif not isinstance(value, _accepted_types(kinds[option])):
            raise SettingsError(f"{location}: {value!r} has the wrong type ({_kind(kinds[option])} expected)")
    for field in fields(verifier_type):
        if field.name not in options and field.default is MISSING and field.default_factory is MISSING:
            raise SettingsError(f"score.rm_options.{field.name}: missing, and {name} needs it")
    return options


@functools.cache
def _kinds(verifier_type: Any) -> dict[str, Any]:
    """The type of each option of a verifier."""
    hints = get_type_hints(verifier_type)
    return {field.name: hints[field.name] for field in fields(verifier_type)}


def _kind(annotation: Any) -> str:
    """Return an annotation as it is written: `float | None`, and `str` of the class."""
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


def _with_current_names(verifier_type: type[Verifier], options: dict[str, Any]) -> dict[str, Any]:
    """Options by their current names. Raises SettingsError for two names of one option."""
    renamed: dict[str, Any] = {}
    for old, value in options.items():
        option = verifier_type.ALIASES.get(old, old)
        if option in renamed:
            spellings = " and ".join(name for name in options if verifier_type.ALIASES.get(name, name) == option)
            raise SettingsError(f"score.rm_options: {spellings} are the same option. Give only {option}.")
        # `tries` also counted the first request.
        renamed[option] = value - 1 if (old, option) == ("tries", "max_retries") and isinstance(value, int) else value
    return renamed


def _accepted_types(kind: Any) -> Any:
    """Types that a value of the annotated type may have."""
    if kind is float:
        return float | int
    origin = get_origin(kind)
    return origin if origin in (dict, list) else kind


def _hint(name: str, available: list[str]) -> str:
    near = get_close_matches(name, available, n=1)
    return f"; did you mean {near[0]}?" if near else ""
