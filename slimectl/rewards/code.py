"""Unit tests of the program in a response, run in the sandbox."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any, ClassVar

from slimectl.errors import RecordError, SettingsError
from slimectl.rewards.base import Grade, Span, Verifier, no_answer, quote
from slimectl.rewards.extraction import text_of, trimmed
from slimectl.sandbox.runner import Limits, Outcome, run_program
from slimectl.types import Sample

MAX_PROGRAM = 100_000
PYTHON = ("", "python", "python3", "py")
SOURCE = "last fenced program"

_FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*$", re.MULTILINE)

Test = tuple[dict[str, Any], Any]
"""A case for the sandbox and its expected result: stdout, a value, or None where the case itself asserts."""


@dataclass(frozen=True)
class Code(Verifier):
    r"""The share of metadata.tests that the last fenced Python program passes; each runs it afresh, see `sandbox`.

    >>> tests = [{"input": "2\n", "output": "4\n"}, {"input": "3\n", "output": "9"}]
    >>> Code()(Sample(response="```python\nprint(2 * int(input()))\n```", metadata={"tests": tests}))
    0.5

    Tests are one of these, or its JSON as a string:
    - [{input, output}, …]: text for stdin, and the lines expected on stdout; blanks at the end of lines do not count
    - {inputs: […], outputs: […]}: the same by columns; with fn_name, each of inputs is a list of arguments for that
      function (or the method of a class Solution) and each of outputs its value
    - [statements, …], such as "assert f(2) == 4": run once the program has run; a test that raises is failed

    A program that ends before its test has run fails it. Expected outputs and values never enter the sandbox, and
    statements run in a process that the program cannot reach: the values of the program that they use cross as plain
    data, or as a proxy that the program answers for, and are compared there. A value that cannot cross fails the test.

    `timeout_s` and `test_timeout_s` are seconds of CPU time, of all tests together and of one; by the wall clock ten
    times as long may pass. Ten times `timeout_s` should stay below score.wall_timeout_s: past that the whole sample
    gets 0.
    Raises RecordError for malformed tests, BackendError where there is no sandbox.
    """

    ALIASES: ClassVar[dict[str, str]] = {"allow_weaker": "allow_unsandboxed_namespaces"}

    timeout_s: float = 4.0
    test_timeout_s: float = 2.0
    memory_mib: int = 512
    processes: int = 8
    allow_unsandboxed_namespaces: bool = False

    def __post_init__(self) -> None:
        for name in ("timeout_s", "test_timeout_s", "memory_mib", "processes"):
            if not getattr(self, name) > 0:
                raise SettingsError(f"score.rm_options.{name}: {getattr(self, name)} is not above 0")

    @property
    def slow(self) -> bool:
        return True

    def explain(self, sample: Sample) -> Grade:
        tests = _parse_tests(sample)
        fence = find_program(sample.response)
        if fence is None:
            return no_answer(SOURCE, "no fenced block that is closed")
        language, program = fence
        if language not in PYTHON:
            return Grade(0.0, SOURCE, f"is {language}; only Python is run", program.text, program.span)
        if len(program.text) > MAX_PROGRAM:
            reason = f"{len(program.text)} characters, over the limit of {MAX_PROGRAM}"
            return Grade(0.0, SOURCE, reason, program.text, program.span)
        limits = Limits(self.timeout_s, self.test_timeout_s, self.memory_mib, self.processes)
        cases = [case for case, _ in tests]
        outcomes = run_program(
            program.text, cases, limits, allow_unsandboxed_namespaces=self.allow_unsandboxed_namespaces
        )
        faults = [_failure_reason(expected, outcome) for (_, expected), outcome in zip(tests, outcomes, strict=True)]
        passed = faults.count("")
        first = next((f"; test {at}: {fault}" for at, fault in enumerate(faults) if fault), "")
        reason = f"{passed} of {len(tests)} tests passed{first}"
        return Grade(passed / len(tests), SOURCE, reason, program.text, program.span)

    def extract(self, sample: Sample) -> str | None:
        fence = find_program(sample.response)
        return text_of(fence[1]) if fence else None


def find_program(response: str) -> tuple[str, Span] | None:
    """Language ("" if not named) and text of the last fenced block that is closed; None if there is none."""
    opening, last = None, None
    for fence in _FENCE.finditer(response):
        if opening is None:
            opening = fence
        elif not fence[1]:
            last = (opening, fence)
            opening = None
        else:  # a block that was never closed, and a new one
            opening = fence
    if last is None:
        return None
    return last[0][1].lower(), trimmed(response, last[0].end(), last[1].start())


def _failure_reason(expected: Any, outcome: Outcome) -> str:
    """The reason why a test failed; "" if it passed."""
    if outcome.status != "ended":
        return outcome.error[:120] or outcome.status
    if isinstance(expected, _Lines):
        if expected.lines == _Lines.of(outcome.stdout).lines:
            return ""
        return f"printed {quote(outcome.stdout.strip())}, expected {quote(expected.text.strip())}"
    report = outcome.report if isinstance(outcome.report, dict) else {}
    if not report.get("passed") and "value" not in report:
        return "ended before the test had run"
    if expected is None:
        return ""
    actual, target = report.get("value"), expected.value
    return "" if _equal(actual, target) else f"gave {quote(_as_json(actual))}, expected {quote(json.dumps(target))}"


def _as_json(value: Any) -> str:
    try:
        return json.dumps(value)
    except (ValueError, RecursionError) as error:  # nested as deep as can be, or an integer too long to print
        return type(error).__name__


@dataclass(frozen=True)
class _Lines:
    text: str
    lines: list[str]

    @classmethod
    def of(cls, text: str) -> _Lines:
        return cls(text, [line.rstrip() for line in text.rstrip().splitlines()])


@dataclass(frozen=True)
class _Value:
    value: Any


def _equal(actual: Any, expected: Any) -> bool:
    """Equality of JSON values; fractions may differ by rounding, and true is not 1."""
    if isinstance(actual, list) and isinstance(expected, list):
        return len(actual) == len(expected) and all(map(_equal, actual, expected))
    if isinstance(actual, dict) and isinstance(expected, dict):
        return actual.keys() == expected.keys() and all(_equal(actual[key], expected[key]) for key in expected)
    if isinstance(actual, bool) or isinstance(expected, bool):
        return actual is expected
    if isinstance(actual, int | float) and isinstance(expected, int | float):
        return actual == expected or _close(actual, expected)
    return bool(actual == expected)


def _close(actual: float, expected: float) -> bool:
    try:
        return isinstance(actual + expected, float) and math.isclose(actual, expected, rel_tol=1e-9)
    except OverflowError:  # an integer that no float can hold
        return False


def _parse_tests(sample: Sample) -> list[Test]:
    """The tests of a sample. Raises RecordError."""
    raw = sample.metadata.get("tests")
    if isinstance(raw, str):
        try:
            raw = json.loads(raw)
        except json.JSONDecodeError:
            raw = [raw]
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
    """Text, or a list of lines; other values as they print."""
    first, second = ("\n".join(map(str, value)) if isinstance(value, list) else str(value) for value in (stdin, output))
    return {"input": first}, _Lines.of(second)
