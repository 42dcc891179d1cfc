"""One measurement of gpu.py, in a process of its own: its arguments are a trial in JSON, its last line the result.

A result has what was measured, or the "failure" in words.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import statistics
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from plan import peak_resident, resident

from slimectl.architectures import cards
from slimectl.architectures.config import with_defaults
from slimectl.architectures.registry import family_of
from slimectl.planner import flops, memory, plan
from slimectl.planner.workload import Run
from slimectl.runtime import builders
from slimectl.settings import Settings
from slimectl.settings.layers import Layer, nested
from slimectl.settings.loading import resolve
from slimectl.types import SamplingParams, TrainingSample

TRAINERS = ("fsdp", "megatron")
PARTS = (*TRAINERS, "engine", "push")
PRODUCT_SIZE = {"cpu": 512, "cuda": 8192}
"""Rows and columns of the matrices whose products are the measure of MFU."""
PRODUCTS = {"cpu": 2, "cuda": 20}
"""Products of one measurement."""

Result = dict[str, Any]


@dataclass(frozen=True)
class Trial:
    """One process: a part of the program on a card; the other fields are options of the command line."""

    card: str
    part: str
    device: str
    tokens: int
    length: int
    packs: int
    recompute: str
    state_dtype: str
    requests: tuple[int, ...]
    prompt: int
    answer: int
    repetitions: int

    @property
    def config(self) -> dict[str, Any]:
        return with_defaults(cards.load(self.card)["config"])

    @property
    def rows(self) -> int:
        """Rows of a training step."""
        return self.packs * max(1, self.tokens // self.length)

    @property
    def step_tokens(self) -> int:
        return self.rows * self.length

    def step_flops(self) -> float:
        """FLOPs of forward and backward of a training step."""
        return self.rows * flops.model_flops(plan.model_of(self.config).all[0]).training(self.length)

    def planned_bytes(self) -> float:
        """Peak memory of a training step by the formulas."""
        model = plan.model_of(self.config)
        run = Run(
            1, policy=self.part, dtype="bfloat16", recompute=self.recompute, seq_len=self.length,  # type: ignore[arg-type]
            max_tokens_per_gpu=self.tokens, device=self.device, state_dtype=self.state_dtype,  # type: ignore[arg-type]
        )  # fmt: skip
        return memory.peak(memory.figures(model.all, run))

    def settings(self) -> Settings:
        values = {
            "train.backend": self.part if self.part == "megatron" else "fsdp",
            "train.device": self.device, "train.dtype": "bfloat16", "train.max_tokens_per_gpu": self.tokens,
            "train.recompute_granularity": None if self.recompute == "none" else self.recompute,
            "train.optimizer_state_dtype": self.state_dtype,
            "engine.device": self.device, "engine.dtype": "bfloat16",
            "engine.max_running_requests": max(self.requests),
        }  # fmt: skip
        return resolve([Layer("gpu", nested(values))]).settings


class RandomWeights:
    """protocols.CheckpointFormat and Weights of a model by its configuration: bfloat16 numbers drawn on the device."""

    def __init__(self, config: dict[str, Any], device: str) -> None:
        links = family_of(config).links(config)
        self.shapes = {name: shape for link in links for name, shape in zip(link.hf, link.shapes, strict=True)}
        self.device, self.scale = device, float(config.get("initializer_range", 0.02))

    def read(self, path: Path) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, self.get(name)) for name in self.shapes)

    def open(self, path: Path) -> RandomWeights:
        return self

    def forms(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        return {name: (shape, torch.bfloat16) for name, shape in self.shapes.items()}

    def get(self, name: str) -> torch.Tensor:
        shape, options = self.shapes[name], {"dtype": torch.bfloat16, "device": self.device}
        if len(shape) == 1:  # norms, and biases
            return torch.full(shape, 0.0 if name.endswith("bias") else 1.0, **options)
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()))
        return torch.randn(shape, generator=generator, **options).mul_(self.scale)


def seconds(act: Callable[[], object], device: str) -> float:
    """Seconds of the GPU from its start to its end, or of this process's CPU."""
    if device == "cpu":
        started = time.process_time()
        act()
        return time.process_time() - started
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    act()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def product_rate(trial: Trial) -> float:
    """FLOP/s of large bfloat16 products, one after the other."""
    size, count = PRODUCT_SIZE[trial.device], PRODUCTS[trial.device]
    left, right = (torch.randn(size, size, device=trial.device).to(torch.bfloat16) for _ in range(2))
    product = torch.empty_like(left)

    def products() -> None:
        for _ in range(count):
            torch.mm(left, right, out=product)

    products()
    taken = statistics.median(seconds(products, trial.device) for _ in range(trial.repetitions))
    return 2.0 * size**3 * count / taken


def random_tokens(draw: random.Random, count: int, vocabulary: int) -> list[int]:
    return [draw.randrange(vocabulary) for _ in range(count)]


def training_rows(trial: Trial) -> list[TrainingSample]:
    """Rows of which `length` tokens are computed, as the last predicts nothing, and every one of these predicts."""
    draw, length, vocabulary = random.Random(0), trial.length, int(trial.config["vocab_size"])
    weights = [1.0 / trial.step_tokens] * length
    return [
        TrainingSample(
            random_tokens(draw, length + 1, vocabulary), length, weights, [draw.choice([-1.0, 1.0])] * length, group=i
        )
        for i in range(trial.rows)
    ]


