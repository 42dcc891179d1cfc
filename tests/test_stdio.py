"""Stdout is for records alone, and a closed or full standard stream is one line or a documented exit code."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from slimectl.system import stdio

SAMPLE = {"group_index": 0, "index": 0, "prompt": "x", "tokens": [1, 2], "response": "b", "response_length": 1,
          "label": "b", "status": "completed"}  # fmt: skip
NOISY = """
import ctypes, os, subprocess, sys, threading

print("import")

def say_everywhere():
    print("print")
    sys.__stdout__.write("the first stdout\\n")
    os.write(1, b"descriptor\\n")
    ctypes.CDLL(None).puts(b"C")
    ctypes.CDLL(None).fflush(None)
    subprocess.run(["echo", "child"], check=True)
    thread = threading.Thread(target=print, args=("thread",))
    thread.start()
    thread.join()

def reward(sample):
    say_everywhere()
    return 1.0

async def awaited(sample):
    say_everywhere()
    return 1.0

def shut(sample):
    os.close(1)
    sys.stdout.close()
    return 1.0
"""


def slimectl(folder: Path, words: str, *, shell: str = "", code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a command under bash, with what `shell` says of its descriptors."""
    command = f"{shlex.quote(sys.executable)} -m slimectl {words} {shell}"
    result = subprocess.run(
        ["bash", "-c", command], cwd=folder, capture_output=True, text=True, check=False, env={**os.environ}
    )
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    return result


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "samples.jsonl").write_text(json.dumps(SAMPLE) + "\n")
    (tmp_path / "noisy.py").write_text(NOISY)
    return tmp_path


@pytest.mark.parametrize("options", ["noisy.py:reward", "noisy.py:awaited", "noisy.py:reward --workers 1"])
def test_what_a_reward_prints_lands_on_stderr_and_records_alone_on_stdout(folder: Path, options: str):
    result = slimectl(folder, f"score samples.jsonl --custom-rm-path {options}")
    (line,) = result.stdout.splitlines()
    assert json.loads(line)["reward"] == 1.0
    for words in ("import", "print", "the first stdout", "descriptor", "C", "child", "thread"):
        assert words in result.stderr.splitlines(), words


def test_a_reward_that_closes_stdout_closes_its_own(folder: Path):
    result = slimectl(folder, "score samples.jsonl --custom-rm-path noisy.py:shut")
    assert json.loads(result.stdout)["reward"] == 1.0


@pytest.mark.parametrize(
    ("shell", "code", "words"),
    [
        (">&-", 1, "slimectl: <stdout>: is closed. Use --out FILE, or open it."),
        (">/dev/full", 1, "slimectl: <stdout>: cannot be written: No space left on device. Free space or write"),
        ("2>&-", 0, ""),
        ("2>/dev/full", 0, ""),
    ],
)
def test_a_closed_or_full_stream_is_one_line(folder: Path, shell: str, code: int, words: str):
    result = slimectl(folder, "score samples.jsonl --rm-type exact", shell=shell, code=code)
    if code:
        assert result.stderr.splitlines()[-1].startswith(words)
    else:
        assert json.loads(result.stdout)["reward"] == 1.0


@pytest.mark.parametrize(
    ("words", "shell", "code"),
    [
        *(("--help", shell, code) for shell, code in ((">&-", 1), (">/dev/full", 1), ("2>&-", 0), ("<&-", 0))),
        *((words, shell, 1) for words in ("--version", "settings schema") for shell in (">&-", ">/dev/full")),
    ],
)
def test_so_it_is_for_help_and_lists(folder: Path, words: str, shell: str, code: int):
    result = slimectl(folder, words, shell=shell, code=code)
    assert len(result.stderr.splitlines()) == (code == 1)
    assert bool(result.stdout) == (code == 0)


def test_a_closed_stdin_is_one_line_that_names_it(folder: Path):
    result = slimectl(folder, "score - --rm-type exact", shell="<&-", code=3)
    assert result.stderr == "slimectl: <stdin>: is closed. Give a file or an open pipe.\n"


@pytest.mark.parametrize("shell", ["<&- >&- 2>&-", ">&- 2>&-", "<&- 2>&-"])
def test_no_output_file_gets_the_number_of_a_closed_stream(folder: Path, shell: str):
    slimectl(folder, "score samples.jsonl --custom-rm-path noisy.py:reward --out scored.jsonl", shell=shell)
    (line,) = (folder / "scored.jsonl").read_text().splitlines()
    assert json.loads(line)["reward"] == 1.0


def test_a_reader_that_leaves_is_exit_code_141(folder: Path):
    (folder / "samples.jsonl").write_text((json.dumps(SAMPLE) + "\n") * 20_000)
    result = slimectl(folder, "score samples.jsonl --rm-type exact", shell="| head -1; exit ${PIPESTATUS[0]}", code=141)
    assert result.stdout.count("\n") == 1
    assert result.stderr == ""


def test_a_function_that_reads_stdin_does_not_eat_records(folder: Path):
    (folder / "reads.py").write_text("import sys\ndef reward(sample):\n    return float(len(sys.stdin.read()))\n")
    result = slimectl(folder, "score - --custom-rm-path reads.py:reward", shell="< <(cat samples.jsonl samples.jsonl)")
    assert [json.loads(line)["reward"] for line in result.stdout.splitlines()] == [0.0, 0.0]


@pytest.mark.parametrize(("encoding", "drawn"), [("ascii", False), ("latin-1", False), ("utf-8", True)])
def test_texts_are_ascii_where_stdout_takes_no_utf_8_and_records_stay_utf_8(
    folder: Path, encoding: str, drawn: bool
) -> None:
    environment = f"PYTHONIOENCODING={encoding}"
    command = f"{environment} {shlex.quote(sys.executable)} -m slimectl"
    shown = subprocess.run(["bash", "-c", f"{command} score --help"], cwd=folder, capture_output=True, check=True)
    assert (max(shown.stdout) > 127) == drawn
    (folder / "unicode.jsonl").write_text(json.dumps(SAMPLE | {"response": "\u00e9", "label": "\u00e9"}) + "\n")
    scored = subprocess.run(
        ["bash", "-c", f"{command} score unicode.jsonl --rm-type exact"], cwd=folder, capture_output=True, check=True
    )
    assert json.loads(scored.stdout.decode("utf-8"))["response"] == "\u00e9"


def test_what_ascii_lacks_is_drawn_or_escaped() -> None:
    drawing = "\u2524\u2800\u28ff\u2588 12 \u2026 \u00e9"
    assert drawing.encode("ascii", stdio.PLAIN) == b"+ ** 12 ... \\xe9"
    assert drawing.encode("utf-8", stdio.PLAIN) == drawing.encode()
