"""Programs against their tests: what passes, and what the sandbox keeps them from."""

from __future__ import annotations

import time

import pytest
from sandboxes import PATIENT, needs_sandbox

from slimectl.errors import RecordError, SettingsError
from slimectl.rewards import verifier
from slimectl.rewards.fences import find_program
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
    (STDIN, fenced("main(){}", "cpp"), 0.0, "is cpp, but only Python can run"),
    (STDIN, DOUBLE, 0.0, "no closed fenced block"),
    (STDIN, "", 0.0, "no closed fenced block"),
    ([{"input": "", "output": "3 0.5\n"}], fenced("print('3.0  .50')"), 1.0, "1 of 1 tests passed"),
    ([{"input": "", "output": "4"}], fenced("print('\\n  4 \\n\\n')"), 1.0, "1 of 1 tests passed"),
    ([{"input": "", "output": "3"}], fenced("print(3.0000001)"), 0.0,
     "0 of 1 tests passed; test 0: printed '3.0000001', expected '3'"),
    ([{"input": "", "output": "12"}], fenced("print(1, 2)"), 0.0,
     "0 of 1 tests passed; test 0: printed '1 2', expected '12'"),
    ([{"input": "", "output": "a b"}], fenced("print('a  b')"), 0.0,
     "0 of 1 tests passed; test 0: printed 'a  b', expected 'a b'"),
    ([{"input": "", "output": "1" + "0" * 5000}], fenced("print(10 ** 5000)"), 1.0, "1 of 1 tests passed"),
    (["assert power(5000) == 1" + "0" * 5000], fenced("def power(x): return 10 ** x"), 1.0, "1 of 1 tests passed"),
    ({"inputs": [[1]], "outputs": [2**200], "fn_name": "f"}, fenced("def f(x): return 2**200 + x"), 0.0,
     f"0 of 1 tests passed; test 0: gave '{str(2**200 + 1)[:30]}…{str(2**200 + 1)[-30:]}', "
     f"expected '{str(2**200)[:30]}…{str(2**200)[-30:]}'"),
    ({"inputs": [[[3, 1, 3]], [[2]], [[1, 1]]], "outputs": [[1, 3], [2], [1, 1]], "fn_name": "f"},
     fenced("def f(x): return set(x)"), 2 / 3,
     """2 of 3 tests passed; test 2: gave '{"(set)": [1]}', expected '[1, 1]'"""),
    ({"inputs": [[2]], "outputs": [{"a": [[2, 1], [1]]}], "fn_name": "f"},
     fenced("def f(x): return {'a': {frozenset({1, x}), frozenset({1})}}"), 1.0, "1 of 1 tests passed"),
    ({"inputs": [[2]], "outputs": [[[0, 1], [2], ["k"]]], "fn_name": "f"},
     fenced("from collections import deque\ndef f(x): return range(x), deque([x]), {'k': 1}.keys()"), 1.0,
     "1 of 1 tests passed"),
    (STDIN, fenced("#" * 100_001), 0.0, "100001 characters, over the limit of 100000"),
]  # fmt: skip


@needs_sandbox
@pytest.mark.parametrize(("tests", "response", "reward", "why"), TABLE)
def test_code(tests, response, reward, why):
    verdict = verifier("code", **PATIENT).explain(Sample(response=response, metadata={"tests": tests}))
    assert (verdict.reward, verdict.why) == (reward, why)
    assert verdict.extracted == verifier("code").extract(Sample(response=response))
    assert verdict.extracted is None or response[slice(*verdict.span)] == verdict.extracted


