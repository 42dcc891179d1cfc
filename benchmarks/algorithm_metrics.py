"""Trains a small model for two rounds with every algorithm and writes the metrics of each to FOLDER/ALGORITHM.jsonl.

Two revisions compute the same if `diff -r` of their folders is silent: same machine, same libraries, one thread.

    python benchmarks/algorithm_metrics.py before && git switch other && python benchmarks/algorithm_metrics.py after
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from slimectl.checkpoints.create import create_model
from slimectl.settings.algorithm import ALGORITHMS

MODEL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "tie_word_embeddings": True,
}
REWARD = """
def reward(sample):
    answer = sample.tokens[len(sample.tokens) - sample.response_length:]
    return sum(token < 64 for token in answer) / len(answer)
"""
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
EXTRA = {"opd": ["algorithm.opd_teacher_load=model"], "grpo": ["algorithm.kl_loss_coef=0.1", "algorithm.use_tis=true"]}
"""Settings that an algorithm needs, or that reach more of its code."""


def write_inputs(folder: Path) -> None:
    create_model(MODEL, folder / "model", seed=7)
    (folder / "reward.py").write_text(REWARD)
    lines = [{"prompt": f"say {word}", "label": word} for word in WORDS]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    lines = [{"prompt": f"say {word}", "label": word} for word in WORDS]
    (folder / "demonstrations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    lines = [{"prompt": f"say {word}", "chosen": word, "rejected": word[::-1]} for word in WORDS]
    (folder / "preferences.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def command(name: str) -> list[str]:
    settings = ["model.path=model", "train.lr=1e-3", "run.rollout_batch_size=4", f"algorithm.name={name}"]
    settings += EXTRA.get(name, [])
    if name in ("sft", "dpo", "reward_model"):
        source = "demonstrations.jsonl" if name == "sft" else "preferences.jsonl"
        arguments = ["train", source]
    else:
        settings += ["rollout.data=prompts.jsonl", "rollout.n_samples_per_prompt=4", "rollout.max_response_len=12"]
        settings += ["score.custom_rm_path=reward.py:reward", "run.num_rollout=2", "track.plot=false"]
        arguments = ["run", "--name", name]
    return [*arguments, *(part for setting in settings for part in ("-s", setting))]


def main() -> None:
    output = Path(sys.argv[1]).resolve()
    output.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_inputs(folder)
        for name in ALGORITHMS:
            result = subprocess.run(
                [sys.executable, "-m", "slimectl", *command(name)],
                cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
            )  # fmt: skip
            if result.returncode:
                sys.exit(f"{name}: {result.stderr}")
            metrics = folder / "runs" / name / "metrics.jsonl"
            text = metrics.read_text() if metrics.exists() else result.stdout
            (output / f"{name}.jsonl").write_text(text)
            print(f"{name}: {len(text.splitlines())} steps", file=sys.stderr)


if __name__ == "__main__":
    main()
