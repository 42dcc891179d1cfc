"""Time to the first page of a large samples file in `slimectl view`, and of each question to it.

    python benchmarks/view.py --samples 1000000

Writes the file into a temporary folder (1.45 kB a sample); prints CPU-seconds, and wall seconds for the first page.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from slimectl.cli.viewer import queries
from slimectl.data.sample_index import SampleIndex


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--file", type=Path, help="An existing samples file instead")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.file or Path(folder) / "samples.jsonl"
        if arguments.file is None:
            write_samples(path, arguments.samples)
        measure(path)


def write_samples(path: Path, count: int) -> None:
    """Write samples in groups of eight with 40 answer tokens each, numbers drawn from a pool of 1000 of each kind."""
    rng = random.Random(0)
    log_probs = [[round(-3 * rng.random(), 6) for _ in range(40)] for _ in range(1000)]
    tokens = [[rng.randrange(49152) for _ in range(60)] for _ in range(1000)]
    with path.open("w") as file:
        for index in range(count):
            line = {
                "group_index": index // 8, "index": index, "prompt": f"what is {index // 8} plus {index % 97}?",
                "tokens": tokens[index % 1000], "response": "therefore the answer is " * 8, "response_length": 40,
                "label": str(index), "reward": round(rng.random(), 3), "loss_mask": [1] * 40,
                "rollout_log_probs": log_probs[index % 1000], "status": "completed", "weight_versions": ["1"],
                "metadata": {"level": index % 5},
            }  # fmt: skip
            file.write(json.dumps(line) + "\n")


def measure(path: Path) -> None:
    print(f"{path.stat().st_size / 1e9:.2f} GB")
    begin = time.monotonic()
    index = SampleIndex(path)
    index.extend(0.5)
    queries.list_groups(index)
    print(f"first page without a stored index: {time.monotonic() - begin:.2f} s wall")
    timed("index", index.extend)
    timed("groups, in order", lambda: queries.list_groups(index))
    timed("groups, by spread of rewards", lambda: queries.list_groups(index, sort="spread", descending=True))
    timed("filter: reward > 0.99", lambda: queries.list_groups(index, where="reward > 0.99"))
    timed("text search", lambda: queries.list_groups(index, search="plus 77"))
    timed("histograms", lambda: queries.histograms(index, version=2))
    timed("first page with the stored index", lambda: queries.list_groups(SampleIndex(path)))
    print(f"memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB")
    index.stored_path.unlink(missing_ok=True)


def timed(title: str, question: Callable[[], object]) -> None:
    begin = time.process_time()
    question()
    print(f"{title}: {time.process_time() - begin:.2f} CPU-s")


if __name__ == "__main__":
    main()
