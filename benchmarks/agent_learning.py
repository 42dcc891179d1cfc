"""A program with a tool as the agent: held-out accuracy before and after reinforcement, over seeds.

    python benchmarks/agent_learning.py --out FOLDER [--seeds 1,2,3] [--rounds 40]

The program is examples/command_agent.py, unmodified: the policy may write `<calc>47*38</calc>`, reads the result as the
next message, and is right when its last answer has it. The model is the card `tiny` of random weights, shown so many
chats that it solves a fifth of the tasks; then it learns from the program's reward alone, 16 tasks with 8 attempts a
round. A fifth of the tasks is held out by the numbers in them. What FOLDER has already is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

AGENT = Path(__file__).resolve().parents[1] / "examples" / "command_agent.py"
TASKS, ATTEMPTS, HELD_OUT, BATCH = 16, 8, 256, 32
LIMITS = [
    "-s",
    "rollout.max_response_len=100",
    "-s",
    "rollout.agent_max_turns=3",
    "-s",
    "engine.max_running_requests=128",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", default="1,2,3", type=lambda text: [int(seed) for seed in text.split(",")])
    parser.add_argument("--rounds", default=40, type=int)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    os.chdir(args.out)
    gains = []
    for seed in args.seeds:
        before, after = learn(seed, args.rounds)
        gains.append(after - before)
        print(f"seed {seed}: {before:.3f} -> {after:.3f}", flush=True)
    print(f"mean gain {statistics.mean(gains):+.3f}")


def learn(seed: int, rounds: int) -> tuple[float, float]:
    """Return the held-out accuracy of a seed's model before and after so many rounds."""
    train, held_out = Path(f"tasks-{seed}.jsonl"), Path("held-out.jsonl")
    write_lines(train, (task(*numbers) for numbers in draw(seed, rounds * TASKS)))
    write_lines(held_out, (task(*numbers) for numbers in draw(0, HELD_OUT, held_out=True)))
    start, before = next(pair for pair in demonstrated(seed, held_out) if pair[1] >= 0.2)
    name = f"agent-{seed}"
    if not Path(f"runs/{name}/latest").exists():
        budget = ["-s", f"run.num_rollout={rounds}", "-s", f"run.rollout_batch_size={TASKS}"]
        budget += ["-s", f"rollout.n_samples_per_prompt={ATTEMPTS}"]
        learning = ["-s", "train.lr=3e-4", "-s", "train.lr_decay_style=linear", "--seed", str(seed)]
        sampled = ["--model", str(start), "--data", str(train), "--name", name]
        slimectl("run", *sampled, *agent(), *budget, *learning, *LIMITS)
    return before, accuracy(Path(f"runs/{name}/latest"), held_out, Path(f"after-{seed}.json"))


def demonstrated(seed: int, held_out: Path) -> Iterator[tuple[Path, float]]:
    """Yield models that have seen more and more chats with calls of the calculator, and their held-out accuracy."""
    start = Path(f"random-{seed}")
    if not start.exists():
        slimectl("models", "create", "tiny", str(start), "--seed", str(seed))
    for count in range(4608, 10_000, 256):
        model, chats = Path(f"start-{seed}-{count}"), Path(f"chats-{seed}-{count}.jsonl")
        if not model.exists():
            write_lines(chats, (chat(*numbers) for numbers in draw(100 + seed, count)))
            batch = ["-s", f"train.global_batch_size={BATCH}", "--lr", "1e-3"]
            slimectl("train", str(chats), "--algorithm", "sft", "--model", str(start), "--save", str(model), *batch)
        yield model, accuracy(model, held_out, Path(f"before-{seed}-{count}.json"))


def draw(seed: int, count: int, *, held_out: bool = False) -> Iterator[tuple[str, int]]:
    """Yield terms of two numbers of two digits, and their values."""
    generator = random.Random(seed)
    while count:
        a, b, operator = generator.randrange(10, 100), generator.randrange(10, 100), generator.choice("+-*")
        if ((7 * a + b) % 5 == 0) == held_out:
            count -= 1
            yield f"{a}{operator}{b}", {"+": a + b, "-": a - b, "*": a * b}[operator]


def task(term: str, value: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": term}], "label": str(value)}


def chat(term: str, value: int) -> dict[str, Any]:
    turns = [("user", term), ("assistant", f"<calc>{term}</calc>"), ("user", str(value)), ("assistant", str(value))]
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def agent() -> list[str]:
    return ["--agent", shlex.join([sys.executable, "-S", "-E", str(AGENT)])]


def accuracy(model: Path, tasks: Path, kept: Path) -> float:
    """Return the share of held-out tasks that the agent solves, sampled once each at temperature 1."""
    if not kept.exists():
        limits = [*LIMITS, "-s", "eval.max_response_len=100"]
        output = slimectl("eval", "--model", str(model), "--data", f"held_out={tasks}", "-n", "1", *agent(), *limits)
        kept.write_text(output)
    report = json.loads(kept.read_text().splitlines()[0])
    return float(report.get("metrics", report)["eval/held_out_accuracy"])


def write_lines(file: Path, rows: Iterator[dict[str, Any]]) -> None:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def slimectl(*arguments: str) -> str:
    """Run a command and return its stdout. Raises SystemExit with its last words if it fails."""
    print(" ".join(("slimectl", *arguments)), file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "slimectl", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    main()
