"""Cost of `slimectl view` to the run that it follows: CPU-seconds of the run, alone and watched, in pairs.

    python benchmarks/view_live.py --pairs 4 --rounds 40

Of each pair the other kind runs first, so that a machine that warms up or slows down favours none. CPU-seconds are
those of the run's own process and the children that it waited for (wait4), whatever else the machine does; caches and
a clock that it shares with the viewer still count.

The watcher asks for what an open page of curves asks for, every two seconds, and for the groups of the newest round.
Its own CPU time is printed beside the run's, that of its start and that of following apart: on a machine without an
idle core the run waits for both.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

EVERY_S = 2.0
"""Time between two looks, which is LIVE_MS of slimectl/cli/viewer/page/main.js."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=4, help="runs of each kind")
    parser.add_argument("--rounds", type=int, default=40, help="rounds of each run")
    arguments = parser.parse_args()
    ratios, start_shares, shares = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for pair in range(arguments.pairs):
            order = (False, True) if pair % 2 == 0 else (True, False)
            seconds = {watched: run(Path(folder), f"{pair}-{watched}", arguments.rounds, watched=watched)
                       for watched in order}  # fmt: skip
            (alone_s, _, _), (watched_s, start_s, viewer_s) = seconds[False], seconds[True]
            ratios.append(watched_s / alone_s)
            start_shares.append(start_s / watched_s)
            shares.append(viewer_s / watched_s)
            first = "alone" if pair % 2 == 0 else "watched"
            print(f"run alone {alone_s:.2f} CPU-s, watched {watched_s:.2f} CPU-s ({first} first); "
                  f"the viewer's start {start_s:.2f} CPU-s, following {viewer_s:.2f}", flush=True)  # fmt: skip
    print(f"watched / alone: median {statistics.median(ratios):.4f}, from {min(ratios):.4f} to {max(ratios):.4f}; "
          f"viewer / run: start {statistics.median(start_shares):.4f}, "
          f"following {statistics.median(shares):.4f}")  # fmt: skip


def run(folder: Path, name: str, rounds: int, *, watched: bool) -> tuple[float, float, float]:
    """Run the quickstart; return the CPU-seconds of the run, of the viewer's start and of its following (0 without)."""
    words = ["run", "quickstart", "--name", name, "-s", f"run.num_rollout={rounds}", "-s", "run.keep_samples=train"]
    training = subprocess.Popen([sys.executable, "-m", "slimectl", *words], cwd=folder, stdout=subprocess.DEVNULL,
                                stderr=subprocess.DEVNULL)  # fmt: skip
    viewer = Viewer(folder / "runs" / name) if watched else None
    run_s = cpu_s_to_end(training)
    if training.returncode != 0:
        raise SystemExit(f"the run ended with {training.returncode}")
    if viewer is None:
        return run_s, 0.0, 0.0
    return run_s, viewer.start_s, viewer.stop() - viewer.start_s


def cpu_s_to_end(process: subprocess.Popen[Any]) -> float:
    """Wait for a process; return its CPU-seconds with those of the children that it waited for."""
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return usage.ru_utime + usage.ru_stime


def cpu_s(pid: int) -> float:
    """Return the CPU-seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Viewer:
    """`slimectl view` of a run that has just been started, and a thread that looks at it."""

    def __init__(self, run: Path) -> None:
        while not (run / "metrics.jsonl").exists():
            time.sleep(0.1)
        words = ["view", str(run), "--no-browser"]
        self.process = subprocess.Popen([sys.executable, "-m", "slimectl", *words], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip() + "api/"
        self.start_s = cpu_s(self.process.pid)
        """CPU-seconds until it answers."""
        self.looks = 0
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._look)
        self.thread.start()

    def _look(self) -> None:
        offsets = {"metrics": 0, "perf": 0}
        while not self.ended.wait(EVERY_S):
            [watched] = self._ask("catalogue")["runs"]
            offsets = self._ask("metrics", run=watched["id"], **offsets)["offsets"]
            if watched["files"]:
                with suppress(HTTPError):  # a round that is just being saved is away for a moment
                    self._ask("groups", file=watched["files"][-1]["id"])
            self.looks += 1

    def _ask(self, question: str, **parameters: str | int) -> dict:
        query = urllib.parse.urlencode({name: value for name, value in parameters.items() if value})
        with urllib.request.urlopen(f"{self.address}{question}?{query}", timeout=60) as answer:
            return json.load(answer)

    def stop(self) -> float:
        """End the viewer and return its CPU-seconds."""
        self.ended.set()
        self.thread.join()
        self.process.terminate()
        if not self.looks:
            raise SystemExit("the run ended before anybody looked at it; give more --rounds")
        return cpu_s_to_end(self.process)


if __name__ == "__main__":
    main()
