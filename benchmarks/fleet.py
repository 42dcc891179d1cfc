"""Who samples: the engine in this process, one server, two servers, SGLang; the same prompts through the same call.

    python benchmarks/fleet.py --model DIR [--dtype bfloat16] [--rounds 5] [--cases 1,8,32] [--sglang PYTHON]

A case is that many requests at once: prompts of 64 tokens, answers of 64, temperature 1, with log-probabilities, each
prompt other tokens in every round, so that no prefix cache helps. Engines are those that settings make, every one with
one thread. Rounds of all of them alternate; printed are medians of tokens a second of wall time and of tokens a
CPU-second of all processes, the asking one included.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import psutil
import torch

from slimectl.runtime import builders
from slimectl.settings.layers import Layer
from slimectl.settings.loading import resolve
from slimectl.types import SamplingParams

LENGTH = 64


def settings(dtype: str, **sections: Any) -> Any:
    engine = {"dtype": dtype, "device": "cpu", "use_fault_tolerance": False} | sections.pop("engine", {})
    return resolve([Layer("benchmark", {"engine": engine, "rollout": {"max_context_len": 512}} | sections)]).settings


def started(options: argparse.Namespace, text: Any, closing: ExitStack) -> dict[str, Any]:
    """Every engine by its name; servers end with `closing`."""
    made: dict[str, Any] = {"in process": builders.engine(settings(options.dtype), options.model, text)}
    two = settings(options.dtype, engine={"num_engines": 2})
    urls = servers(two, options, closing)
    made["1 serve"] = builders.client(two, options.model, text, urls[:1], urls[:1])
    made["2 serve"] = builders.client(two, options.model, text, urls, urls)
    if options.sglang:
        one = settings(options.dtype, engine={"backend": "sglang"}, sglang={"python": options.sglang})
        urls = servers(one, options, closing)
        made["1 sglang"] = builders.client(one, options.model, text, urls, urls)
    for engine in made.values():
        closing.callback(lambda engine=engine: asyncio.run(engine.close()))
    return made


def servers(given: Any, options: argparse.Namespace, closing: ExitStack) -> list[str]:
    folder = Path(closing.enter_context(tempfile.TemporaryDirectory()))
    fleet = builders.server_pool(given, options.model, executor=builders.executor(given), folder=folder, waiting=False)
    closing.callback(fleet.close)
    return fleet.urls


async def answered(engine: Any, prompts: list[list[int]]) -> int:
    asked = [SamplingParams(max_tokens=LENGTH, ignore_eos=True, seed=i) for i in range(len(prompts))]
    answers = await asyncio.gather(*(engine.generate(p, params=q) for p, q in zip(prompts, asked, strict=True)))
    return sum(len(answer.tokens) for answer in answers)


def cpu_seconds() -> float:
    """Of this process and all below it."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def timed(engine: Any, prompts: list[list[int]]) -> tuple[float, float]:
    busy, begun = cpu_seconds(), time.perf_counter()
    tokens = asyncio.run(answered(engine, prompts))
    seconds, busy = time.perf_counter() - begun, cpu_seconds() - busy
    assert tokens == LENGTH * len(prompts)
    return tokens / seconds, tokens / busy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", default="1,8,32")
    parser.add_argument("--sglang", help="Python that SGLang is installed in")
    options = parser.parse_args()
    torch.set_num_threads(1)
    text = builders.tokenizer(options.model)
    draw = random.Random(0)
    with ExitStack() as closing:
        engines = started(options, text, closing)
        print(f"{options.model.name}, {options.dtype}: tokens a second (ratio to in process), tokens a CPU-second")
        for case in map(int, options.cases.split(",")):
            found: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
            for repeat in range(options.rounds + 1):
                for name, engine in engines.items():
                    prompts = [[draw.randrange(len(text)) for _ in range(LENGTH)] for _ in range(case)]
                    rates = timed(engine, prompts)
                    if repeat:  # the first warms up
                        found[name].append(rates)
            print(f"{case:4}", *(f"  {name}: {told(found, name)}" for name in engines), flush=True)


def told(found: dict[str, list[tuple[float, float]]], name: str) -> str:
    own, base = found[name], found["in process"]
    ratio = statistics.median(a[0] / b[0] for a, b in zip(own, base, strict=True))
    wall, cpu = (statistics.median(rates[i] for rates in own) for i in (0, 1))
    return f"{wall:.0f} ({ratio:.2f}), {cpu:.0f}"


if __name__ == "__main__":
    main()
