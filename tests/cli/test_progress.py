"""Progress of stages: a bar on a terminal, nothing of it elsewhere, and a clean end."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import termios
from pathlib import Path
from typing import Any

import pytest
from workshop import Workshop

from slimectl.cli.progress import TICK_S, ProgressBar, is_drawn, line_count

ERASE = "\x1b[J"
SLOW = "import time\ndef reward(sample):\n    time.sleep(0.05)\n    return 1.0\n"
SAMPLE = {"group_index": 0, "index": 0, "prompt": "x", "tokens": [1, 2], "response": "b", "response_length": 1,
          "label": "b", "status": "completed"}  # fmt: skip


def test_a_bar_fits_the_terminal_and_says_count_rate_and_remaining_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NO_COLOR", "1")
    times = iter([0.0, *[10.0] * 9])
    progress = ProgressBar("samples", total=100, drawn=False, clock=lambda: next(times))
    progress.advance(25)
    assert progress.bar(79) == "25/100 samples  " + "━" * 7 + " " * 23 + "  2.5/s  0:30 left"
    assert progress.bar(39) == "25/100 samples  ━" + " " * 4 + "  2.5/s  0:30 left"
    assert progress.bar(30) == "25/100 samples  0:30 left"
    assert progress.bar(10) == "25/100 sam"


def test_without_a_total_the_time_so_far_is_shown():
    times = iter([0.0, 62.0])
    progress = ProgressBar("samples", drawn=False, clock=lambda: next(times))
    progress.advance(31)
    assert progress.line() == "31 samples  0.5/s  1:02 so far"


def test_tokens_are_counted_with_their_rate():
    seconds, tokens = 0.0, 100
    progress = ProgressBar("samples", total=64, drawn=False, clock=lambda: seconds)
    progress.count_tokens(lambda: tokens)
    with progress.phase("generating"):
        assert progress.line() == "0/64 samples  generating  0:00 so far"
        seconds, tokens = 8.0, 2500  # 2400 more in 8 s, and no sample has ended
        assert progress.line() == "0/64 samples  generating  0:08 so far  2,400 tokens  300 tokens/s"


def test_a_run_shows_its_phase_the_median_time_of_a_round_and_figures_as_far_as_they_fit(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("NO_COLOR", "1")
    seconds = 0.0
    progress = ProgressBar("rounds", each="round", drawn=False, clock=lambda: seconds)
    with progress.phase("load"):
        assert progress.bar(79) == "0 rounds  load  0:00 so far"
    progress.expect(10, done=4)  # resumed after the fourth
    for number, now in ((5, 2.0), (6, 5.0), (7, 25.0)):  # 2, 3 and 20 s
        seconds = now
        progress.reach(number)
    progress.show(["reward 0.500", "grad 1.25"])
    with progress.phase("rollout"):
        progress.part(3, 8)
        with progress.phase("grade"):
            assert "  grade  " in progress.bar(79)
        bar = "━" * 18 + " " * 8
        narrow = "━" * 11 + " " * 6
        assert progress.bar(79) == f"7/10 rounds  {narrow}  rollout 3/8  3 s/round  0:25 left  reward 0.500"
        assert progress.bar(99) == f"7/10 rounds  {bar}  rollout 3/8  3 s/round  0:25 left  reward 0.500  grad 1.25"
        assert progress.bar(59) == "7/10 rounds  ━━━━━━━      rollout 3/8  3 s/round  0:25 left"
        assert progress.bar(49) == "7/10 rounds  rollout 3/8  3 s/round  0:25 left"
        assert progress.bar(39) == "7/10 rounds  rollout 3/8  0:25 left"
        assert progress.bar(22) == "7/10 rounds  0:25 left"
    seconds = 30.0  # 5 s of the next round are over
    assert progress.line() == "7/10 rounds  rollout 3/8  3 s/round  0:20 left  reward 0.500  grad 1.25"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "value", "drawn"), [("CI", "true", False), ("CI", "", True), ("TERM", "dumb", False)])
def test_no_bar_where_a_terminal_is_a_file_that_somebody_reads(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, drawn: bool
):
    monkeypatch.setattr(os, "isatty", lambda number: True)
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("SLIMECTL_LOG_LEVEL", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv(name, value)
    assert is_drawn(of_pipe=False) is drawn


def test_lines_are_counted_in_plain_files_alone(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text("{}\n{}")
    (tmp_path / "b.jsonl.gz").write_text("{}\n")
    assert line_count([str(tmp_path / "a.jsonl")] * 2) == 4
    assert line_count([str(tmp_path / "b.jsonl.gz")]) is line_count(["-"]) is None


@pytest.fixture
def slow(workshop: Workshop) -> Workshop:
    (workshop.folder / "slow.py").write_text(SLOW)
    (workshop.folder / "samples.jsonl").write_text((json.dumps(SAMPLE) + "\n") * 16)
    return workshop


GRADING = ("score", "samples.jsonl", "--custom-rm-path", "slow.py:reward", "--workers", "0", "-o", "out.jsonl")


def on_terminal(
    workshop: Workshop, *words: str, interrupt: bool = False, columns: int = 80, **streams: Any
) -> tuple[str, int]:
    """Run a command whose stderr is a pseudo-terminal; return what came there, and the exit code."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = workshop.start(*words, stderr=theirs, **streams)
    os.close(theirs)
    text = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        text += piece
        if interrupt and b"/16 samples" in text:
            interrupt = False
            os.kill(process.pid, signal.SIGINT)
    os.close(ours)
    return text.decode(), process.wait(300)


