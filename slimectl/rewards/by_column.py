"""Grades by a column of the row. Each value of the column has its own verifier, as with verl's data_source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import TYPE_CHECKING, Any

from slimectl.errors import RecordError, SettingsError
from slimectl.rewards.base import Grade, Verifier, quote
from slimectl.rewards.registry import verifier
from slimectl.types import Sample

if TYPE_CHECKING:
    from slimectl.system.client import HttpClient

GSM8K = {"type": "numeric", "pattern": "####(.*)"}
SEARCH = {"type": "exact", "source": "answer_tag", "ignore_case": True}
DATA_SOURCES: dict[str, Any] = {
    "openai/gsm8k": GSM8K,
    **dict.fromkeys(("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"), "math"),
    **dict.fromkeys(("math_dapo", "math", "math_dapo_reasoning", "aime*"), "dapo"),
    "numina_*": "math",
    **dict.fromkeys(("codecontests", "apps", "codeforces", "taco"), "code"),
    "hiyouga/geometry3k": "math",
    "searchR1_*": SEARCH,
}
"""Verifier of each data_source that verl 0.9.1 grades without a user's function."""


@dataclass(frozen=True)
class ByColumn(Verifier):
    r"""Grades each sample with the verifier that `types` has for the value of `column` in its row.

    >>> by_tag = ByColumn("tag", {"math*": "math", "trivia": {"type": "exact", "ignore_case": True}})
    >>> [by_tag(Sample(response=r"\boxed{4}", label="4", extra={"tag": tag})) for tag in ("math_500", "trivia")]
    [1.0, 0.0]

    A key of `types` is a value, or a pattern with `*`. The first match counts. An entry is the name of a verifier, a
    table of its `type` and options, or a verifier. In settings it may also be a list, which is a sum as in score.rm,
    or a table with the `path` of a function. Without `types`, the values of verl's data_source apply. The column may
    also be in the metadata. For a `code` entry, a label with tests becomes `metadata.tests`. If the label has a
    `target`, that is the label. Raises RecordError for a row without the column, or with a value that has no verifier.
    """

    column: str = "data_source"
    types: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _ = self._verifiers  # an unknown type or option is refused here

    @cached_property
    def _verifiers(self) -> dict[str, Verifier]:
        """The verifier of each pattern."""
        built = {}
        for pattern, entry in (self.types or DATA_SOURCES).items():
            if isinstance(entry, Verifier):
                built[pattern] = entry
                continue
            options = dict(entry) if isinstance(entry, dict) else {"type": entry}
            rm_type = options.pop("type", None)
            if not isinstance(rm_type, str) or rm_type.endswith("by_column"):
                raise SettingsError(
                    f"score.rm_options.types.{pattern}: {entry!r} does not name a verifier. Give a type"
                )
            built[pattern] = verifier(rm_type, **options)
        return built

    def _choose(self, sample: Sample) -> tuple[Verifier, Sample]:
        """Return the verifier of a sample, and the sample in the form for that verifier."""
        row = {**sample.metadata, **sample.extra}
        if self.column not in row:
            raise RecordError(
                f"sample {sample.index}: {self.column}: missing, and score.rm_type by_column grades by it. The row's "
                f"columns are {', '.join(row) or 'none'}"
            )
        value = str(row[self.column])
        for pattern, grader in self._verifiers.items():
            if fnmatchcase(value, pattern):
                return grader, _with_label_of(sample, self._type_of(pattern))
        raise RecordError(
            f"sample {sample.index}: {self.column} {quote(value)} has no verifier. Add it to score.rm_options.types, "
            f"or set score.custom_rm_path"
        )

    def _type_of(self, pattern: str) -> str:
        entry = (self.types or DATA_SOURCES)[pattern]
        return str(entry["type"] if isinstance(entry, dict) else entry if isinstance(entry, str) else "")

    @property
    def bounds(self) -> tuple[float, float]:
        ends = [part.bounds for part in self._verifiers.values()]
        return min(low for low, _ in ends), max(high for _, high in ends)

    @property
    def slow(self) -> bool:
        return any(part.slow for part in self._verifiers.values())

    @property
    def is_async(self) -> bool:
        return any(part.is_async for part in self._verifiers.values())

    @property
    def runs_user_code(self) -> bool:
        return any(part.runs_user_code for part in self._verifiers.values())

    @property
    def patience_s(self) -> float:
        return max(part.patience_s for part in self._verifiers.values())

    def prepare(self) -> None:
        for part in self._verifiers.values():
            part.prepare()

    def explain(self, sample: Sample) -> Grade:
        grader, own_sample = self._choose(sample)
        return grader.explain(own_sample)

    async def grade_async(self, samples: Sequence[Sample], http: HttpClient) -> list[Grade]:
        grades = []
        for sample in samples:
            grader, own_sample = self._choose(sample)
            grades += await grader.grade_async([own_sample], http)
        return grades

    def extract(self, sample: Sample) -> str | None:
        grader, own_sample = self._choose(sample)
        return grader.extract(own_sample)

    def same_answer(self, sample: Sample, first: str, second: str) -> bool:
        grader, own_sample = self._choose(sample)
        return grader.same_answer(own_sample, first, second)


def _with_label_of(sample: Sample, rm_type: str) -> Sample:
    """Return the sample with its tests in the metadata, and the target of its label as the label."""
    if rm_type == "code" and "tests" not in sample.metadata and sample.label is not None:
        return replace(sample, metadata={**sample.metadata, "tests": sample.label})
    if isinstance(sample.label, dict) and "target" in sample.label:
        return replace(sample, label=sample.label["target"])
    return sample
