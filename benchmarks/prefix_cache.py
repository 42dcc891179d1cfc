"""Conversations of several turns with the prefix cache of the embedded engine and without it, one thread.

    python benchmarks/prefix_cache.py --model DIR [--dtype bfloat16] [--turns 8] [--siblings 8] [--rounds 1]

Siblings begin with one prompt; each turn is an answer of the model and a tool's reply, random tokens of its own. All
siblings are asked at once, and each asks again when its answer has come. Rounds with and without the cache alternate,
each of a prompt of its own and from an empty cache, so that a machine that slows down slows both. "tokens/s" are tokens
sampled in a CPU-second, "prefill" is how many tokens of prompts were computed, "equal" the share of sampled tokens that
are the same in both.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from transformers import AutoConfig, AutoTokenizer

from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.engines.embedded.engine import EmbeddedEngine, EngineOptions
from slimectl.types import SamplingParams


async def conversation(engine: EmbeddedEngine, prompt: list[int], seed: int, options: argparse.Namespace) -> list[int]:
    """Return the tokens that the model sampled in all turns."""
    draw = random.Random(seed)
    tokens, sampled = list(prompt), list[int]()
    for turn in range(options.turns):
        params = SamplingParams(max_tokens=options.answer, ignore_eos=True, seed=100 * seed + turn)
        answer = await engine.generate(tokens, params=params)
        sampled += answer.tokens
        # Replies do not depend on the answers: both sides have equal work, whatever they sample.
        tokens += answer.tokens + [draw.randrange(engine.vocabulary) for _ in range(options.reply)]
    return sampled


def episode(engine: EmbeddedEngine, number: int, options: argparse.Namespace) -> tuple[float, int, list[int]]:
    """Run the conversations of all siblings; returns (CPU-seconds, tokens computed of prompts, tokens sampled)."""
    draw = random.Random(number)
    prompt = [draw.randrange(engine.vocabulary) for _ in range(options.prompt)]

    async def gathered() -> list[list[int]]:
        talks = [conversation(engine, prompt, number + sibling, options) for sibling in range(options.siblings)]
        return await asyncio.gather(*talks)

    engine.forget_prefixes()
    computed, start = engine.stats.prefill_tokens, time.process_time()
    sampled = asyncio.run(gathered())
    seconds = time.process_time() - start
    return seconds, engine.stats.prefill_tokens - computed, [token for tokens in sampled for token in tokens]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the first prompt")
    parser.add_argument("--answer", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--reply", type=int, default=96, help="tokens that a tool replies")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--siblings", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--gib", type=float, default=1.0, help="engine.prefix_cache_gib")
    options = parser.parse_args()
    torch.set_num_threads(1)

    context = options.prompt + options.turns * (options.answer + options.reply)
    engines = {}
    for name, gib in (("with", options.gib), ("without", 0.0)):
        config, tokenizer = AutoConfig.from_pretrained(options.model), AutoTokenizer.from_pretrained(options.model)
        dtype = getattr(torch, options.dtype)
        engines[name] = EmbeddedEngine(
            config, tokenizer, EngineOptions(dtype=dtype, max_context=context, prefix_cache_gib=gib)
        )
        engines[name].load_weights(HFCheckpoint().read(options.model), version="0")
    rates: dict[str, list[float]] = {name: [] for name in engines}
    print(f"{options.model.name}, {options.dtype}: {options.turns} turns x {options.siblings} siblings")
    print(f"{'round':>6} {'cache':>8} {'CPU s':>8} {'tokens/s':>9} {'prefill':>8} {'equal':>6}")
    for number in range(options.rounds):
        reference: list[int] = []
        for name, engine in engines.items():
            seconds, computed, sampled = episode(engine, 1000 * number, options)
            rates[name].append(len(sampled) / seconds)
            reference = reference or sampled
            equal = statistics.mean(one == other for one, other in zip(sampled, reference, strict=True))
            row = f"{number:>6} {name:>8} {seconds:8.2f} {rates[name][-1]:9.1f} {computed:8} {equal:6.1%}"
            print(row, flush=True)
    ratio = statistics.median(a / b for a, b in zip(rates["with"], rates["without"], strict=True))
    print(f"ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
