"""How far are trainer and engine apart on a mixture of experts, with routing replay and without?

    python benchmarks/routing_replay.py [--steps 100] [--seeds 1 2 3]

A qwen3_moe of 4 layers with 16 experts, 4 a token, beside a qwen3 of the same size without experts. The trainer is the
FSDP policy in float32. The engine is the embedded one in float32, in bfloat16, and in float32 with its routers moved:
noise on their weights of 0.02 of their deviation stands for kernels that round otherwise. "trained" is after some steps
of supervised learning to spell words backwards.

A line has the engine, mean and maximum of |trainer - engine| over the log-probabilities of all answers' tokens, without
and with train.use_rollout_routing_replay, and the share of (token, layer) pairs that the trainer by itself sends to
another set of experts.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slimectl.checkpoints.create import create_model
from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.data.routed_experts import decoded
from slimectl.engines.embedded.engine import EmbeddedEngine, EngineOptions
from slimectl.policies.fsdp.policy import FsdpPolicy
from slimectl.policies.optimizer import OptimizerOptions
from slimectl.policies.options import TrainerOptions
from slimectl.types import SamplingParams, TokenBatch, TrainingSample

SHAPE: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256, "tie_word_embeddings": True,
    "initializer_range": 0.1,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "experts": {
        "model_type": "qwen3_moe", "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    },
    "dense": {"model_type": "qwen3"},
}  # fmt: skip
ENGINES = {"float32": ("float32", 0.0), "bfloat16": ("bfloat16", 0.0), "float32, routers moved": ("float32", 0.02)}
PROMPTS, ANSWER_TOKENS, WORD_LETTERS = 64, 64, 6


class NegativeLogProb:
    """The loss of supervised learning."""

    needs_entropy = False

    def __call__(self, pack: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        return -(pack.weights_T * pack.logprobs_T).sum(), {}


def word(draw: Random) -> bytes:
    return bytes(draw.choice(b"abcdefghijklmnopqrstuvwxyz") for _ in range(WORD_LETTERS))


def trained(folder: Path, *, steps: int, seed: int) -> None:
    """Teach the model in a folder to spell words backwards; its weights are replaced."""
    draw = Random(seed)
    policy = FsdpPolicy(folder, HFCheckpoint(), TrainerOptions(optimizer=OptimizerOptions(lr=2e-3)))
    for _ in range(steps):
        rows = []
        for _ in range(32):
            letters = word(draw)
            tokens = [*letters, ord("="), *letters[::-1]]
            weights = [1.0 / (32 * WORD_LETTERS)] * WORD_LETTERS
            rows.append(TrainingSample(tokens, WORD_LETTERS, weights))
        loss = policy.forward_backward(rows, NegativeLogProb())["loss"]
        policy.optim_step()
    print(f"  supervised loss after {steps} steps: {loss:.3f} nat a letter")
    HFCheckpoint().write(folder, policy.weights())


def sampled(folder: Path, *, dtype: str, moved: float, seed: int) -> list[TrainingSample]:
    """Answers of an engine with its log-probabilities, and its experts if the model has any."""
    from transformers import AutoConfig, AutoTokenizer

    config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    engine = EmbeddedEngine(config, tokenizer, EngineOptions(dtype=getattr(torch, dtype), reports_experts=True))
    noise = torch.Generator().manual_seed(seed)
    engine.load_weights(
        (
            (name, tensor + moved * tensor.std() * torch.randn(tensor.shape, generator=noise) * ("mlp.gate." in name))
            for name, tensor in HFCheckpoint().read(folder)
        ),
        version="0",
    )
    draw = Random(seed)
    prompts = [[*word(draw), ord("=")] for _ in range(PROMPTS)]

    async def answers() -> list[Any]:
        params = [SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True, seed=i) for i in range(PROMPTS)]
        return await asyncio.gather(*map(lambda p, q: engine.generate(p, params=q), prompts, params))

    return [
        TrainingSample(
            [*prompt, *answer.tokens], len(answer.tokens), [1.0] * len(answer.tokens),
            rollout_log_probs=answer.log_probs, routed_experts=answer.extras.get("routed_experts"),
        )
        for prompt, answer in zip(prompts, asyncio.run(answers()), strict=True)
    ]  # fmt: skip


def differences(folder: Path, rows: Sequence[TrainingSample], *, replay: bool) -> np.ndarray:
    policy = FsdpPolicy(folder, HFCheckpoint(), TrainerOptions(rollout_routing_replay=replay))
    pairs = zip(policy.log_probs(rows), rows, strict=True)
    return np.abs(np.concatenate([np.array(found) - np.array(row.rollout_log_probs) for found, row in pairs]))


def other_experts(folder: Path, rows: Sequence[TrainingSample]) -> float:
    """Share of (token, layer) pairs for which the trainer's own routers choose another set of experts."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    chosen: list[Tensor] = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda module, inputs, output: chosen.append(output[2]))
    shares = []
    for row in rows:
        chosen.clear()
        with torch.no_grad():
            model(torch.tensor([row.tokens[:-1]]))
        assert row.routed_experts is not None
        same_IL = np.sort(torch.stack(chosen, 1).numpy()) == np.sort(decoded(row.routed_experts))
        shares.append(1.0 - same_IL.all(-1).mean())
    return statistics.fmean(shares)


def report(folder: Path, kind: str, *, seed: int) -> None:
    for name, (dtype, moved) in ENGINES.items():
        if moved and kind == "dense":
            continue
        rows = sampled(folder, dtype=dtype, moved=moved, seed=seed)
        free = differences(folder, rows, replay=False)
        line = f"  {name:24} mean {free.mean():.2e} max {free.max():.2e}"
        if kind == "experts":
            replayed = differences(folder, rows, replay=True)
            line += f"   replayed: mean {replayed.mean():.2e} max {replayed.max():.2e}"
            line += f"   other experts {other_experts(folder, rows):.2%}"
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="steps of supervised learning")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="of weights, words and answers")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for seed in options.seeds:
        for kind, config in MODELS.items():
            with tempfile.TemporaryDirectory() as temporary:
                folder = Path(temporary)
                create_model(SHAPE | config, folder, seed=seed)
                print(f"seed {seed}, {kind}, random weights")
                report(folder, kind, seed=seed)
                print(f"seed {seed}, {kind}, trained")
                trained(folder, steps=options.steps, seed=seed)
                report(folder, kind, seed=seed)


if __name__ == "__main__":
    main()
