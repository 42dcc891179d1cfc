"""What a round costs by where it runs: in one process, with the trainer in a rank process, on Ray, with two servers.

    python benchmarks/executors.py [--rounds 5] [--steps 12]

Every measurement is `slimectl run` on the tiny model, the same prompts, answers and seed, in a folder of its own; the
cases take turns. Printed are, of all rounds but the first two of each run, the medians of: seconds a round, of which
sampling and grading, training, and carrying weights.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

CASES = {
    "one process": [],
    "Ray": ["--executor", "ray"],
    "two servers": ["--engines", "2"],
    "Ray, two servers": ["--executor", "ray", "--engines", "2"],
}
PARTS = ("perf/total_time", "perf/rollout_time", "perf/train_time", "perf/update_weights_time")
SETTINGS = """
[model]
card = "tiny"
[rollout]
data = ["slimectl.recipes.spelling:prompts?size=5000&max_word_len=4"]
n_samples_per_prompt = 8
max_response_len = 16
[score]
rm_type = "random"
[run]
rollout_batch_size = 16
[track]
plot = false
"""


def rounds(folder: Path, name: str, arguments: list[str], steps: int) -> list[list[float]]:
    """Seconds of every round but the first two, by part."""
    command = [sys.executable, "-m", "slimectl", "run", "--name", name, "-s", f"run.num_rollout={steps}", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
    lines = [json.loads(line)["metrics"] for line in (folder / "runs" / name / "perf.jsonl").read_text().splitlines()]
    return [[line.get(part, 0.0) for part in PARTS] for line in lines[2:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="Runs of every case")
    parser.add_argument("--steps", type=int, default=12, help="Rounds of a run")
    options = parser.parse_args()
    found: dict[str, list[list[float]]] = {name: [] for name in CASES}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "slimectl.toml").write_text(SETTINGS)
        for repeat in range(options.rounds):
            for i, (name, arguments) in enumerate(CASES.items()):
                found[name] += rounds(folder, f"{i}-{repeat}", arguments, options.steps)
    print(f"{'ms a round':<20} {'whole':>8} {'sampling':>9} {'training':>9} {'weights':>8}")
    for name, taken in found.items():
        whole, *parts = (1000 * statistics.median(column) for column in zip(*taken, strict=True))
        print(f"{name:<20} {whole:8.0f} {parts[0]:9.0f} {parts[1]:9.0f} {parts[2]:8.1f}")


if __name__ == "__main__":
    main()
