"""Every algorithm on the quickstart's task: held-out accuracy before and after the same budget, over seeds.

    python benchmarks/learning.py --out FOLDER [--seeds 1,2,3] [--only grpo,ppo] [--rounds 100]

Each seed begins from one warmed-up model. Algorithms that sample learn in `slimectl run`: so many rounds of 64 prompts
with 8 answers, four optimizer steps a round (so that ratios leave 1 and clips clip), learning rate 5e-4 falling to 0.
opd's teacher is what grpo made of the same seed; grpo is run first. sft, dpo and reward_model learn in `slimectl train`
from a file, with as many samples and steps: sft from labels, the other two from the first model's own scored answers.
All else is each algorithm's default, but critic_lr 1e-3 of ppo. What was run already in FOLDER is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from slimectl.recipes.spelling import prompts
from slimectl.settings.algorithm import ALGORITHMS

PROMPTS, ANSWERS, STEPS = 64, 8, 4
TASK = "slimectl.recipes.spelling:prompts?max_word_len=4"
HELD_OUT = f"held_out={TASK}&split=held_out&seed=3&size=256"
LEARNING = ["-s", "train.lr=5e-4", "-s", "train.lr_decay_style=linear"]
FROM_FILES = ("sft", "dpo", "reward_model")
SHORT = ["-s", "rollout.max_response_len=16", "-s", "engine.max_running_requests=512"]
OWN = {
    "ppo": ["-s", "algorithm.critic_lr=1e-3"],
    "opd": ["-s", "algorithm.opd_teacher_load={grpo}/latest"],
}
WATCHED = {
    "ppo": ("explained variance", "train/critic-explained_variance"),
    "opd": ("reverse KL", "train/opd_reverse_kl"),
    "dpo": ("margin", "train/reward_margin"),
    "reward_model": ("pair accuracy", "train/pair_accuracy"),
}
"""What an algorithm promises besides accuracy: its name and metric, of which the first and the last tenth are shown."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", default="1,2,3", type=lambda text: [int(seed) for seed in text.split(",")])
    parser.add_argument("--only", default="", type=lambda text: text.split(",") if text else [])
    parser.add_argument("--rounds", default=100, type=int)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    os.chdir(args.out)
    names = args.only or sorted(ALGORITHMS, key=lambda name: (name != "grpo", name in FROM_FILES))
    print(f"{'algorithm':28} {'before -> after, of seeds ' + ', '.join(map(str, args.seeds)):52} mean gain")
    for name in names:
        found = [learnt(name, seed, args.rounds) for seed in args.seeds]
        if name != "reward_model":  # it writes nothing
            told = ", ".join(f"{before:.3f} -> {after:.3f}" for before, after, _ in found)
            gain = statistics.mean(after - before for before, after, _ in found)
            print(f"{name:28} {told:52} {gain:+.3f}", flush=True)
        if name in WATCHED:
            told = ", ".join(tenths(watched) for *_, watched in found)
            print(f"{name:28} {told:52} {WATCHED[name][0]}", flush=True)


def learnt(name: str, seed: int, rounds: int) -> tuple[float, float, list[float]]:
    """Accuracy before and after, and the values of what is watched, a step each."""
    start = warmed_up(seed)
    before = accuracy(start, Path(f"eval-start-{seed}.json"))
    own = [argument.format(grpo=f"runs/grpo-{seed}") for argument in OWN.get(name, [])]
    if name in FROM_FILES:
        reports, model = from_file(name, seed, start, rounds, own)
    else:
        reports, model = by_rounds(name, seed, start, rounds, own)
    after = 0.0 if name == "reward_model" else accuracy(model, Path(f"eval-{name}-{seed}.json"))
    metric = WATCHED[name][1] if name in WATCHED else None
    return before, after, [report[metric] for report in reports if metric in report]


