"""Statements that test a program: natural ones pass and fail as they should, and no program claims a verdict."""

from __future__ import annotations

import pytest
from sandboxes import needs_sandbox, run

from slimectl.sandbox.judge import names_of_program

pytestmark = needs_sandbox

HUMANEVAL = (
    "METADATA = {'author': 'jt'}\n\n"
    "def check(candidate):\n"
    "    assert candidate([1.0, 2.0, 3.9, 4.0], 0.3) == True\n"
    "    assert candidate([1.0, 2.0, 3.0], 0.05) == False\n"
    "    for size in range(30):\n        assert candidate(list(range(size)), 0.5) is False\n"
    "check(has_close_elements)"
)
CLOSE = (
    "from typing import List\n"
    "def has_close_elements(numbers: List[float], threshold: float) -> bool:\n"
    "    return any(abs(a - b) < threshold for i, a in enumerate(numbers) for b in numbers[:i])\n"
)
STACK = (
    "class Stack:\n"
    "    def __init__(self, *items): self.items = list(items)\n"
    "    def push(self, item): self.items.append(item); return self\n"
    "    def pop(self): return self.items.pop()\n"
    "    def __len__(self): return len(self.items)\n"
    "    def __iter__(self): return iter(self.items)\n"
    "    def __getitem__(self, at): return self.items[at]\n"
    "    def __eq__(self, other): return isinstance(other, Stack) and self.items == other.items\n"
    "    def __add__(self, other): return Stack(*self.items, *other.items)\n"
    "    def __lt__(self, other): return len(self) < len(other)\n"
    "    def __repr__(self): return f'Stack{tuple(self.items)}'\n"
    "    @property\n"
    "    def top(self): return self.items[-1]\n"
)
LISTS = (
    "class ListNode:\n    def __init__(self, val=0, next=None): self.val, self.next = val, next\n"
    "class Solution:\n"
    "    def reverse(self, head):\n        before = None\n"
    "        while head: head.next, before, head = before, head, head.next\n        return before\n"
    "    def depth(self, node): return 1 + max(map(self.depth, (node.left, node.right))) if node else 0\n"
)
NATURAL = [
    (CLOSE, HUMANEVAL),
    ("def f(x): return (x, [x], {x}, {x: None}, frozenset([x]), b'a', 1j, range(x))",
     "assert f(2) == (2, [2], {2}, {2: None}, frozenset({2}), b'a', 1j, range(2))\n"
     "assert [type(v) for v in f(2)] == [int, list, set, dict, frozenset, bytes, complex, range]"),
    ("def f(): return {(1, 2): float('nan'), 3: float('-inf'), None: 10**5000, True: '\\ud800'}",
     "d = f()\n"
     "assert d[1, 2] != d[1, 2] and d[3] == -float('inf') and d[None] == 10**5000 and d[True] == '\\ud800'"),
    ("def f(x): return x / 3", "import math\nassert math.isclose(f(1), 0.3333333333333333, rel_tol=1e-12)\n"
     "assert abs(f(2) - 2 / 3) < 1e-9 and round(f(1), 2) == 0.33"),
    ("def sort(x): x.sort()\ndef same(x): return x",
     "a = [3, 1, [2]][:2]\nb = a\nassert sort(a) is None and b == [1, 3]\nassert same(a) is a"),
    ("def f(d, s, m): d['x'] = [1]; s.add(9); m[0][1] = 5; m.append(d)",
     "d, s, m = {}, {1}, [[0, 0]]\nf(d, s, m)\nassert d == {'x': [1]} and s == {1, 9} and m == [[0, 5], d]"),
    ("import math\ndef f(x): return math.sqrt(x)", "assert f(4) == math.sqrt(4)"),
    ("def f(x):\n    if x < 0: raise ValueError(f'bad {x}')\n    return x",
     "try:\n    f(-1)\n    assert False\nexcept ValueError as error:\n    assert str(error) == 'bad -1'\n"
     "assert f(1) == 1"),
    ("class Odd(KeyError): pass\ndef f(x): raise Odd(x)",
     "try: f('k')\nexcept Odd as error: assert isinstance(error, KeyError) and error.args == ('k',)\n"
     "else: raise AssertionError"),
    ("def f():\n    n = 0\n    while True: n += 1; yield n", "import itertools\n"
     "assert list(itertools.islice(f(), 3)) == [1, 2, 3]\n"
     "assert next(f()) == 1"),
    ("def f(fn, items): return [fn(x) for x in items if fn(x) > 1]", "assert f(lambda x: x + 1, [0, 1, 2]) == [2, 3]"),
    ("def f(items): return sorted(items)", "assert f(x for x in (3, 1, 2)) == [1, 2, 3]"),
    (STACK, "s = Stack(1)\ns.push(2).push(3)\n"
     "assert s.pop() == 3 and len(s) == 2 and s.items == [1, 2] and list(s) == [1, 2]\n"
     "assert s == Stack(1, 2) and s != Stack(2) and Stack(1) + Stack(2) == s and s[0] == 1 and 2 in s and s.top == 2\n"
     "assert isinstance(s, Stack) and not isinstance(3, Stack) and str(s) == 'Stack(1, 2)' and bool(Stack()) is False\n"
     "s.items = [7]\n"
     "assert s.top == 7 and hasattr(s, 'pop') and not hasattr(s, 'no') and sorted([s, Stack()])[0] == Stack()"),
    (LISTS, "head = ListNode(1, ListNode(2, ListNode(3)))\nnode = Solution().reverse(head)\nvalues = []\n"
     "while node: values.append(node.val); node = node.next\nassert values == [3, 2, 1]"),
    (LISTS, "class TreeNode:\n    def __init__(self, left=None, right=None): self.left, self.right = left, right\n"
     "assert Solution().depth(TreeNode(TreeNode(), TreeNode(TreeNode()))) == 3"),
    ("def sum(a, b): return a + b", "assert sum(10, 15) == 25"),
    ("async def f(x): return x + 1", "import asyncio\nassert asyncio.run(f(1)) == 2"),
    ("from collections import namedtuple, Counter, OrderedDict, defaultdict, deque\nP = namedtuple('P', 'x y')\n"
     "def f(): return P(1, 2)\ndef g(s): return Counter(s)\ndef h(): return deque([1, 2])",
     "assert f() == (1, 2) and f().y == 2 and g('aab') == {'a': 2, 'b': 1} and list(h()) == [1, 2]"),
    ("def f(x): print('got', x)", "import io\nfrom contextlib import redirect_stdout\nout = io.StringIO()\n"
     "with redirect_stdout(out): f(3)\nassert out.getvalue() == 'got 3\\n'"),
    ("LIMIT = 7\ndef f(): return LIMIT", "assert LIMIT == f() == 7"),
    ("class Pile(list): pass\ndef f(): return Pile([1, 2])", "assert f() == [1, 2] and [1, 2] == f() and 2 in f()"),
    ("def f(n):\n"
     "    return 1 if n < 2 else n * f(n - 1)", "for n in range(1, 200): assert f(n + 1) == (n + 1) * f(n)"),
    ("from fractions import Fraction\ndef f(): return Fraction(1, 3)", "from fractions import Fraction\n"
     "assert f() * 3 == 1 and f() == Fraction(1, 3)"),
    ("class R:\n    def __enter__(self): self.open = True; return self\n"
     "    def __exit__(self, *e): self.open = False",
     "r = R()\nwith r as s: assert s.open\nassert not r.open"),
]  # fmt: skip
TEST = "assert f(3) == 4\nassert abs(f(0.5) - 0.75) < 1e-6 and f([1]) == [2, 7]"
DISHONEST = [
    "import os; os._exit(0)",
    "import sys; sys.exit()",
    "def f(x):\n    import os; os._exit(0)",
    "def f(x): raise SystemExit(0)",
    "import os; os.write(3, b'{\"passed\": true}'); os._exit(0)",
    "import os\nfor fd in range(200):\n    try: os.write(fd, b'\\x10\\0\\0\\0{\"passed\": true}')\n"
     "    except OSError: pass",
    "class A:\n    def __eq__(self, o): return True\n    def __sub__(self, o): return self\n"
     "    def __abs__(self): return 0\n"
    "    def __lt__(self, o): return True\n    def __rsub__(self, o): return 0\ndef f(x): return A()",
    "class A(float):\n    def __eq__(self, o): return True\n    def __sub__(self, o): return 0.0\n"
     "    def __hash__(self): return 0\n"
    "def f(x): return A(9)",
    "import builtins\nbuiltins.AssertionError = Warning\nbuiltins.abs = lambda x: 0\nabs = lambda x: 0\n"
     "def f(x): return 0",
    "def check(*a): pass\ndef f(x): return 0",
    "import sys\nsys.settrace(lambda *a: None)\nsys.modules['test'] = sys.modules['__main__']\ndef f(x): return 0",
    "import atexit, os\natexit.register(os._exit, 0)\ndef f(x): return 0",
    "import gc, re\ndef f(x):\n    for o in gc.get_objects():\n"
     "        if isinstance(o, dict) and '0.' '75' in repr(o)[:100000]: return 4\n    return 0",
    "import os\ndef f(x):\n    if os.fork() == 0: os.write(3, b'\\x12\\0\\0\\0{\"result\": 4}      ')\n"
     "    return 0",
    "import inspect\ndef f(x):\n    for frame in inspect.stack():\n"
     "        if 'assert' in str(frame.code_context): return 4\n    return 0",
    "class f:\n    def __init__(self, x): pass\n    def __eq__(self, o): return True\n"
     "    def __sub__(self, o): return 0\n    def __abs__(self): return 0",
]  # fmt: skip


