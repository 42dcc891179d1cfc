"""Unit tests of the program in a response, run in the sandbox."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any, ClassVar, Literal

from slimectl.errors import RecordError, SettingsError
from slimectl.rewards.base import Grade, Verifier, no_answer, quote
from slimectl.rewards.extraction import UNCLOSED
from slimectl.rewards.fences import Block, find_program, is_python
from slimectl.rewards.thoughts import answer_start
from slimectl.sandbox.program import SET
from slimectl.sandbox.runner import Limits, Outcome, longest_s, run_program
from slimectl.types import Sample

MAX_PROGRAM = 100_000
MAX_SET = 1000
"""Largest set whose members are compared pair by pair."""

SOURCE = "last fenced program"

Test = tuple[dict[str, Any], Any]
"""A case for the sandbox and its expected result: stdout, a value, or None if the case itself asserts."""


@dataclass(frozen=True)
class Code(Verifier):
    r"""The share of metadata.tests that the last fenced Python program passes. Each test runs it again (`sandbox`).

    >>> tests = [{"input": "2\n", "output": "4\n"}, {"input": "3\n", "output": "9"}]
    >>> Code()(Sample(response="```python\nprint(2 * int(input()))\n```", metadata={"tests": tests}))
    0.5

    The last block marked as Python counts, or else the last unmarked block that is a program (`fences`). Tests have one
    of these forms, or are its JSON as a string:
    - [{input, output}, …]: text for stdin, and the lines expected on stdout
    - {inputs: […], outputs: […]}: the same by columns. With fn_name, each input is a list of arguments for that
      function (or a method of a class Solution), and each output is its value. A set equals a list of its members
    - [statements, …], such as "assert f(2) == 4": run after the program. A test fails if it raises

    Lines are compared without surrounding blanks, and so is the whole output. With `compare` "numbers" two lines are
    also equal if they have the same numbers (3.0 is 3), as in LiveCodeBench (Jain et al. 2024, arXiv:2403.07974). With
    "text" they are not. `imports` gives the program the names of the standard library that LeetCode gives its programs
    (List, gcd, heappush, …). Names that the program defines take precedence.

    A program that ends before its test has run fails the test. Expected outputs and values never enter the sandbox.
    Statements run in a process that the program cannot reach. Values of the program cross to that process as plain
    data, or as a proxy that the program answers for, and are compared there. A value that cannot cross fails the test.

    `timeout_s` and `test_timeout_s` are CPU seconds of all tests together and of one test. The wall-clock limit is ten
    times as long, and is added to score.wall_timeout_s.
    Raises RecordError for malformed tests, and BackendError if no sandbox is available.
    """

    slow = True

    ALIASES: ClassVar[dict[str, str]] = {"allow_weaker": "allow_unsandboxed_namespaces"}

    timeout_s: float = 4.0
    test_timeout_s: float = 2.0
    memory_mib: int = 512
    processes: int = 8
    allow_unsandboxed_namespaces: bool = False
    compare: Literal["numbers", "text"] = "numbers"
    imports: bool = False

    def __post_init__(self) -> None:
        for name in ("timeout_s", "test_timeout_s", "memory_mib", "processes"):
            if not getattr(self, name) > 0:
                raise SettingsError(f"score.rm_options.{name}: {getattr(self, name)} must be above 0")

    @property
    def patience_s(self) -> float:
        return longest_s(self.timeout_s)

    def explain(self, sample: Sample) -> Grade:
        tests = _parse_tests(sample)
        block = _find(sample)
        if not isinstance(block, Block):
            return no_answer(SOURCE, block)
        text, program = block.text, block.program
        if block.language and not is_python(block.language):
            return Grade(0.0, SOURCE, f"is {block.language}, but only Python can run", text.text, text.span)
        if len(program) > MAX_PROGRAM:
            reason = f"{len(program)} characters, over the limit of {MAX_PROGRAM}"
            return Grade(0.0, SOURCE, reason, text.text, text.span)
        limits = Limits(self.timeout_s, self.test_timeout_s, self.memory_mib, self.processes)
        cases = [case for case, _ in tests]
        outcomes = run_program(
            program, cases, limits, imports=self.imports, allow_unsandboxed_namespaces=self.allow_unsandboxed_namespaces
        )
        faults = [
            _failure_reason(expected, outcome, as_numbers=self.compare == "numbers")
            for (_, expected), outcome in zip(tests, outcomes, strict=True)
        ]
        passed = faults.count("")
        first = next((f"; test {at}: {fault}" for at, fault in enumerate(faults) if fault), "")
        reason = f"{passed} of {len(tests)} tests passed{first}"
        return Grade(passed / len(tests), SOURCE, reason, text.text, text.span)

    def extract(self, sample: Sample) -> str | None:
        block = _find(sample)
        return block.text.text if isinstance(block, Block) else None


def _find(sample: Sample) -> Block | str:
    """Return the graded block, or the reason why there is none."""
    start = answer_start(sample)
    if start < 0:
        return UNCLOSED
    return find_program(sample.response, start) or "no closed fenced block"


def _failure_reason(expected: Any, outcome: Outcome, *, as_numbers: bool) -> str:
    """Return why a test failed, or "" if it passed."""
    if outcome.status != "ended":
        return outcome.error[:120] or outcome.status
    if isinstance(expected, _Output):
        if same_output(outcome.stdout, expected.text, as_numbers=as_numbers):
            return ""
        return f"printed {quote(outcome.stdout.strip())}, expected {quote(expected.text.strip())}"
    report = outcome.report if isinstance(outcome.report, dict) else {}
    if not report.get("passed") and "value" not in report:
        return "ended before the test had run"
    if expected is None:
        return ""
    actual, target = report.get("value"), expected.value
    return "" if _equal(actual, target) else f"gave {quote(_as_json(actual))}, expected {quote(_as_json(target))}"


def same_output(actual: str, expected: str, *, as_numbers: bool) -> bool:
    """Whether two outputs have the same lines, without blanks around them."""
    lines, wanted = (text.strip().splitlines() for text in (actual, expected))
    return len(lines) == len(wanted) and all(
        line.strip() == other.strip() or (as_numbers and _same_numbers(line, other))
        for line, other in zip(lines, wanted, strict=True)
    )


def _same_numbers(first: str, second: str) -> bool:
    """Whether two lines have the same numbers and nothing else."""
    try:
        return list(map(Decimal, first.split())) == list(map(Decimal, second.split()))
    except InvalidOperation:
        return False


def _as_json(value: Any) -> str:
    try:
        return json.dumps(value)
    except (ValueError, RecursionError) as error:  # nested too deeply, or an integer too long to print
        return type(error).__name__


@dataclass(frozen=True)
class _Output:
    text: str


@dataclass(frozen=True)
class _Value:
    value: Any


def _equal(actual: Any, expected: Any) -> bool:
    """Equality of JSON values. Fractions may differ by rounding, true is not 1, and sets are unordered."""
    if isinstance(actual, dict) and actual.keys() == {SET}:
        return isinstance(expected, list) and _same_members(actual[SET], expected)
    if isinstance(actual, list) and isinstance(expected, list):
        return len(actual) == len(expected) and all(map(_equal, actual, expected))
    if isinstance(actual, dict) and isinstance(expected, dict):
        return actual.keys() == expected.keys() and all(_equal(actual[key], expected[key]) for key in expected)
    if isinstance(actual, bool) or isinstance(expected, bool):
        return actual is expected
    if isinstance(actual, int | float) and isinstance(expected, int | float):
        return actual == expected or _close(actual, expected)
    return bool(actual == expected)


def _same_members(members: list[Any], expected: list[Any]) -> bool:
    """Whether a set and a list have the same members."""
    if len(members) != len(expected):
        return False
    if len(members) > MAX_SET:  # rounded fractions and nested sets take quadratic time
        return set(map(_as_json, members)) == set(map(_as_json, expected))
    return all(any(_equal(member, value) for value in expected) for member in members) and all(
        any(_equal(member, value) for member in members) for value in expected
    )


def _close(actual: float, expected: float) -> bool:
    try:
        return isinstance(actual + expected, float) and math.isclose(actual, expected, rel_tol=1e-9)
    except OverflowError:  # an integer too large for a float
        return False


def _parse_tests(sample: Sample) -> list[Test]:
    """The tests of a sample. Raises RecordError."""
    raw = sample.metadata.get("tests")
    if isinstance(raw, str):
        try:
            raw = json.loads(raw)
        except json.JSONDecodeError:
            raw = [raw]
        except ValueError as error:  # an integer with too many digits for Python
            raise RecordError(f"sample {sample.index}: metadata.tests: {error}") from None
    tests: list[Test] | None = None
    if isinstance(raw, dict):
        tests = _tests_from_columns(raw)
    elif isinstance(raw, list) and all(isinstance(entry, str) for entry in raw):
        tests = [({"code": entry}, None) for entry in raw]
    elif isinstance(raw, list) and all(
        isinstance(entry, dict) and {"input", "output"} <= entry.keys() for entry in raw
    ):
        tests = [_stdin_test(entry["input"], entry["output"]) for entry in raw]
    if not tests:
        raise RecordError(
            f"sample {sample.index}: metadata.tests: {{inputs, outputs}}, [{{input, output}}] or [statements] wanted"
        )
    return tests


def _tests_from_columns(columns: dict[str, Any]) -> list[Test] | None:
    inputs, outputs, name = columns.get("inputs"), columns.get("outputs"), columns.get("fn_name")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        return None
    if name is None:
        return [_stdin_test(*pair) for pair in zip(inputs, outputs, strict=True)]
    if not all(isinstance(arguments, list) for arguments in inputs):
        return None
    calls = [{"call": str(name), "arguments": arguments} for arguments in inputs]
    return [(call, _Value(output)) for call, output in zip(calls, outputs, strict=True)]


def _stdin_test(stdin: Any, output: Any) -> Test:
    """Make a test of text, or of a list of lines. Other values are converted to text."""
    first, second = ("\n".join(map(str, value)) if isinstance(value, list) else str(value) for value in (stdin, output))
    return {"input": first}, _Output(second)