def warmed_up(seed: int) -> Path:
    """The model that all algorithms of a seed begin from: the quickstart's, before its first round."""
    name = f"start-{seed}"
    nothing_learnt = ["-s", "run.num_rollout=1", "-s", "train.lr=0"]
    once(Path(f"runs/{name}/latest"), "run", "quickstart", "--seed", str(seed), "--name", name, *nothing_learnt)
    return Path(f"runs/{name}/latest")


def by_rounds(name: str, seed: int, start: Path, rounds: int, own: list[str]) -> tuple[list[dict[str, float]], Path]:
    run = Path(f"runs/{name}-{seed}")
    budget = ["-s", f"run.num_rollout={rounds}", "-s", f"train.num_steps_per_rollout={STEPS}", "-s", "sft_warmup.data="]
    command = ["run", "quickstart", "--seed", str(seed), "--name", run.name, "--model", str(start), *budget]
    once(run / "latest", *command, "-s", f"algorithm.name={name}", *LEARNING, *own)
    return list(metrics_of((run / "metrics.jsonl").read_text())), run / "latest"


def from_file(name: str, seed: int, start: Path, rounds: int, own: list[str]) -> tuple[list[dict[str, float]], Path]:
    samples = demonstrations(seed, rounds) if name == "sft" else scored(seed, start, rounds)
    model, reports = Path(f"{name}-{seed}"), Path(f"{name}-{seed}.jsonl")
    batch = PROMPTS * ANSWERS // STEPS
    steps = ["-s", f"train.global_batch_size={batch}", "-s", f"train.lr_decay_iters={rounds * STEPS}"]
    command = ["train", str(samples), "--model", str(start), "--algorithm", name, "--save", str(model)]
    if not reports.exists():
        written(reports, *command, *steps, *LEARNING, *own)
    return list(metrics_of(reports.read_text())), model


def demonstrations(seed: int, rounds: int) -> Path:
    file = Path(f"demonstrations-{seed}.jsonl")
    lines = prompts(seed=seed, size=rounds * PROMPTS * ANSWERS, max_word_len=4)
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return file


def scored(seed: int, start: Path, rounds: int) -> Path:
    answers, file = Path(f"answers-{seed}.jsonl"), Path(f"scored-{seed}.jsonl")
    if not file.exists():
        source = f"{TASK}&seed={seed}&size={rounds * PROMPTS}"
        written(answers, "rollout", "--model", str(start), "--data", source, "-n", str(ANSWERS), *SHORT)
        written(file, "score", str(answers), "--rm-type", "reasoning_gym")
    return file


def accuracy(model: Path, kept: Path) -> float:
    """Share of right answers to 256 held-out words, four sampled for each at temperature 1."""
    if not kept.exists():
        command = ["eval", "--data", HELD_OUT, "--model", str(model), "--rm-type", "reasoning_gym", "-n", "4"]
        written(kept, *command, *SHORT, "-s", "eval.max_response_len=16")
    return float(next(metrics_of(kept.read_text()))["eval/held_out_accuracy"])


def metrics_of(text: str) -> Iterator[dict[str, float]]:
    for line in text.splitlines():
        report = json.loads(line)
        yield report.get("metrics", report)


def once(made: Path, *arguments: str) -> None:
    if not made.exists():
        slimectl(arguments, subprocess.DEVNULL)


def written(file: Path, *arguments: str) -> None:
    """A command's stdout as a file, which is there only when the command has ended well."""
    partial = file.with_suffix(".partial")
    with partial.open("w") as out:
        slimectl(arguments, out)
    partial.rename(file)


def slimectl(arguments: tuple[str, ...], out: Any) -> None:
    """Raises SystemExit with the command and its last words if it fails."""
    print(" ".join(("slimectl", *arguments)), file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "slimectl", *arguments]
    done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr[-2000:]}")


def tenths(values: list[float]) -> str:
    """The mean of the first tenth of the values, and of the last."""
    many = max(1, len(values) // 10)
    mean: Callable[[list[float]], float] = statistics.mean
    return f"{mean(values[:many]):.3f} -> {mean(values[-many:]):.3f}"


if __name__ == "__main__":
    main()
