"""The engine in this process beside transformers' `generate` or vLLM: tokens a CPU-second, one thread, the same work.

    python benchmarks/engine.py --model DIR [--dtype bf16] [--rounds 5] [--cases 1,32,grpo] [--backend transformers]
    python benchmarks/engine.py --model DIR --against vllm --vllm-python PATH [--vllm-mode eager]

Rounds of the two alternate, so that a machine that slows down slows both; printed are medians, and the median of the
ratios of neighbouring rounds. Both sample at temperature 1 and never stop early. Cases: a number is that many prompts
of 64 tokens with answers of 64, all at once; `grpo` is 8 prompts of 16 to 128 tokens with 8 answers each whose lengths
are log-normal (median 24, sigma 0.8, at most 128); `short` is 64 prompts of 6 to 14 tokens with 8 answers of 6 to 14.
`generate` gets all rows at once, padded, and runs until the longest is done; only tokens asked for are counted. "of
GEMM" is the share of the product rate that the engine reaches: two operations for each parameter and token, tokens of
prompts (shared ones once) included.
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import json
import os
import random
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.engines.embedded.engine import EmbeddedEngine, EngineOptions
from slimectl.engines.transformers.model import TransformersModel
from slimectl.plugins.garbage import frozen_objects
from slimectl.types import SamplingParams

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
Work = list[tuple[list[int], int]]  # prompt, tokens of answer


def work(case: str, vocabulary: int) -> Work:
    """The requests of a case, the same every time."""
    draw = random.Random(0)

    def prompt(length: int) -> list[int]:
        return [draw.randrange(vocabulary) for _ in range(length)]

    if case == "grpo":
        prompts = [prompt(draw.randint(16, 128)) for _ in range(8)]
        return [(each, min(128, max(1, round(24 * draw.lognormvariate(0, 0.8))))) for each in prompts for _ in range(8)]
    if case == "short":
        prompts = [prompt(draw.randint(6, 14)) for _ in range(64)]
        return [(each, draw.randint(6, 14)) for each in prompts for _ in range(8)]
    return [(prompt(64), 64) for _ in range(int(case))]


def engine_run(engine: EmbeddedEngine, requests: Work) -> None:
    async def gathered() -> None:
        await asyncio.gather(
            *(
                engine.generate(prompt, params=SamplingParams(max_tokens=count, ignore_eos=True, seed=i))
                for i, (prompt, count) in enumerate(requests)
            )
        )

    engine.forget_prefixes()  # a round computes its prompts, although the one before had the same
    asyncio.run(gathered())


def reference_run(model: Any, requests: Work) -> None:
    longest = max(len(prompt) for prompt, _ in requests)
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt, _ in requests])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt, _ in requests])
    count = max(count for _, count in requests)
    model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=True,
        top_k=0,
        eos_token_id=None,
        pad_token_id=0,
    )


class Vllm:
    """vLLM in a process of its own."""

    def __init__(self, python: str, *arguments: str) -> None:
        script = str(Path(__file__).with_name("vllm_side.py"))
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._process = subprocess.Popen(
            [python, script, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._line()

    def seconds(self, requests: Work) -> float:
        """CPU seconds of a batch."""
        assert self._process.stdin
        self._process.stdin.write(json.dumps(requests) + "\n")
        self._process.stdin.flush()
        answer = self._line()
        assert answer["tokens"] == sum(count for _, count in requests)
        return float(answer["seconds"])

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()

    def _line(self) -> Any:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("vLLM has ended; its reason is above")
        return json.loads(line)


def cpu_seconds(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def machine() -> tuple[float, float, float]:
    """GFLOP/s of one thread's bf16 and fp32 products of 1024 x 1024, and GB/s of reading memory."""
    rates = []
    for dtype in (torch.bfloat16, torch.float32):
        left, right = torch.ones(1024, 1024, dtype=dtype), torch.ones(1024, 1024, dtype=dtype)
        first = cpu_seconds(lambda a=left, b=right: a @ b)  # type: ignore[misc]
        times = 30 if first < 0.1 else 2  # a processor without bfloat16 takes seconds
        best = min(cpu_seconds(lambda a=left, b=right: a @ b) for _ in range(times))  # type: ignore[misc]
        rates.append(2 * 1024**3 / best / 1e9)
    block = torch.ones(64 * 1024**2)
    return rates[0], rates[1], block.nbytes / min(cpu_seconds(block.sum) for _ in range(5)) / 1e9


