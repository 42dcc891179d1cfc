"""A card on this machine's GPU: MFU and tokens per second of a training step and of the engine, as tables in Markdown.

    python benchmarks/gpu.py                                                  # qwen3-0.6B and qwen3-4B
    python benchmarks/gpu.py --cards qwen3-4B --recompute full --state-dtype bfloat16
    python benchmarks/gpu.py --cards qwen3-0.6B --parts fsdp megatron --length 8192
    python benchmarks/gpu.py --cards tiny --tokens 256 --length 64 --requests 1 8 --prompt 16 --answer 8   # on a CPU

Every row is a process of its own, with one model of random weights that it draws on the device; one that fails, or that
does not fit, says so, and the others go on. Forward and backward are in bfloat16, masters, gradients and (unless
--state-dtype) moments in float32.

A training step is --packs packs of --tokens tokens, rows of --length that share none and of which every token is
trained: GRPO's loss, backward, gradient norm and AdamW. FLOPs are those of `slimectl plan`, recomputation not counted.
"MFU" is their rate over that of large bfloat16 products, which the same process measures just before; "of peak" over
the vendor's, where planner/devices.py knows the GPU. "plan" is the peak memory that `slimectl plan` foresees.

The engine's prefill is --tokens tokens of prompts of --length, each answered by one token. Decoding is the time of
answers of --answer tokens to --prompt tokens less that of answers of one token, by requests at once. A push is the
policy's float32 masters into the engine of the same process, in bfloat16.

Times are medians of --repetitions after one that is not counted: on a GPU between two events, with nothing queued
before the first and after the second; on a CPU CPU seconds of one thread.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import math
import os
import platform
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from plan import ENVIRONMENT, ROOT, peak_resident, resident

from slimectl import builders
from slimectl.architectures import cards
from slimectl.architectures.config import with_defaults
from slimectl.architectures.registry import family_of
from slimectl.planner import flops, memory, plan
from slimectl.planner.devices import peak_flops
from slimectl.planner.workload import GIB, Run
from slimectl.settings import Settings
from slimectl.settings.layers import Layer, nested
from slimectl.settings.loading import resolve
from slimectl.types import SamplingParams, TrainingSample

PARTS = ("fsdp", "megatron", "engine", "push")
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
        return memory.peak(memory.figures(model.parts, model.architecture, run))

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
    from slimectl.weight_sync.base import InProcessSync

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


def run_process(trial: Trial) -> Result:
    environment = {**os.environ, **(ENVIRONMENT if trial.device == "cpu" else {})}
    command = [sys.executable, __file__, "--trial", json.dumps(asdict(trial))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment, check=False)
    return result_of(done.returncode, done.stdout)


def result_of(code: int, stdout: str) -> Result:
    """Return the result that a process printed in its last line; a failure if it ended without one."""
    if code or not stdout.strip():
        return {"failure": f"failed: its process ended with code {code}"}
    result: Result = json.loads(stdout.splitlines()[-1])
    return result


def gib(count: float) -> str:
    return f"{count / GIB:.3g}"


def training_cells(trial: Trial, result: Result, peak: float | None) -> list[str]:
    rate = trial.step_flops() / result["step_s"]
    return [
        f"{result['step_s']:.3g}", f"{result['update_s']:.3g}", f"{trial.step_tokens / result['step_s']:,.0f}",
        f"{rate / 1e12:.3g}", f"{result['product_rate'] / 1e12:.3g}", f"{rate / result['product_rate']:.1%}",
        "unknown" if peak is None else f"{rate / peak:.1%}", gib(result["peak_bytes"]), gib(trial.planned_bytes()),
    ]  # fmt: skip


def engine_cells(trial: Trial, result: Result, peak: float | None) -> list[str]:
    rates = ("too short" if rate is None else f"{rate:,.0f}" for rate in result["decode"])
    return [f"{result['prefill']:,.0f}", *rates, gib(result["peak_bytes"])]


def push_cells(trial: Trial, result: Result, peak: float | None) -> list[str]:
    size, push_s = result["bytes"], result["push_s"]
    return [gib(size), f"{push_s:.3g}", f"{size / push_s / 1e9:.3g}", gib(result["peak_bytes"])]


@dataclass(frozen=True)
class Table:
    """Columns of the trials of some parts, the card and the part first."""

    parts: tuple[str, ...]
    titles: tuple[str, ...]
    cells: Callable[[Trial, Result, float | None], list[str]]


def tables(requests: tuple[int, ...]) -> list[Table]:
    rates = tuple(f"decode tokens/s, {count} at once" for count in requests)
    return [
        Table(
            ("fsdp", "megatron"),
            (
                "step s", "of it update s", "tokens/s", "TFLOP/s", "TFLOP/s of products", "MFU", "of peak", "peak GiB",
                "plan GiB",
            ),
            training_cells,
        ),
        Table(("engine",), ("prefill tokens/s", *rates, "peak GiB"), engine_cells),
        Table(("push",), ("weights GiB", "push s", "GB/s", "peak GiB"), push_cells),
    ]  # fmt: skip


def row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def print_table(table: Table, trials: list[Trial], peak: float | None) -> bool:
    """Print a table, a row as soon as it is measured; returns whether no trial failed, or only for lack of memory."""
    print(row(["card", "part", *table.titles]))
    print(row(["---"] * (2 + len(table.titles))), flush=True)
    succeeded = True
    for trial in trials:
        result = run_process(trial)
        failure = result.get("failure", "")
        succeeded &= not failure.startswith("failed")
        cells = [failure, *[""] * (len(table.titles) - 1)] if failure else table.cells(trial, result, peak)
        if failure and trial.part in ("fsdp", "megatron"):
            cells[-1] = gib(trial.planned_bytes())
        print(row([trial.card, trial.part, *cells]), flush=True)
    print()
    return succeeded


def processor() -> str:
    """The name of the CPU."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def heading(device: str) -> str:
    """Device, versions, date and command."""
    name, software = f"One thread of {processor()}", f"torch {torch.__version__}"
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        name, software = (
            f"One {properties.name}, {gib(properties.total_memory)} GiB",
            f"{software}, CUDA {torch.version.cuda}",
        )
    command = shlex.join(["python", "benchmarks/gpu.py", *sys.argv[1:]])
    return f"{name}; {software}. {datetime.date.today()}. `{command}`\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cards", nargs="+", default=["qwen3-0.6B", "qwen3-4B"], help="names of `slimectl models`")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="rows to measure; all by default")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of a pack, and of a prefill")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a row, and of a prompt of a prefill")
    parser.add_argument("--packs", type=int, default=4, help="packs of a training step")
    parser.add_argument("--recompute", choices=["none", "selective", "full"], default="none", help="in backward")
    parser.add_argument("--state-dtype", choices=["float32", "bfloat16"], default="float32", help="of the moments")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 32, 256], help="requests at once")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt that is decoded from")
    parser.add_argument("--answer", type=int, default=128, help="tokens of its answer; at least 2")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--trial", help=argparse.SUPPRESS)
    options = vars(parser.parse_args())
    trial, names, parts = (options.pop(name) for name in ("trial", "cards", "parts"))
    if trial is not None:
        fields = json.loads(trial)
        with contextlib.redirect_stdout(sys.stderr):
            result = measure(Trial(**fields | {"requests": tuple(fields["requests"])}))
        print(json.dumps(result))
        return
    if options["answer"] < 2:
        parser.error("--answer: the first token of an answer is the prefill's; give at least 2")
    options["device"] = builders.device(options["device"])
    options["requests"] = tuple(options["requests"])
    if "megatron" in parts and find_spec("megatron") is None:
        print("megatron-core is not installed: its rows are left out", file=sys.stderr)
        parts = [part for part in parts if part != "megatron"]
    print(heading(options["device"]))
    peak = peak_flops(torch.cuda.get_device_name()) if options["device"] == "cuda" else None
    succeeded = True
    for table in tables(options["requests"]):
        trials = [Trial(card=card, part=part, **options) for card in names for part in parts if part in table.parts]
        succeeded &= not trials or print_table(table, trials, peak)
    raise SystemExit(0 if succeeded else 1)


if __name__ == "__main__":
    main()
