"""Hostile model folders through `convert`, `rollout`, `train`, `eval` and `inspect`: one line, bounded, nothing leaked.

    python benchmarks/reliability/model_folders.py --seed 1 [--count 120]

Each attack takes a genuine folder (a small model) and spoils it in one or two ways drawn from the seed: files that
are none, links out of the folder, nonsense in config.json and beside it, damaged weights, tokenizers and templates, a
flipped byte under a manifest, code that travels with the model. A file "secret" beside the folder must never turn up in
an output, and a proof file, which code of the model would make, must stay absent.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import warm
from campaign import Campaign
from spoiled_configs import of_code, of_configs, of_tokenizers
from spoiled_files import Attack, of_files, of_manifests, of_weights

SECRET = "top secret"
MAKERS = (of_files, of_configs, of_code, of_tokenizers, of_weights, of_manifests)


def attacks(draw: random.Random) -> Iterator[Attack]:
    """Every kind in turn, in an order of the seed; one in four has a second attack on top."""
    kinds = [list(make(draw)) for make in MAKERS]
    for kind in kinds:
        draw.shuffle(kind)
    every = [attack for kind in kinds for attack in kind]
    while any(kinds):
        for kind in [kind for kind in kinds if kind]:
            attack = kind.pop()
            if draw.random() < 0.25:
                other = draw.choice(every)
                attack = Attack(attack.category, f"{attack.title} + {other.title}", both(attack, other))
            yield attack


def both(first: Attack, second: Attack) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        for attack in (first, second):
            try:
                attack.spoil(folder)
            except (OSError, ValueError, AttributeError, TypeError):
                continue  # the first has left nothing that the second could spoil

    return spoil


def prepared(home: Path) -> tuple[Path, Path]:
    """A genuine folder with a manifest, and scored samples of it."""
    made, genuine = home / "made", home / "genuine"
    (home / "prompts.jsonl").write_text(
        '{"prompt": "1+1=", "label": "2"}\n{"prompt": [{"role": "user", "content": "x"}]}\n'
    )
    (home / "rm.py").write_text("def reward(sample):\n    return float(sample.index % 2)\n")
    for command in (
        ["models", "create", "tiny", str(made)],
        ["convert", str(made), str(genuine), "--logits", "0"],
        [
            "rollout",
            "--model",
            str(genuine),
            "--data",
            "prompts.jsonl",
            "--out",
            "samples.jsonl",
            "-n",
            "2",
            "--max-response-len",
            "4",
        ],
        [
            "score",
            "samples.jsonl",
            "-s",
            "score.custom_rm_path=rm.py:reward",
            "--workers",
            "0",
            "--out",
            "scored.jsonl",
        ],
    ):
        outcome = warm.run(command, cwd=home)
        assert outcome.code == 0, outcome.stderr
    return genuine, home / "scored.jsonl"


def judge(case: Path, attack: Attack, chosen: list[str]) -> str:
    """What went wrong, in a line; empty if nothing did."""
    model = str(case / "model")
    short, shorter = ["--max-response-len", "2"], ["-s", "eval.max_response_len=2"]
    commands = {
        "convert": ["convert", model, "out", "--logits", "4"],
        "inspect": ["inspect", model],
        "rollout": ["rollout", "--model", model, "--data", "../prompts.jsonl", "--out", "s.jsonl", *short],
        "eval": ["eval", "--model", model, "--data", "a=../prompts.jsonl@[0:1]", "--rm-type", "exact", *shorter],
        "train": ["train", "../scored.jsonl", "--model", model, "--save", "saved", "-s", "train.backend=fsdp"],
    }  # fmt: skip
    problems = []
    for name in chosen:
        outcome = warm.run(commands[name], cwd=case)
        if problem := outcome.problem(refused=name in attack.refused):
            problems.append(f"{name}: {problem}")
    if (case / "proof").exists() or (case.parent / "proof").exists():
        problems.append("THE PROOF FILE IS THERE")
    for folder in ("out", "saved"):
        if any(SECRET.encode() in path.read_bytes() for path in (case / folder).rglob("*") if path.is_file()):
            problems.append(f"the secret is in {folder}")
    return "; ".join(problems)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=120)
    parser.add_argument("--commands", type=int, default=3, help="Of the five commands, drawn for each attack")
    options = parser.parse_args()
    warm.load()
    draw = random.Random(options.seed)
    campaign = Campaign("hostile model folders", options.seed)
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        genuine, _ = prepared(home)
        for number, attack in enumerate(attacks(draw)):
            if number == options.count:
                break
            case = home / f"case-{number}"
            shutil.copytree(genuine, case / "model")
            (case / "secret").write_text(SECRET)
            if "manifest" not in attack.category:
                (case / "model" / "manifest.json").unlink()
            attack.spoil(case / "model")
            chosen = draw.sample(["convert", "inspect", "rollout", "eval", "train"], options.commands)
            problem = judge(case, attack, chosen)
            campaign.record(
                attack.category, f"{attack.title} ({', '.join(chosen)})", survived=not problem, observation=problem
            )
            print(
                f"{number + 1:4} {'ok' if not problem else 'FAILED'} {attack.title[:100]!r}",
                file=sys.stderr,
                flush=True,
            )
            shutil.rmtree(case)
    return campaign.finish()


if __name__ == "__main__":
    raise SystemExit(main())
