"""What a vision model learns of colours and shapes from reward alone: held-out accuracy over seeds.

    pip install --no-deps easy-vqa
    python benchmarks/vision_learning.py --out FOLDER [--seeds 1,2,3] [--rounds 300] [--shape-rounds 200]

The task is easy-VQA (MIT licence): images of 64 by 64 pixels with one shape, of which a question asks the colour (one
of eight) or the shape (one of three). Questions with the answers yes and no are left out. The model is the card
`tiny-vl` (`--card`) of random weights. A supervised warm-up teaches it the words alone: its labels are drawn at random
among the colours for a question after a colour, among the shapes for one after a shape, so that no image tells the
label. What the model knows of images afterwards it has from the rewards of its own answers: 32 questions with 16
answers a round, a reward of 1 for the label and 0 for all else. Then a second run goes on from there with the questions
after shapes alone, which are learnt much more slowly, at a constant rate; colours are forgotten in it. The held-out
images are those of the package's test set. A seed takes about 15 minutes of CPU time. A run that FOLDER has already is
continued from its last checkpoint (one every 50 rounds, and where it was interrupted), or only reported.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

SHAPES = ("circle", "rectangle", "triangle")
COLORS = ("black", "blue", "brown", "gray", "green", "red", "teal", "yellow")
HELD_OUT, WARM_UP = 256, 4096
"""Held-out questions after colours, and as many after shapes; questions of the warm-up."""
# Maximum-likelihood RL keeps rare words alive: with grpo one colour took over within 15 rounds, of 8 answers at 5e-4.
SETTINGS = """
[model]
card = "{card}"

[rollout]
data = ["train.jsonl"]
shuffle = true
n_samples_per_prompt = 16
max_response_len = 12

[engine]
max_running_requests = 512

[score]
rm_type = "exact"

[sft_warmup]
data = ["words.jsonl"]
target_accuracy = 0.2   # words are known, and a fifth of them is the random label
check_interval = 10
max_steps = 300
batch_size = 64
lr = 1e-3

[algorithm]
name = "maxrl"

[train]
freeze_vision_tower = false
lr = 5e-4
lr_warmup_iters = 20
lr_decay_style = "linear"

[run]
rollout_batch_size = 32
save_interval = 50

[eval]
interval = 50
data = {{ colors = "colors.jsonl", shapes = "shapes.jsonl" }}
"""

Accuracies = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", default="1,2,3", type=lambda text: [int(seed) for seed in text.split(",")])
    parser.add_argument("--rounds", default=300, type=int)
    parser.add_argument("--shape-rounds", default=200, type=int)
    parser.add_argument("--card", default="tiny-vl")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    os.chdir(args.out)
    if not Path("slimectl.toml").exists():
        write_task(args.card)
    print(f"chance: colors {1 / len(COLORS):.3f}, shapes {1 / len(SHAPES):.3f}")
    for seed in args.seeds:
        stages = ((f"seed-{seed}", [], args.rounds), (f"shapes-{seed}", shapes_alone(seed), args.shape_rounds))
        for name, options, rounds in stages:
            evaluations = learn(name, ["--seed", str(seed), *options], rounds)
            figures = [f"{kind} {' '.join(f'{each[kind]:.3f}' for each in evaluations)}" for kind in evaluations[0]]
            usage = resource.getrusage(resource.RUSAGE_CHILDREN)
            print(f"{name}: {', '.join(figures)}; CPU {usage.ru_utime + usage.ru_stime:.0f} s so far", flush=True)


def write_task(card: str) -> None:
    """Write the settings, the questions to learn from, those of the warm-up and the held-out ones."""
    generator = random.Random(0)
    train, test = list(questions("train")), list(questions("test"))
    generator.shuffle(train)
    generator.shuffle(test)
    write_lines(Path("train.jsonl"), train)
    write_lines(Path("shapes-train.jsonl"), (row for row in train if row["label"] in SHAPES))
    words = ({**row, "label": generator.choice(answers(row["label"]))} for row in train[:WARM_UP])
    write_lines(Path("words.jsonl"), words)
    for name, labels in (("colors", COLORS), ("shapes", SHAPES)):
        write_lines(Path(f"{name}.jsonl"), [row for row in test if row["label"] in labels][:HELD_OUT])
    Path("slimectl.toml").write_text(SETTINGS.format(card=card))


def questions(split: str) -> Iterator[dict[str, Any]]:
    """Yield the prompts of a split that ask for a colour or a shape."""
    try:
        import easy_vqa
    except ImportError:
        raise SystemExit("easy-VQA is not installed; run: pip install --no-deps easy-vqa") from None

    images = getattr(easy_vqa, f"get_{split}_image_paths")()
    for question, answer, image in zip(*getattr(easy_vqa, f"get_{split}_questions")(), strict=True):
        if answer not in ("yes", "no"):
            yield {"prompt": f"<image>{question}", "images": [images[image]], "label": answer}


def answers(label: str) -> tuple[str, ...]:
    return COLORS if label in COLORS else SHAPES


def shapes_alone(seed: int) -> list[str]:
    """Return the options of the run that goes on from a seed's model with the questions after shapes."""
    start = f"runs/seed-{seed}/latest/policy"
    settings = [
        f"model.path={start}",
        "model.card=none",
        "sft_warmup.data=",
        'rollout.data=["shapes-train.jsonl"]',
        "train.lr_decay_style=constant",
    ]
    return [word for setting in settings for word in ("-s", setting)]


def learn(name: str, options: list[str], rounds: int) -> list[Accuracies]:
    """Return the held-out accuracies of a run's model, before it and after every 50 of so many rounds."""
    run = Path(f"runs/{name}")
    if not (run / f"step_{rounds:06d}").exists():
        begin = ["--resume", str(run)] if run.exists() else ["-c", "slimectl.toml", "--name", name, *options]
        command = [sys.executable, "-m", "slimectl", "run", *begin, "-s", f"run.num_rollout={rounds}"]
        if subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
            raise SystemExit(f"{name}: {' '.join(command)} failed")
    metrics = [json.loads(line)["metrics"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {kind: values[f"eval/{kind}_accuracy"] for kind in ("colors", "shapes")}
        for values in metrics
        if "eval/colors_accuracy" in values
    ]


def write_lines(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


if __name__ == "__main__":
    main()