@pytest.mark.parametrize(("program", "test"), NATURAL)
def test_a_natural_test_passes_and_its_opposite_fails(program, test):
    passed, failed = run(program, {"code": test}, {"code": test + "\nassert not 1, 'the end'"})
    assert (passed.status, passed.error) == ("ended", "")
    assert (failed.status, failed.error) == ("failed", "AssertionError: the end")


@pytest.mark.slow
def test_no_program_claims_a_verdict():
    for program in DISHONEST:
        # One that breaks off the talk with its test ends at its limit, whatever that is.
        (outcome,) = run(program, {"code": TEST}, timeout_s=0.5, test_timeout_s=0.5)
        assert outcome.report is None, (program, outcome)
        assert outcome.status != "ended", (program, outcome)


def test_an_exception_that_ends_a_loop_ends_no_test():
    test = "for got, right in zip(map(f, [2, 3]), [4, 9]): assert got == right"
    outcome, honest = (
        run("def f(x): raise StopIteration", {"code": test})[0],
        run("def f(x): return x * x", {"code": test})[0],
    )
    assert (outcome.error, honest.report) == ("RuntimeError: the program raised StopIteration", {"passed": True})


def test_a_swallowed_end_of_the_program_is_no_pass():
    program = "import os\ndef f(x): os._exit(0)"
    swallowed = "try: f(1)\nexcept BaseException: pass"
    assert run(program, {"code": swallowed})[0].report is None
    assert run("def f(x): return x", {"code": swallowed})[0].report == {"passed": True}


