"""CPU seconds of a whole command that does little, warm: what its imports cost.

    python benchmarks/start_up.py [--against OTHER_TREE] [--repeats 5] [--model DIR]

Interleaved: each repeat runs every command once, in this tree and in the other; medians. `python -c pass` and the
imports of pydantic and typer stand beside them, which every command needs; with --model, the time of `rollout` to its
first sample stands beside importing torch and transformers.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

HERE = Path(__file__).resolve().parents[1]


def cpu_seconds(command: Sequence[str], tree: Path, *, head: bool = False) -> float:
    """Run a command to its end, or with `head` to its first line, and return the CPU seconds of its process."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    before = os.times()
    with subprocess.Popen(
        [sys.executable, *command], env=environment, cwd=tree, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        if head:
            if not process.stdout.readline():
                raise SystemExit(f"{' '.join(command)}: printed nothing")
            process.kill()
        else:
            process.stdout.read()
    if not head and process.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}")
    after = os.times()
    return after.children_user - before.children_user + after.children_system - before.children_system


def inputs(folder: Path) -> tuple[Path, Path, Path]:
    """Write ten samples, a folder with the config.json of a card, and two prompts."""
    sample = {"prompt": "2+2=", "label": "4", "response": "4", "tokens": [1, 2], "response_length": 1}
    samples = folder / "samples.jsonl"
    samples.write_text("".join(json.dumps(sample | {"index": i, "group_index": i}) + "\n" for i in range(10)))
    card = subprocess.run(
        [sys.executable, "-m", "slimectl", "models", "show", "qwen3-0.6B", "--json"],
        env={**os.environ, "PYTHONPATH": str(HERE)}, capture_output=True, check=True,
    )  # fmt: skip
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(json.loads(card.stdout)["config"]))
    prompts = folder / "prompts.jsonl"
    prompts.write_text('{"prompt": "One, two,"}\n' * 2)
    return samples, model, prompts


def commands(folder: Path, model: str | None) -> dict[str, tuple[list[str], bool]]:
    """Return every measured command by its title, and whether it is measured to its first line."""
    samples, config, prompts = map(str, inputs(folder))
    slimectl = ["-m", "slimectl"]
    table = {
        "python -c pass": (["-c", "pass"], False),
        "import pydantic, typer": (["-c", "import pydantic, typer"], False),
        "slimectl --help": ([*slimectl, "--help"], False),
        "score of ten lines, exact": ([*slimectl, "score", samples, "--rm-type", "exact"], False),
        "plan --card": ([*slimectl, "plan", "--card", "qwen3-4B", "--gpus", "8"], False),
        "plan --model": ([*slimectl, "plan", "--model", config, "--gpus", "8"], False),
        "models check": ([*slimectl, "models", "check", "qwen3-0.6B", config], False),
        "inspect of ten lines": ([*slimectl, "inspect", samples], False),
    }
    if model is not None:
        first = ["-s", "rollout.rollout_max_response_len=1", "--model", model, "--data", prompts]
        table["import torch, transformers"] = (["-c", "import torch, transformers"], False)
        table["rollout to its first sample"] = ([*slimectl, "rollout", *first], True)
    return table


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--against", type=Path, help="another source tree")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--model", help="model of rollout")
    options = parser.parse_args()
    trees = [HERE, *([options.against.resolve()] if options.against else [])]
    with tempfile.TemporaryDirectory() as folder:
        table = commands(Path(folder), options.model)
        times: dict[str, list[list[float]]] = {title: [[] for _ in trees] for title in table}
        for _ in range(options.repeats):
            for title, (command, head) in table.items():
                for tree, seconds in zip(trees, times[title], strict=True):
                    seconds.append(cpu_seconds(command, tree, head=head))
    print(f"{'CPU seconds, median of ' + str(options.repeats):<32} {'here':>7} {'min':>7}   against")
    for title, seconds in times.items():
        against = "  ".join(f"{median(each):7.2f} {min(each):7.2f}" for each in seconds[1:])
        print(f"{title:<32} {median(seconds[0]):7.2f} {min(seconds[0]):7.2f}   {against}")


if __name__ == "__main__":
    main()
