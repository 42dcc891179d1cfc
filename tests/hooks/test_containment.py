"""A user's function cannot end, move or silence the process that calls it; what it raises is one line with its name."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slimectl.errors import HookError
from slimectl.plugins.callables import Hook, load_callable
from slimectl.plugins.containment import LONGEST, in_one_line

FUNCTIONS = """
import asyncio, os, sys, threading

def exits(sample): sys.exit(0)
def exits_at_once(sample): os._exit(0)
def becomes(sample): os.execv("/bin/true", ["true"])
def interrupts(sample): raise KeyboardInterrupt
def closes(sample): raise GeneratorExit
def stops(sample): raise StopIteration("early")
def recurs(sample): return recurs(sample)
def speaks(sample): raise ValueError("two\\nlines " + "and more " * 100)
class Mute(Exception):
    def __str__(self): raise RuntimeError
def mute(sample): raise Mute
async def exits_later(sample): await asyncio.sleep(0); sys.exit(0)
async def cancels(sample): raise asyncio.CancelledError
async def hidden(sample):
    async def task(): sys.exit(3)
    await asyncio.create_task(task())
def moves(sample): os.chdir("/"); return 1
def forks_well(sample):
    child = os.fork()
    if not child: os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
def silences(sample): del sys.stdout; sys.stderr = None; return 1
async def waits(sample): await asyncio.sleep(3600)
"""


def hook(tmp_path: Path, name: str) -> Hook:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    return Hook(f"{tmp_path}/mine.py:{name}", setting="score.custom_rm_path", offers=("sample",))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("exits", r"raised SystemExit: 0 \(mine.py:4\)"),
        ("exits_at_once", r"called os\._exit\(0\) \(mine.py:5\)"),
        ("becomes", r"called os\.execv\(…\) \(mine.py:6\)"),
        ("interrupts", r"raised KeyboardInterrupt \(mine.py:7\)"),
        ("closes", r"raised GeneratorExit \(mine.py:8\)"),
        ("stops", "raised StopIteration: early"),
        ("recurs", "raised RecursionError: maximum recursion depth exceeded"),
        ("speaks", "raised ValueError: two lines and more and more"),
        ("mute", r"raised Mute: \(its message cannot be read\)"),
    ],
)
def test_whatever_a_function_raises_is_one_line_with_its_name(tmp_path: Path, name: str, words: str):
    with pytest.raises(HookError, match=words) as error:
        hook(tmp_path, name)({"sample": 1})
    assert str(error.value).startswith(f"score.custom_rm_path: {tmp_path}/mine.py:{name} ")
    assert str(error.value).endswith(". Fix it there.")
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < LONGEST + 300


@pytest.mark.parametrize(
    ("name", "words"), [("exits_later", "SystemExit: 0"), ("cancels", "CancelledError"), ("closes", "GeneratorExit")]
)
def test_so_is_what_an_async_function_raises(tmp_path: Path, name: str, words: str):
    async def called() -> None:
        await hook(tmp_path, name).begin({"sample": 1})

    with pytest.raises(HookError, match=words):
        asyncio.run(called())


def test_a_cancellation_of_ours_stays_one(tmp_path: Path):
    async def cancelled() -> bool:
        task = asyncio.ensure_future(hook(tmp_path, "waits").begin({"sample": 1}))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    assert asyncio.run(cancelled())


def test_an_attempt_that_exits_is_no_failed_attempt(tmp_path: Path):
    with pytest.raises(HookError, match="raised SystemExit"):
        hook(tmp_path, "exits").attempt({"sample": 1})
    with pytest.raises(ValueError, match="two"):
        hook(tmp_path, "speaks").attempt({"sample": 1})
    with pytest.raises(RuntimeError, match="CancelledError"):
        asyncio.run(hook(tmp_path, "cancels").attempt({"sample": 1}))


def test_a_function_that_changes_the_working_directory_changes_it_for_itself(tmp_path: Path):
    folder = os.getcwd()
    assert hook(tmp_path, "moves")({"sample": 1}) == 1
    assert os.getcwd() == folder


def test_a_child_that_a_function_forks_may_end_as_it_likes(tmp_path: Path):
    assert hook(tmp_path, "forks_well")({"sample": 1}) == 7


def test_standard_streams_are_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, getattr(sys, name))
    assert hook(tmp_path, "silences")({"sample": 1}) == 1
    print("here", file=sys.stderr)
    assert sys.stdout is not None


def test_a_module_that_exits_when_it_is_imported_is_an_error(tmp_path: Path):
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(HookError, match=r"importing .*leaves.py failed: SystemExit: 0"):
        load_callable(f"{tmp_path}/leaves.py:f", setting="x")
    (tmp_path / "misses.py").write_text("open('no such file')\n")
    with pytest.raises(HookError, match=r"importing .*misses.py failed: FileNotFoundError"):
        load_callable(f"{tmp_path}/misses.py:f", setting="x")


def test_words_of_an_exception_are_short_and_on_one_line():
    assert in_one_line(ValueError("a\n  b")) == "ValueError: a b"
    assert in_one_line(ValueError()) == "ValueError"
    assert len(in_one_line(ValueError("x" * 10_000))) == len("ValueError: ") + LONGEST + 1


def test_an_exit_in_a_thread_is_an_error_with_words(tmp_path: Path):
    (tmp_path / "mine.py").write_text(
        "import os, threading\n"
        "def f(sample):\n"
        "    thread = threading.Thread(target=lambda: os._exit(0)); thread.start(); thread.join()\n"
    )
    hook = f"Hook({str(tmp_path / 'mine.py:f')!r}, setting='s', offers=('sample',))"
    code = f"from slimectl.plugins.callables import Hook; {hook}"
    result = subprocess.run(
        [sys.executable, "-c", code + "({'sample': 1})"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert result.stderr == (
        f"slimectl: a thread of a user's function called os._exit ({tmp_path}/mine.py:3). Fix it there.\n"
    )


def test_an_exception_in_a_thread_is_one_line(tmp_path: Path):
    (tmp_path / "mine.py").write_text(
        "import threading\n"
        "def fails(): int('one')\n"
        "def f(sample):\n"
        "    thread = threading.Thread(target=fails); thread.start(); thread.join(); return 1\n"
    )
    code = (
        f"from slimectl.plugins.callables import Hook; import threading\n"
        f"hook = Hook({str(tmp_path / 'mine.py:f')!r}, setting='s', offers=('sample',))\n"
        f"print(hook({{'sample': 1}}), hook({{'sample': 1}}))\n"
        f"ours = threading.Thread(target=int, args=('two',)); ours.start(); ours.join()\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    message = "raised ValueError: invalid literal for int() with base 10: 'one'"
    line = f"slimectl: a thread of a user's function {message} ({tmp_path}/mine.py:2). Fix it there."
    assert result.stdout == "1 1\n"
    assert result.stderr.splitlines()[:2] == [line, line]
    assert "'two'" in result.stderr.splitlines()[-1]  # a bug of slimectl's keeps its traceback


def test_a_child_that_comes_back_from_a_fork_does_not_go_on(tmp_path: Path):
    (tmp_path / "mine.py").write_text("import os\ndef f(sample):\n    return os.fork() and os.wait()[1]\n")
    hook = f"Hook({str(tmp_path / 'mine.py:f')!r}, setting='s', offers=('sample',))"
    code = f"from slimectl.plugins.callables import Hook; print({hook}"
    result = subprocess.run(
        [sys.executable, "-c", code + "({'sample': 1}))"], capture_output=True, text=True, check=False
    )
    assert result.stdout == "512\n"  # once, and the child ended with code 2
    assert "forked this process, and the child returned" in result.stderr
