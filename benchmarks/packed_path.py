"""A training step of fsdp's packed path against its general path (padded batches), in CPU seconds.

    python benchmarks/packed_path.py                                  # 64 rows of 20 to 200 tokens, nothing shared
    python benchmarks/packed_path.py --answers 8 --models qwen3_5     # 8 prompts of up to 80 tokens with 8 answers each

Small random models with the layers of Qwen3.5, Gemma 3, gpt-oss and others. Both paths: one thread, the same rows, one
forward, backward and update with a learning rate of 0, so that gradient norms stay equal. Steps take turns.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.policies.fsdp import build
from slimectl.policies.fsdp.policy import FsdpPolicy
from slimectl.policies.optimizer import OptimizerOptions
from slimectl.policies.options import TrainerOptions
from slimectl.types import TrainingSample

SHAPE = {
    "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512, "num_local_experts": 8,
    "num_experts_per_tok": 2, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2, "num_hidden_layers": 8,
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3_5": ("qwen3_5_text", DELTA),
    "gemma3": ("gemma3_text", {"sliding_window": 64}),
    "gpt_oss": ("gpt_oss", {"sliding_window": 64, "intermediate_size": 256}),
    "lfm2": ("lfm2", {"layer_types": (["conv"] * 3 + ["full_attention"]) * 2}),
}


class Loss:
    needs_entropy = False

    def __call__(self, pack: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return -(pack.weights_T * pack.logprobs_T).sum(), {}


def drawn_rows(count: int, answers: int) -> list[TrainingSample]:
    """Return `count` rows of 20 to 200 tokens. `answers` rows have the first two fifths in common."""
    draw = random.Random(0)
    rows: list[TrainingSample] = []
    for group in range(count // answers):
        lengths = [draw.randint(20, 200) for _ in range(answers)]
        shared = [draw.randrange(4096) for _ in range(min(lengths) * 2 // 5)]
        for length in lengths:
            tokens = shared + [draw.randrange(4096) for _ in range(length - len(shared))]
            response = length - len(shared)
            rows.append(TrainingSample(tokens, response, [1e-3] * response, group=group))
    return rows


def new_policy(folder: Path, options: TrainerOptions, *, packed: bool) -> FsdpPolicy:
    unsupported = build._unsupported
    if not packed:
        build._unsupported = lambda hf: "is measured here"
    try:
        return FsdpPolicy(folder, HFCheckpoint(), options)
    finally:
        build._unsupported = unsupported


def step(policy: FsdpPolicy, rows: list[TrainingSample]) -> tuple[float, float]:
    """Return the CPU seconds and the gradient norm of a step."""
    start = time.process_time()
    policy.forward_backward(rows, Loss())
    norm = policy.optim_step()["grad_norm"]
    return time.process_time() - start, norm


def measure(name: str, options: argparse.Namespace) -> None:
    model_type, config = MODELS[name]
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        hf = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(SHAPE | config)), dtype=torch.float32)
        hf.save_pretrained(folder)
        trainer = TrainerOptions(
            optimizer=OptimizerOptions(lr=0.0), max_tokens_per_pack=options.max_tokens, dtype=options.dtype
        )
        packed, padded = (new_policy(folder, trainer, packed=packed) for packed in (True, False))
    rows = drawn_rows(options.rows, options.answers)
    seconds: dict[str, list[float]] = {"packed": [], "padded": []}
    for i in range(options.rounds + 1):
        (a, norm), (b, other) = step(packed, rows), step(padded, rows)
        assert abs(norm - other) <= (2e-2 if options.dtype == "bfloat16" else 1e-4) * norm, (norm, other)
        if i:  # the first builds kernels and caches
            seconds["packed"].append(a)
            seconds["padded"].append(b)
    ratio = statistics.median(b / a for a, b in zip(*seconds.values(), strict=True))
    medians = {side: f"{statistics.median(values):.2f} s" for side, values in seconds.items()}
    print(f"{name}: packed {medians['packed']}, general {medians['padded']}, {ratio:.2f} times", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--answers", type=int, default=1, help="rows with a common prompt")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=2048)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.models:
        measure(name, options)


if __name__ == "__main__":
    main()
