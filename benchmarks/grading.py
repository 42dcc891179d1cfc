"""Samples a second of `slimectl score`, and megabytes a second of the steps of a pipe: reading, grading, writing.

    python benchmarks/grading.py [--samples 10000] [--tokens 256] [--rounds 5] [--against CHECKOUT]

Samples with random float32 log-probabilities, token ids below 49 152 and answers of words are written as record version
1 (doubles, as before version 0.2.0) and 2. In turns run: `score --rm-type exact` on one process; on two processes, each
with half of the file; and the commands of another checkout (`--against`) on its own form of the file. Rates are medians
by CPU seconds, the program's start taken off (measured on one group of 8), and whole by the clock. Then one process
reads, grades and writes the samples in memory: the work of each end of a pipe `rollout | score | train`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
HERE = Path(__file__).resolve().parents[1]


def make(path: Path, count: int, tokens: int) -> None:
    """Write samples in record version 1, as json spells them."""
    import numpy as np

    draw = np.random.default_rng(0)
    with path.open("w") as file:
        for i in range(count):
            record = {
                "group_index": i // 8, "index": i, "prompt": f"What is {i} + {i + 1}?",
                "tokens": draw.integers(0, 49152, tokens + 24).tolist(), "response": "word " * (tokens * 3 // 5),
                "response_length": tokens, "label": str(i), "reward": None, "loss_mask": [1] * tokens,
                "rollout_log_probs": (-draw.exponential(0.7, tokens)).astype(np.float32).tolist(),
                "status": "completed", "weight_versions": ["7"], "rollout_temperature": 1.0,
            }  # fmt: skip
            file.write(json.dumps(record) + "\n")


def grade(checkout: Path, files: list[Path], target: str = os.devnull) -> tuple[float, float]:
    """Score every file in a process of its own, all at once; return seconds by the clock and of CPU."""
    command = [sys.executable, "-m", "slimectl", "score", "--rm-type", "exact"]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    start, before = time.perf_counter(), children_cpu()
    children = []
    for file in files:
        with open(target, "wb") as out:
            children.append(
                subprocess.Popen([*command, str(file)], stdout=out, stderr=subprocess.DEVNULL, env=environment, cwd="/")
            )
    if sum(child.wait() for child in children):
        raise SystemExit(f"{checkout}: score failed")
    return time.perf_counter() - start, children_cpu() - before


def children_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def halves(path: Path, count: int) -> list[Path]:
    lines = path.read_bytes().splitlines(keepends=True)
    parts = [path.with_name(f"{part}-{path.name}") for part in ("first", "second")]
    for part, some in zip(parts, (lines[: count // 2], lines[count // 2 :]), strict=True):
        part.write_bytes(b"".join(some))
    return parts


def commands(folder: Path, count: int, rounds: int, against: Path | None) -> None:
    """Print the rates of whole commands, taking turns."""
    old, new = folder / "old.jsonl", folder / "new.jsonl"
    grade(HERE, [old], str(new))
    few = folder / "few.jsonl"
    few.write_bytes(b"".join(new.read_bytes().splitlines(keepends=True)[:8]))
    turns: dict[str, tuple[Path, list[Path]]] = {
        "version 2": (HERE, [new]),
        "version 1 read, 2 written": (HERE, [old]),
        "version 2, two processes": (HERE, halves(new, count)),
    }
    if against:
        turns["the other checkout, version 1"] = (against, [old])
        turns["the other checkout, two"] = (against, halves(old, count))
    times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in turns}
    for _ in range(rounds):
        for name, (checkout, files) in turns.items():
            start = grade(checkout, [few])[1] * len(files)
            times[name].append((*grade(checkout, files), start))
    print(f"{count} samples: version 1 {old.stat().st_size / 1e6:.1f} MB, version 2 {new.stat().st_size / 1e6:.1f} MB")
    for name, runs in times.items():
        wall = statistics.median(run[0] for run in runs)
        cpu = statistics.median(run[1] - run[2] for run in runs)
        whole = statistics.median(run[1] for run in runs)
        print(
            f"{name:<30} {count / cpu:8.0f} samples a CPU-second beyond the start, {count / whole:8.0f} with it, "
            f"{count / wall:8.0f} by the clock"
        )
    if against:
        pairs = zip(times["the other checkout, version 1"], times["version 2"], strict=True)
        print(
            f"ratio by CPU beyond the start: {statistics.median((a[1] - a[2]) / (b[1] - b[2]) for a, b in pairs):.2f}"
        )


def steps(checkout: Path, path: Path, rounds: int) -> None:
    """Print the rate of reading, grading and writing the samples of a file in one process."""
    sys.path.insert(0, str(checkout))
    from slimectl.data.jsonl import JsonlWriter, read_samples
    from slimectl.runtime import builders
    from slimectl.runtime.stage_functions import load_settings, score

    settings = load_settings(None, {"score.rm_type": "exact"})
    reward = builders.reward(settings)
    samples = list(read_samples(path))
    copy = path.with_name("copy.jsonl")

    def write() -> None:
        with JsonlWriter(copy) as out:
            for sample in samples:
                out.write(sample)

    turns: dict[str, Callable[[], object]] = {
        "read": lambda: [None for _ in read_samples(path)],
        "grade": lambda: [None for _ in score(iter(samples), settings, reward=reward)],
        "write": write,
    }
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(rounds):
        for name, turn in turns.items():
            start = time.process_time()
            turn()
            seconds[name].append(time.process_time() - start)
    for name, runs in seconds.items():
        cpu = statistics.median(runs)
        size = (copy if name == "write" else path).stat().st_size
        print(f"  {name:<6} {len(samples) / cpu:8.0f} samples, {size / cpu / 1e6:6.0f} MB a CPU-second")


def main() -> None:
    if sys.argv[1:2] == ["--steps"]:
        steps(Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--against", type=Path, help="root of another checkout of slimectl")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make(folder / "old.jsonl", options.samples, options.tokens)
        commands(folder, options.samples, options.rounds, options.against)
        forms = [
            (HERE, "new.jsonl"),
            (HERE, "old.jsonl"),
            *([(options.against, "old.jsonl")] if options.against else []),
        ]
        for checkout, file in forms:
            print(f"{checkout.name}, {file}:", flush=True)
            script = [sys.executable, __file__, "--steps", str(checkout), str(folder / file), str(options.rounds)]
            subprocess.run(script, check=True, env={**os.environ, "PYTHONPATH": str(checkout)})


if __name__ == "__main__":
    main()