def transformers_model(config: Any, options: EngineOptions) -> TransformersModel:
    return TransformersModel(config, dtype=options.dtype, device=torch.device(options.device))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--backend", choices=["embedded", "transformers"], default="embedded", help="Forward pass")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", default="1,8,32,grpo,short")
    parser.add_argument("--max-running", type=int, default=64)
    parser.add_argument("--engine-only", action="store_true", help="leave out transformers")
    parser.add_argument("--against", choices=["transformers", "vllm"], default="transformers")
    parser.add_argument("--vllm-python", metavar="PATH", help="Python with vLLM")
    parser.add_argument("--vllm-mode", choices=["eager", "compiled"], default="eager")
    options = parser.parse_args()
    torch.set_num_threads(1)

    with frozen_objects():  # as commands do; vLLM's side does the same
        config = AutoConfig.from_pretrained(options.model)
        tokenizer, dtype = AutoTokenizer.from_pretrained(options.model), DTYPES[options.dtype]
        model = transformers_model if options.backend == "transformers" else None
        engine_options = EngineOptions(dtype=dtype, max_running=options.max_running)
        engine = EmbeddedEngine(config, tokenizer, engine_options, model=model)
        engine.load_weights(HFCheckpoint().read(options.model), version="0")
        reference = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype)
    shapes = {name: parameter.numel() for name, parameter in reference.named_parameters()}
    multiplied = sum(shapes.values()) - (0 if config.tie_word_embeddings else shapes["model.embed_tokens.weight"])

    inner = multiplied - shapes["model.embed_tokens.weight"]  # of a prompt's tokens, only the last meets the head
    bf16, fp32, memory = machine()
    peak = bf16 if options.dtype == "bf16" else fp32
    print(f"machine, one thread: bf16 {bf16:.0f} GFLOP/s, fp32 {fp32:.0f} GFLOP/s, memory {memory:.1f} GB/s")
    print(f"{options.model.name}, {options.dtype}, {multiplied / 1e6:.1f} M parameters in products")
    seconds = other_side(options, reference)
    print(f"{'case':>8} {'engine':>9} {'other':>9} {'ratio':>6} {'of GEMM':>8} {'of memory':>9} {'us/step':>8}")
    for case in options.cases.split(","):
        requests = work(case, config.vocab_size)
        tokens = sum(count for _, count in requests)
        engine_run(engine, requests)
        ours, theirs, step_us = [], [], []
        if seconds is not None:
            seconds(requests)
        for _ in range(options.rounds):
            steps = engine.stats.steps
            ours.append(tokens / cpu_seconds(lambda r=requests: engine_run(engine, r)))  # type: ignore[misc]
            step_us.append(tokens / ours[-1] / (engine.stats.steps - steps) * 1e6)
            if seconds is not None:
                theirs.append(tokens / seconds(requests))
        rate, step = statistics.median(ours), statistics.median(step_us)
        multiplications = multiplied * tokens + inner * sum(map(len, {tuple(prompt): prompt for prompt, _ in requests}))
        used = 2 * multiplications / (tokens / rate) / 1e9 / peak
        read = multiplied * dtype.itemsize / (step / 1e6) / 1e9 / memory
        other = f"{statistics.median(theirs):9.1f}" if theirs else f"{'-':>9}"
        ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True)) if theirs else float("nan")
        print(f"{case:>8} {rate:9.1f} {other} {ratio:6.2f} {used:8.0%} {read:9.0%} {step:8.0f}", flush=True)


def other_side(options: argparse.Namespace, reference: Any) -> Callable[[Work], float] | None:
    """Return the function that runs a batch on the other side and returns its CPU seconds; None without one."""
    if options.engine_only:
        return None
    if options.against == "transformers":
        return lambda requests: cpu_seconds(lambda: reference_run(reference, requests))
    if options.vllm_python is None:
        raise SystemExit("--against vllm: give the Python that has vLLM by --vllm-python")
    vllm = Vllm(
        options.vllm_python, str(options.model.resolve()), options.dtype, str(options.max_running), options.vllm_mode
    )
    atexit.register(vllm.close)
    return vllm.seconds


if __name__ == "__main__":
    main()