def new_policy(trial: Trial, folder: Path) -> Any:
    return builders.rank_policy(trial.settings(), folder, RandomWeights(trial.config, trial.device))


def new_engine(trial: Trial, folder: Path) -> Any:
    from slimectl.checkpoints.create import byte_tokenizer

    return builders.engine(trial.settings(), folder, byte_tokenizer(), load=False)


def training(trial: Trial, folder: Path) -> Result:
    from slimectl.algorithms.registry import ALGORITHMS

    rate, rows, algorithm = product_rate(trial), training_rows(trial), trial.settings().algorithm
    start = begin_memory(trial)
    policy = new_policy(trial, folder)
    for row, log_probs in zip(rows, policy.log_probs(rows), strict=True):
        row.old_log_probs = log_probs
    loss, steps = ALGORITHMS[algorithm.name].loss(algorithm, rows), []
    for _ in range(1 + trial.repetitions):
        reports: Result = {}
        backward_s = seconds(lambda: reports.update(policy.forward_backward(rows, loss)), trial.device)  # noqa: B023
        update_s = seconds(lambda: reports.update(policy.optim_step()), trial.device)  # noqa: B023
        steps.append((backward_s + update_s, update_s))
        norm = reports["grad_norm"]
        assert 0 < norm < math.inf, f"gradient norm {norm}: the update was skipped, so its time says nothing"
    step_s, update_s = (statistics.median(times) for times in zip(*steps[1:], strict=True))
    return {"product_rate": rate, "step_s": step_s, "update_s": update_s, "peak_bytes": peak_bytes(trial) - start}


def answer(engine: Any, prompts: list[list[int]], tokens: int) -> None:
    """Answer all prompts at once, each by so many tokens; none has been computed before."""

    async def gathered() -> None:
        params = [SamplingParams(max_tokens=tokens, ignore_eos=True, seed=i) for i in range(len(prompts))]
        answers = [engine.generate(prompt, params=each) for prompt, each in zip(prompts, params, strict=True)]
        completions = await asyncio.gather(*answers)
        assert all(len(completion.tokens) == tokens for completion in completions)

    engine.forget_prefixes()
    asyncio.run(gathered())


def sampling(trial: Trial, folder: Path) -> Result:
    start = begin_memory(trial)
    engine = new_engine(trial, folder)
    engine.load_weights(RandomWeights(trial.config, trial.device).read(folder), version="0")
    draw, vocabulary = random.Random(0), int(trial.config["vocab_size"])

    def prompts(count: int, length: int) -> list[list[int]]:
        return [random_tokens(draw, length, vocabulary) for _ in range(count)]

    def median(batch: list[list[int]], tokens: int) -> float:
        answer(engine, batch, tokens)
        return statistics.median(
            seconds(partial(answer, engine, batch, tokens), trial.device) for _ in range(trial.repetitions)
        )

    batch = prompts(max(1, trial.tokens // trial.length), trial.length)
    result: Result = {"prefill": len(batch) * trial.length / median(batch, 1), "decode": []}
    for count in trial.requests:
        batch = prompts(count, trial.prompt)
        decode_s = median(batch, trial.answer) - median(batch, 1)
        result["decode"].append(count * (trial.answer - 1) / decode_s if decode_s > 0 else None)
    return result | {"peak_bytes": peak_bytes(trial) - start}


def push(trial: Trial, folder: Path) -> Result:
    from slimectl.engines.weight_sync.base import InProcessSync

    start = begin_memory(trial)
    policy, engine = new_policy(trial, folder), new_engine(trial, folder)
    sync = InProcessSync(policy, engine)
    times = [seconds(sync.push, trial.device) for _ in range(1 + trial.repetitions)]
    assert engine.has_weights, "a push left the engine without weights"
    size = 2 * sum(math.prod(shape) for shape in RandomWeights(trial.config, trial.device).shapes.values())
    return {"bytes": size, "push_s": statistics.median(times[1:]), "peak_bytes": peak_bytes(trial) - start}


def begin_memory(trial: Trial) -> int:
    """Reset the peak of memory; returns the bytes in use, which on a CPU are those of the whole process."""
    if trial.device == "cpu":
        Path("/proc/self/clear_refs").write_text("5")
        return resident()
    torch.cuda.init()  # without it torch (2.13) has no memory whose peak could be reset
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def peak_bytes(trial: Trial) -> int:
    return peak_resident() if trial.device == "cpu" else torch.cuda.max_memory_allocated()


MEASURES = {"fsdp": training, "megatron": training, "engine": sampling, "push": push}


def measure(trial: Trial) -> Result:
    """Run a trial in this process; the result of one that fails is its "failure"."""
    if trial.device == "cpu":
        torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(trial.config))
            return MEASURES[trial.part](trial, Path(folder))
    except torch.OutOfMemoryError as error:
        return {"failure": f"does not fit: {first_line(error)}"}
    except Exception as error:
        traceback.print_exc()
        return {"failure": f"failed: {first_line(error)}"}


def first_line(error: Exception) -> str:
    """Return the first line of an error, for a cell of a table."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}".replace("|", "/")


def main() -> None:
    fields = json.loads(sys.argv[1])
    with contextlib.redirect_stdout(sys.stderr):
        result = measure(Trial(**fields | {"requests": tuple(fields["requests"])}))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