PROGRAM = "x = int(input())\nprint(2 * x)"
DOCSTRING = f'def f(x):\n    """Doubles.\n\n    ```python\n    f(1)\n    ```\n    """\n    return 2 * x\n\n{DOUBLE}'
OUTPUT = "\nIt prints:\n```\n4\n```"
FENCES = [
    (f"```python\n{PROGRAM}\n```{OUTPUT}", PROGRAM),
    (f"```python\n{PROGRAM}\n```\n```bash\npython a.py\n```", PROGRAM),
    (f"```Python3\n{PROGRAM}\n```\n~~~text\n4\n~~~", PROGRAM),
    (f'```py title="a.py" {{cmd=true}}\n{PROGRAM}\n```', PROGRAM),
    (f"~~~~ {{.python .numberLines}}\n{PROGRAM}\n~~~~", PROGRAM),
    (f"```python\r\n{DOUBLE}\r\n```\r\n", DOUBLE),
    (f"```python\n{PROGRAM}```", PROGRAM),
    (f"```python\n{PROGRAM}```{OUTPUT}", PROGRAM),
    (f"```\n{PROGRAM}```", PROGRAM),
    (f"```\n{PROGRAM}\n```{OUTPUT}", PROGRAM),  # 4 is Python, but does nothing
    (f"```\n{PROGRAM}\n```\n```\nResult: 4\n```", PROGRAM),
    (f"```\n{PROGRAM}\n```\n```\n$ python a.py\n```", PROGRAM),
    (f"```\nprint(3)\n```\n```python\n{PROGRAM}\n```\n```\nprint(4)\n```", PROGRAM),
    (f"```python\n{DOCSTRING}\n```\nDone.", DOCSTRING),
    (f"```\n{DOCSTRING}\n```{OUTPUT}", DOCSTRING),
    (f"```python\n{DOCSTRING}```\nDone.", DOCSTRING),
    (f"```python\n# ends with ```\n{PROGRAM}\n```", f"# ends with ```\n{PROGRAM}"),
    (f"Solution: ```python\n{PROGRAM}\n```", PROGRAM),
    (f"```python\nprint(\n```python\n{PROGRAM}\n```", PROGRAM),  # never closed
    (f"```python\n{PROGRAM}\n```\n```python\nprint(", PROGRAM),
    (f"```python\n{PROGRAM}\n```\n```python\n>>> f(2)\n4\n```", PROGRAM),
    (f"```python\n{PROGRAM}\n```\n```python\n# usage\n```", PROGRAM),
    (f"```python\n{PROGRAM}\n```\n```python\n```", PROGRAM),
    (f"<answer>```python\n{PROGRAM}\n```</answer>", PROGRAM),
    (f"```python\n{PROGRAM}\n```<|im_end|>", PROGRAM),
    (f"```ipython\n{DOCSTRING}\n```", DOCSTRING),
    (f"```pypy3\n{PROGRAM}\n```{OUTPUT}", PROGRAM),
    (f"```markdown\n# Title\n```python\n{PROGRAM}\n```\n```", PROGRAM),
    ("1. So:\n   ```python\n   x = int(input())\n   print(2 * x)\n   ```\n2. Done", PROGRAM),
    ("```python\n    x = int(input())\n    print(2 * x)\n```", PROGRAM),
    ("```python\nprint(\n```", "print("),  # the last program counts, also if it is broken
    ("Use `print`. ```print(1)``` prints.", None),
    ("```python\nprint(1)", None),
    ("~~~python\nprint(1)\n```", None),
]


@pytest.mark.parametrize(("response", "program"), FENCES)
def test_the_program_of_a_response(response: str, program: str | None):
    block = find_program(response)
    assert (block.program if block else None) == program
    assert block is None or response[slice(*block.text.span)] == block.text.text


def test_many_fences_take_time_in_proportion():
    started = time.process_time()
    for text in ("```python\n", "```\n", "```python\n'''\n", '```\n"""\n', "~~~\nx```\n", "```python\nx```\n"):
        find_program(text * 10_000)
        find_program(text * 2_000 + "```\n" * 9)
    assert time.process_time() - started < 10


@needs_sandbox
@pytest.mark.parametrize(
    ("program", "options", "reward"),
    [
        ("print(3.0)", {}, 1.0),
        ("print(3.0)", {"compare": "text"}, 0.0),
        ("print(' 3 ')", {"compare": "text"}, 1.0),
        ("print(gcd(6, 9), file=stdout)", {}, 0.0),
        ("print(gcd(6, 9), file=stdout)", {"imports": True}, 1.0),
        ("from __future__ import annotations\nprint(3)", {"imports": True}, 1.0),
        ("def f(x: List[int]): pass\nprint(3)", {}, 0.0),  # NameError, as if run by itself
        ("def f(x: List[int]): pass\nprint(3)", {"imports": True}, 1.0),
        ("x: List[int] = [pow(3, 1), math.inf]\nprint(heappop(x), end='')", {"imports": True}, 1.0),
        ("def gcd(x): return x\nprint(gcd(3))", {"imports": True}, 1.0),
    ],
)
def test_options_of_comparison_and_imports(program: str, options: dict, reward: float):
    sample = Sample(response=fenced(program), metadata={"tests": [{"input": "", "output": "3"}]})
    assert verifier("code", **PATIENT, **options)(sample) == reward


@needs_sandbox
def test_a_method_takes_precedence_over_an_imported_name():
    program = "class Solution:\n    def search(self, x: List[int]) -> Optional[int]: return max(x)"
    sample = Sample(
        response=fenced(program), metadata={"tests": {"inputs": [[[1, 3]]], "outputs": [3], "fn_name": "search"}}
    )
    assert verifier("code", **PATIENT, imports=True)(sample) == 1.0


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
                                   {"inputs": ["a"], "outputs": ["b"], "fn_name": "f"}, [["a"]],
                                   f"[1{'0' * 5000}]"])  # fmt: skip
def test_tests_that_are_none_are_a_record_error(tests):
    with pytest.raises(RecordError, match=r"sample 3: metadata\.tests: "):
        verifier("code")(Sample(index=3, response=fenced(DOUBLE), metadata={"tests": tests}))


def test_limits_that_make_no_sense_are_refused():
    with pytest.raises(SettingsError, match=r"rm_options\.processes: 0 must be above 0"):
        verifier("code", processes=0)
