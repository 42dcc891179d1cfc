"""GRPO and GDPO on a reward of two components whose scales differ: held-out rewards over rounds, and CPU seconds.

    python benchmarks/two_rewards.py --out FOLDER [--seeds 1,2,3] [--rounds 40]

The task is the quickstart's, with a length to keep: spell a word backward, then write eight dots. `right` is 1 for the
right letters and else 0. `length` is minus the number of dots that are missing or too many. The reward is their sum.
Each seed begins from one model, which was warmed up on right letters with 0 to 10 dots. grpo and gdpo differ in
algorithm.name only. grpo-weighted is GRPO with length weighted by 0.16, the ratio of the deviations of right and length
before the first round (0.43 and 2.7). All are compared by the sum without weights. What was run already in FOLDER is
not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slimectl.recipes.spelling import prompts as words
from slimectl.types import Sample

DOTS = 8
HERE = Path(__file__).resolve()
WEIGHTED = f'score.rm=[{{path = "{HERE}:right"}}, {{path = "{HERE}:length", weight = 0.16}}]'
SIDES = {"grpo": [], "gdpo": ["-s", "algorithm.name=gdpo"], "grpo-weighted": ["-s", WEIGHTED]}
SETTINGS = """
[model]
card = "tiny"
[rollout]
data = ["{here}:prompts?seed=1&size=50000"]
n_samples_per_prompt = 8
max_response_len = 16
apply_chat_template = false
[engine]
max_running_requests = 512
[score]
rm = [{{ path = "{here}:right" }}, {{ path = "{here}:length" }}]
[sft_warmup]
data = ["{here}:prompts?seed=2&size=50000&dots=random"]
target_accuracy = 1.0
max_steps = 100
batch_size = 64
lr = 1e-3
[train]
lr = 5e-4
lr_decay_style = "linear"
[run]
rollout_batch_size = 64
save_interval = 1000
[eval]
interval = 10
n_samples_per_prompt = 4
data = {{ held_out = "{here}:prompts?split=held_out&seed=3&size=128" }}
"""


def prompts(split: str = "train", seed: int = 0, size: int = 1000, dots: str = "") -> Iterator[dict[str, Any]]:
    """Yield `size` prompts `word>` with the reversed word as label. For the warm-up, with 0 to 10 dots behind it."""
    rng = random.Random(seed)
    for row in words(split, seed, size, max_word_len=4):
        yield {"prompt": row["prompt"], "label": row["label"] + "." * (rng.randint(0, 10) if dots else 0)}


def right(sample: Sample) -> float:
    return float(sample.response.rstrip(".") == str(sample.label).rstrip("."))


def length(sample: Sample) -> float:
    return -abs(len(sample.response) - len(sample.response.rstrip(".")) - DOTS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", default="1,2,3", type=lambda text: [int(seed) for seed in text.split(",")])
    parser.add_argument("--rounds", default=40, type=int)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    os.chdir(args.out)
    Path("settings.toml").write_text(SETTINGS.format(here=HERE))
    finals: dict[str, list[tuple[float, float, float]]] = {name: [] for name in SIDES}
    for seed in args.seeds:
        start = run(f"start-{seed}", seed, "-s", "run.num_rollout=1", "-s", "train.lr=0")
        for name, arguments in SIDES.items():
            rounds = f"run.num_rollout={args.rounds}"
            folder = run(f"{name}-{seed}", seed, "--model", str(start / "latest"), "-s", "sft_warmup.data=",
                         "-s", rounds, *arguments)  # fmt: skip
            curve = list(evaluations(folder))
            finals[name].append(curve[-1][1:])
            seconds = float((folder / "cpu_seconds").read_text())
            print(f"{name}, seed {seed}, {seconds:.1f} CPU s: round, sum = right + length")
            for number, total, correct, kept in curve:
                print(f"  {number:4.0f}  {total:7.3f} = {correct:.3f} + {kept:.3f}", flush=True)
    for name, values in finals.items():
        means = [statistics.mean(column) for column in zip(*values, strict=True)]
        print(f"{name}, mean of seeds at the end: {means[0]:.3f} = {means[1]:.3f} + {means[2]:.3f}")


def run(name: str, seed: int, *arguments: str) -> Path:
    """Run slimectl, unless it was run already, and return the run's folder. Raises SystemExit if it fails."""
    folder = Path("runs") / name
    if (folder / "cpu_seconds").exists():
        return folder
    command = [sys.executable, "-m", "slimectl", "run", "settings.toml", "--seed", str(seed), "--name", name]
    before = cpu_seconds()
    done = subprocess.run([*command, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join([*command, *arguments])}\n{done.stderr[-2000:]}")
    (folder / "cpu_seconds").write_text(str(cpu_seconds() - before))
    return folder


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def evaluations(folder: Path) -> Iterator[tuple[float, float, float, float]]:
    """Yield round, sum, and both components of each evaluation."""
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        report = json.loads(line)
        metrics = report.get("metrics", report)
        if "eval/held_out/reward/right" in metrics:
            parts = metrics["eval/held_out/reward/right"], metrics["eval/held_out/reward/length"]
            yield metrics["eval/step"], sum(parts), *parts


if __name__ == "__main__":
    main()