@pytest.mark.slow
def test_a_terminal_gets_a_bar_that_is_gone_at_the_end(slow: Workshop, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "xterm")
    text, code = on_terminal(slow, *GRADING)
    assert code == 0
    assert "/16 samples" in text
    assert "━" in text
    assert f"{ERASE}16 samples, mean reward 1" in text  # above the bar, which it replaces for a moment
    assert "/16 samples" not in text.rpartition(ERASE)[2]


@pytest.mark.slow
@pytest.mark.parametrize(("term", "options"), [("dumb", ()), ("xterm", ("--quiet",))])
def test_no_bar_on_a_dumb_terminal_or_where_messages_are_hidden(
    slow: Workshop, monkeypatch: pytest.MonkeyPatch, term: str, options: tuple[str, ...]
):
    monkeypatch.setenv("TERM", term)
    text, code = on_terminal(slow, *GRADING, *options)
    assert code == 0
    assert bool(text) == (not options)  # --quiet leaves not even the summary
    assert "\x1b" not in text
    assert "━" not in text


def test_an_interrupt_erases_the_bar_before_its_message(slow: Workshop, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "xterm")
    text, code = on_terminal(slow, *GRADING, interrupt=True)
    assert code == 130
    assert "slimectl: interrupted" in text.rpartition(ERASE)[2]
    assert "\x1b[?25l" not in text  # the cursor was never hidden


@pytest.mark.slow
def test_no_control_characters_where_stderr_is_a_file(slow: Workshop):
    slow.slimectl(*GRADING)
    assert slow.stderr == "16 samples, mean reward 1\n"


@pytest.mark.slow
def test_a_run_on_a_narrow_terminal_draws_one_bar_and_writes_its_lines_into_the_log(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    pause = f"import time\ndef pause(args, samples):\n    time.sleep({4 * TICK_S})\n"
    (workshop.folder / "pause.py").write_text(pause)
    words = ("run", "-s", "run.num_rollout=2", "-s", "track.plot=false",
             "-s", "rollout.all_samples_process_path=pause.py:pause")  # fmt: skip
    text, code = on_terminal(workshop, *words, columns=40, stdout=subprocess.PIPE)
    assert code == 0
    frames = re.findall(r"\x1b7\x1b\[B\r(.*?)\x1b8", text)
    assert frames
    assert [frame for frame in frames if not re.match(r"\d(/2)? rounds", frame) or len(frame) >= 40] == []
    assert "/2 rounds" in frames[-1]
    assert "\x1b[3" not in text  # no colours
    lines = re.sub(r"\x1b7.*?\x1b8|\x1b\[?[0-9;]*[A-Z]", "", text).replace("\r", "").splitlines()
    assert [line[:16] for line in lines if line.startswith("step")] == ["step    0  small", "step    2  small"]
    worst, change = (line.strip() for line in lines if line.startswith("  slimectl inspect"))
    assert worst == "slimectl inspect runs/a/eval/small-000002.jsonl --sort reward    # the worst responses"
    name = re.fullmatch("slimectl inspect runs/a --prompt '(say .*)'    # how this one changed", change)
    assert name is not None
    assert f"\n{name[1]}" in workshop.slimectl("inspect", "runs/a/eval/small-000002.jsonl", "--sort", "reward").decode()
    assert "6 responses in 3 files" in workshop.slimectl("inspect", "runs/a", "--prompt", name[1]).decode()
    log = (workshop.folder / "runs" / "a" / "log.txt").read_text()
    assert [number in log for number in ("step    1  reward", "step    2  reward")] == [True, True]
