"""A million prompts cost no more memory than ten, and the first answer does not wait for the last prompt."""

from __future__ import annotations

import os
import re
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from workshop import Workshop

pytestmark = pytest.mark.slow

LINES = 1_000_000
FIRST_SAMPLE_CPU_S = 3.0
"""Seconds of CPU time that a million prompts may add before the first answer."""
EXTRA_MIB = 100.0


@dataclass
class Outcome:
    """Of a command whose reader leaves after some lines."""

    code: int
    stderr: bytes
    cpu_s: float
    """CPU seconds of the process until its first line."""
    peak_mib: float


def read_some(workshop: Workshop, prompts: Path, lines: int) -> Outcome:
    command = workshop.command("rollout", "-c", "slimectl.toml", "--data", prompts.name, "-n", "1",
                               "--max-response-len", "2")  # fmt: skip
    process = subprocess.Popen(
        command, cwd=workshop.folder, env=workshop.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    limit = threading.Timer(300, process.kill)
    limit.start()
    peaks = [0.0]
    watch = threading.Thread(target=watch_peak, args=(process.pid, peaks))
    watch.start()
    try:
        assert process.stdout.readline().startswith(b'{"')
        seconds = cpu_seconds(process.pid)
        for _ in range(lines - 1):
            assert process.stdout.readline()
        process.stdout.close()
        words = process.stderr.read()
        process.wait()
    finally:
        limit.cancel()
        process.stderr.close()
        watch.join()
    return Outcome(process.returncode, words, seconds, max(peaks))


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def watch_peak(pid: int, peaks: list[float]) -> None:
    """Collect the process's own peak until it ends; what wait4 reports includes the memory of whoever started it."""
    while True:
        try:
            peak = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
        except OSError:
            return
        if peak is None:
            return
        peaks.append(int(peak.group(1)) / 1024)
        time.sleep(0.01)


def test_a_million_prompts_stream(workshop: Workshop):
    few, many = workshop.folder / "few.jsonl", workshop.folder / "many.jsonl"
    few.write_text("".join(f'{{"prompt": "add {i}", "label": "{i}"}}\n' for i in range(10)))
    many.write_text("".join(f'{{"prompt": "add {i}", "label": "{i}"}}\n' for i in range(LINES)))
    small, large = read_some(workshop, few, 10), read_some(workshop, many, 10)
    assert small.code == 0
    assert (large.code, large.stderr) == (141, b"")
    assert large.cpu_s < small.cpu_s + FIRST_SAMPLE_CPU_S
    assert small.peak_mib > 100
    assert large.peak_mib < small.peak_mib + EXTRA_MIB
