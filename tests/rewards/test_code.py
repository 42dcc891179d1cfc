"""Programs against their tests: what passes, and what the sandbox keeps them from."""

from __future__ import annotations

import pytest
from sandboxes import PATIENT, needs_sandbox

from slimectl.errors import RecordError, SettingsError
from slimectl.rewards import verifier
from slimectl.types import Sample

DOUBLE = "print(2 * int(input()))"
SQUARE = "def square(x):\n    return x * x"
STDIN = [{"input": "2\n", "output": "4\n"}, {"input": "3", "output": "9"}]


def fenced(program: str, language: str = "python") -> str:
    return f"Here it is:\n```{language}\n{program}\n```\nDone."


TABLE = [
    (STDIN, fenced(DOUBLE), 0.5, "1 of 2 tests passed; test 1: printed '6', expected '9'"),
    (STDIN, fenced("print(int(input()) ** 2)"), 1.0, "2 of 2 tests passed"),
    ({"inputs": ["2", "3"], "outputs": ["4", "6"]}, fenced(DOUBLE), 1.0, "2 of 2 tests passed"),
    ('[{"input": "2", "output": "4"}]', fenced(DOUBLE), 1.0, "1 of 1 tests passed"),
    ([{"input": [1, 2], "output": [3, 4]}], fenced("print(int(input()) + 2)\nprint(int(input()) + 2, end='  \\n\\n')"),
     1.0, "1 of 1 tests passed"),
    ({"inputs": [[2], [3]], "outputs": [4, 10], "fn_name": "square"}, fenced(SQUARE), 0.5,
     "1 of 2 tests passed; test 1: gave '9', expected '10'"),
    ({"inputs": [[2]], "outputs": [4], "fn_name": "f"}, fenced("class Solution:\n  def f(self, x): return x + x"), 1.0,
     "1 of 1 tests passed"),
    ({"inputs": [[]], "outputs": [[0.3, True]], "fn_name": "f"}, fenced("def f(): return (0.1 + 0.2, True)"), 1.0,
     "1 of 1 tests passed"),
    ({"inputs": [[]], "outputs": [0.5], "fn_name": "f"}, fenced("def f(): return 10**400"), 0.0,
     f"0 of 1 tests passed; test 0: gave '1{'0' * 29}…{'0' * 30}', expected '0.5'"),
    ({"inputs": [[]], "outputs": [1], "fn_name": "f"}, fenced("def f(): return True"), 0.0,
     "0 of 1 tests passed; test 0: gave 'true', expected '1'"),
    ({"inputs": [[]], "outputs": [None], "fn_name": "f"}, fenced("def f(): return 1j"), 0.0,
     "0 of 1 tests passed; test 0: TypeError: Object of type complex is not JSON serializable"),
    (["assert square(2) == 4", "assert square(3) == 8, 'not 8'"], fenced(SQUARE), 0.5,
     "1 of 2 tests passed; test 1: AssertionError: not 8"),
    ("assert square(2) == 4", fenced(SQUARE, "py"), 1.0, "1 of 1 tests passed"),
    (["assert False"], fenced("import sys; sys.exit(0)"), 0.0,
     "0 of 1 tests passed; test 0: ended before the test had run"),
    (["assert False"], fenced("import os; os._exit(0)"), 0.0,
     "0 of 1 tests passed; test 0: ended before the test had run"),
    (STDIN, fenced("def"), 0.0, "0 of 2 tests passed; test 0: SyntaxError: invalid syntax (solution.py, line 1)"),
    (STDIN, fenced("raise SystemExit(3)"), 0.0, "0 of 2 tests passed; test 0: exit code 3"),
    (STDIN, fenced("import os; os.abort()"), 0.0, "0 of 2 tests passed; test 0: SIGABRT"),
    (STDIN, fenced("print(4)") + fenced(DOUBLE), 0.5, "1 of 2 tests passed; test 1: printed '6', expected '9'"),
    (STDIN, fenced(DOUBLE) + "```python\nprint(", 0.5, "1 of 2 tests passed; test 1: printed '6', expected '9'"),
    (STDIN, fenced("print(4)", ""), 0.5, "1 of 2 tests passed; test 1: printed '4', expected '9'"),
    (STDIN, fenced("main(){}", "cpp"), 0.0, "is cpp; only Python is run"),
    (STDIN, DOUBLE, 0.0, "no fenced block that is closed"),
    (STDIN, "", 0.0, "no fenced block that is closed"),
    (STDIN, fenced("#" * 100_001), 0.0, "100001 characters, over the limit of 100000"),
]  # fmt: skip


@needs_sandbox
@pytest.mark.parametrize(("tests", "response", "reward", "why"), TABLE)
def test_code(tests, response, reward, why):
    verdict = verifier("code", **PATIENT).explain(Sample(response=response, metadata={"tests": tests}))
    assert (verdict.reward, verdict.why) == (reward, why)
    assert verdict.extracted == verifier("code").extract(Sample(response=response))
    assert verdict.extracted is None or response[slice(*verdict.span)] == verdict.extracted


@needs_sandbox
def test_the_answer_of_a_test_cannot_be_read_or_forged_from_within():
    sample = Sample(response=fenced(
        "import gc, sys\n"
        "texts = [o for o in gc.get_objects() if isinstance(o, (dict, list)) and 'c0' 'ffee' in repr(o)]\n"
        "print(len(texts))\n"
    ), metadata={"tests": [{"input": "", "output": "c0ffee"}]})  # fmt: skip
    assert verifier("code", **PATIENT).explain(sample).why.endswith("printed '0', expected 'c0ffee'")
    line = '{"status": "ended", "stdout": "9"}'
    forged = f"import os\nfor fd in range(100):\n    try: os.write(fd, b'{line}\\n')\n    except OSError: pass"
    assert verifier("code")(Sample(response=fenced(forged), metadata={"tests": STDIN})) == 0.0


@pytest.mark.parametrize("tests", [None, [], {}, 7, [1], [{"input": "x"}], {"inputs": ["a"], "outputs": []},
                                   {"inputs": ["a"], "outputs": ["b"], "fn_name": "f"}, [["a"]]])  # fmt: skip
def test_tests_that_are_none_are_a_record_error(tests):
    with pytest.raises(RecordError, match=r"sample 3: metadata\.tests: "):
        verifier("code")(Sample(index=3, response=fenced(DOUBLE), metadata={"tests": tests}))


def test_limits_that_make_no_sense_are_refused():
    with pytest.raises(SettingsError, match=r"rm_options\.processes: 0 is not above 0"):
        verifier("code", processes=0)