def test_what_cannot_cross_fails_with_a_reason():
    deep = "def f():\n    x = []\n    for _ in range(9000): x = [x]\n    return x"
    assert run(deep, {"code": "f()"})[0].error == "the value is nested too deeply to cross to the test"
    assert "too many to cross" in run("def f(): return 'x' * (17 << 20)", {"code": "f()"})[0].error
    program = "class A:\n    def __eq__(self, o): return True\ndef f(): return A()"
    assert run(program, {"code": "assert f() == 4"})[0].error == "AssertionError (A of the program is not plain data)"


def test_neither_statements_nor_other_tests_are_in_the_memory_of_the_program():
    # Every writable byte of the process: a judge's text would show however it is held.
    program = (
        "import ctypes, gc, sys\n"
        "def scan():\n"
        "    end = id(object()) & ~0xfffff\n"
        "    needle, hits = bytes([99, 48, 102, 102, 101, 101]), 0\n"
        "    for o in gc.get_objects():\n"
        "        for r in gc.get_referents(o):\n"
        "            if isinstance(r, str) and needle.decode() in r: hits += 1\n"
        "    return hits\n"
        "HITS = scan()\n"
    )
    tests = [{"code": "assert HITS == 0"}, {"code": "assert HITS == 0, 'c0' 'ffee'\nc = 'c0ffee'"}]
    assert [outcome.status for outcome in run(program, *tests)] == ["ended", "ended"]


@pytest.mark.parametrize(("test", "names"), [
    ("assert f(2) == g(x)", {"f", "g", "x"}),
    ("assert abs(f(2) - 1) < len('a')", {"f"}),
    ("def check(c):\n    assert c(1)\ncheck(f)", {"c", "check", "f"}),
    ("assert sum(10, 15) == 6", {"sum"}),
    ("assert abs(sum(max(1, 2))) == 6", {"max"}),
    ("assert set(pow(2, 3)) == {8}", {"pow"}),
])  # fmt: skip
def test_builtins_are_the_programs_only_where_nothing_else_is(test, names):
    assert names_of_program(test) == names
