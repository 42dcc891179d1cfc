"""The embedded engine behind HTTP beside the same engine in process: tokens a second, the same weights and work.

    python benchmarks/serve.py --model DIR [--dtype bfloat16] [--rounds 5] [--cases 1,8,32]

A case is that many requests at once: prompts of 64 tokens, answers of 64, temperature 1, with log-probabilities.
`serve` runs in a process of its own; answers come whole, or streamed in chunks of 8 tokens or 1, only what is new (as
a trainer's client asks). Rounds of the four alternate, so that a machine that slows down slows all; printed
are medians of tokens a second of wall time, the medians of the ratios to the neighbouring round in process, and the
same for tokens a CPU-second of the process that has the engine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import aiohttp
import torch
from transformers import AutoConfig, AutoTokenizer

from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.engines.embedded.engine import EmbeddedEngine, EngineOptions
from slimectl.types import SamplingParams

LENGTH = 64
Work = list[list[int]]


async def in_process(engine: EmbeddedEngine, prompts: Work) -> list[list[int]]:
    answers = await asyncio.gather(
        *(
            engine.generate(prompt, params=SamplingParams(max_tokens=LENGTH, ignore_eos=True, seed=i))
            for i, prompt in enumerate(prompts)
        )
    )
    return [answer.tokens for answer in answers]


async def over_http(url: str, prompts: Work, *, stream: int) -> list[list[int]]:
    async def asked(session: aiohttp.ClientSession, i: int, prompt: list[int]) -> list[int]:
        params = {"max_new_tokens": LENGTH, "ignore_eos": True, "sampling_seed": i, "stream_interval": max(1, stream)}
        body = {"input_ids": prompt, "sampling_params": params, "return_logprob": True, "stream": stream > 0}
        async with session.post("/generate", json=body) as response:
            response.raise_for_status()
            if not stream:
                return list((await response.json())["output_ids"])
            tokens: list[int] = []
            async for line in response.content:
                if line.startswith(b"data: {"):
                    tokens += json.loads(line[6:])["output_ids"]
            return tokens

    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as session:
        return await asyncio.gather(*(asked(session, i, prompt) for i, prompt in enumerate(prompts)))


def cpu_seconds(pid: int) -> float:
    """Of all threads of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def timed(run: Any, pid: int) -> tuple[float, float]:
    """Tokens a second, and a CPU-second of `pid`."""
    busy, begun = cpu_seconds(pid), time.perf_counter()
    answers = asyncio.run(run())
    seconds, busy = time.perf_counter() - begun, cpu_seconds(pid) - busy
    assert all(len(answer) == LENGTH for answer in answers)
    return LENGTH * len(answers) / seconds, LENGTH * len(answers) / busy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", default="1,8,32")
    options = parser.parse_args()
    torch.set_num_threads(1)

    config = AutoConfig.from_pretrained(options.model)
    dtype = getattr(torch, options.dtype)
    engine = EmbeddedEngine(config, AutoTokenizer.from_pretrained(options.model), EngineOptions(dtype=dtype))
    engine.load_weights(HFCheckpoint().read(options.model), version="0")
    command = [sys.executable, "-m", "slimectl", "serve", "--model", str(options.model), "--port", "0", "--with-parent"]
    command += ["--incremental-streaming-output", "-s", f"engine.dtype={options.dtype}"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        url = server.stderr.readline().split(": ")[0]
        print(f"{options.model.name}, {options.dtype}; tokens a second of wall time, of the engine's CPU time (ratios)")
        print(f"{'case':>5} {'in process':>16} {'serve: whole':>30} {'streamed by 8':>30} {'by 1':>30}")
        for case in map(int, options.cases.split(",")):
            draw = random.Random(0)
            prompts = [[draw.randrange(config.vocab_size) for _ in range(LENGTH)] for _ in range(case)]
            ways = {
                "in process": (lambda p=prompts: in_process(engine, p), os.getpid()),
                "whole": (lambda p=prompts: over_http(url, p, stream=0), server.pid),
                "by 8": (lambda p=prompts: over_http(url, p, stream=8), server.pid),
                "by 1": (lambda p=prompts: over_http(url, p, stream=1), server.pid),
            }
            found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
            for repeat in range(options.rounds + 1):
                for way, (run, pid) in ways.items():
                    rates = timed(run, pid)
                    if repeat:  # the first warms up
                        found[way].append(rates)
            print(f"{case:5}", *(told(found, way) for way in ways), flush=True)
    finally:
        server.terminate()
        server.wait()


def told(found: dict[str, list[tuple[float, float]]], way: str) -> str:
    own, base = found[way], found["in process"]
    wall, cpu = (statistics.median(rates[i] for rates in own) for i in (0, 1))
    if way == "in process":
        return f"{wall:8.0f} {cpu:7.0f}"
    ratios = [statistics.median(a[i] / b[i] for a, b in zip(own, base, strict=True)) for i in (0, 1)]
    return f"{wall:10.0f} ({ratios[0]:4.2f}) {cpu:8.0f} ({ratios[1]:4.2f})"


if __name__ == "__main__":
    main()
