"""A card on this machine's GPU: MFU and tokens per second of a training step and of the engine, as tables in Markdown.

    python benchmarks/gpu.py                                                  # qwen3-0.6B and qwen3-4B
    python benchmarks/gpu.py --cards qwen3-4B --recompute full --state-dtype bfloat16      # 59 GiB by the plan
    python benchmarks/gpu.py --cards qwen3-0.6B --parts fsdp megatron --length 8192
    python benchmarks/gpu.py --cards tiny --tokens 256 --length 64 --requests 1 8 --prompt 16 --answer 8   # on a CPU

Every row is a process of its own (gpu_trial.py), with one model of random weights that it draws on the device; one that
fails, or that does not fit, says so, and the others go on. Forward and backward are in bfloat16, masters, gradients and
(unless --state-dtype) moments in float32.

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
import contextlib
import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from gpu_trial import PARTS, TRAINERS, Result, Trial
from plan import ENVIRONMENT, ROOT

from slimectl.planner.devices import peak_flops
from slimectl.planner.workload import GIB
from slimectl.runtime import builders

LIMIT_S = 300.0
"""Seconds of a trial. One that hangs costs no other its time."""


def run_process(trial: Trial) -> Result:
    environment = {**os.environ, **(ENVIRONMENT if trial.device == "cpu" else {})}
    command = [sys.executable, str(Path(__file__).with_name("gpu_trial.py")), json.dumps(asdict(trial))]
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment, check=False, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return {"failure": f"failed: no result within {LIMIT_S:g} s"}
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
    """Columns of the trials of some parts: first fields of the trial, the `labels`, then what was measured."""

    parts: tuple[str, ...]
    labels: tuple[str, ...]
    titles: tuple[str, ...]
    cells: Callable[[Trial, Result, float | None], list[str]]


def tables(requests: tuple[int, ...]) -> list[Table]:
    rates = tuple(f"decode tokens/s, {count} at once" for count in requests)
    return [
        Table(
            TRAINERS,
            ("card", "part", "recompute"),
            (
                "step s", "of it update s", "tokens/s", "TFLOP/s", "TFLOP/s of products", "MFU", "of peak", "peak GiB",
                "plan GiB",
            ),
            training_cells,
        ),
        Table(("engine",), ("card", "part"), ("prefill tokens/s", *rates, "peak GiB"), engine_cells),
        Table(("push",), ("card", "part"), ("weights GiB", "push s", "GB/s", "peak GiB"), push_cells),
    ]  # fmt: skip


def row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def print_table(table: Table, trials: list[Trial], peak: float | None) -> bool:
    """Print a table, a row as soon as it is measured; returns whether no trial failed, or only for lack of memory."""
    titles = [*table.labels, *table.titles]
    print(row(titles))
    print(row(["---"] * len(titles)), flush=True)
    succeeded = True
    for trial in trials:
        result = run_process(trial)
        failure = result.get("failure", "")
        succeeded &= not failure.startswith("failed")
        cells = [failure, *[""] * (len(table.titles) - 1)] if failure else table.cells(trial, result, peak)
        if failure and trial.part in TRAINERS:
            cells[-1] = gib(trial.planned_bytes())
        print(row([*(getattr(trial, name) for name in table.labels), *cells]), flush=True)
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
    parser.add_argument("--packs", type=int, default=2, help="packs of a training step")
    parser.add_argument(
        "--recompute", nargs="+", choices=["none", "selective", "full"], default=["none", "full"],
        help="gradient checkpointing; a row for each",
    )  # fmt: skip
    parser.add_argument("--state-dtype", choices=["float32", "bfloat16"], default="float32", help="of the moments")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 32, 256], help="requests at once")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt that is decoded from")
    parser.add_argument("--answer", type=int, default=128, help="tokens of its answer; at least 2")
    parser.add_argument("--repetitions", type=int, default=5)
    options = vars(parser.parse_args())
    names, parts, recomputes = (options.pop(name) for name in ("cards", "parts", "recompute"))
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
        trials = [
            Trial(card=card, part=part, recompute=recompute, **options)
            for card in names
            for part in parts
            if part in table.parts
            for recompute in (recomputes if part in TRAINERS else ["none"])
        ]
        succeeded &= not trials or print_table(table, trials, peak)
    raise SystemExit(0 if succeeded else 1)


if __name__ == "__main__":
    main()
