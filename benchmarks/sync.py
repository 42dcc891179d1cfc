"""What a push of new weights takes, by transport and engine, beside a plain copy of the same bytes in memory.

    python benchmarks/sync.py --model DIR [--sglang PYTHON] [--dtype bfloat16] [--rounds 5] [--folder DIR]
                              [--only serve/tensor,embedded/memory] [--lora RANK]

One process trains the model of DIR with AdamW at a learning rate of 1e-6, a step a round, and pushes after each step to
one engine of each kind on this machine: the embedded engine in the same process, `slimectl serve`, and SGLang (where
--sglang names its Python), with every transport in turns; the first two rounds are not counted. Masters are float32;
engines have --dtype, and the cast is part of the push, as is the engine's packing of its weights. The copy is of as
many bytes as the engine's weights have, by torch, on one thread, in every round, between tensors whose pages exist.
Printed are medians of the whole push and the best one, of the time in which the engine was paused, and of the CPU
seconds of trainer and engine (which other work on the machine disturbs least); GB/s of the model over the whole push,
how many copies fit into it, by the clock (best of each, too) and by CPU seconds, and the bytes that were sent. `delta`
alone sends less than the model. With --lora the policy trains adapters of that rank on all linear layers; others,
serve-lora and sglang-lora, get the adapters alone, and those without -lora merged weights. Files go to --folder (a
temporary one, in memory where /dev/shm is there, so that no disk is measured).
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from engine import machine
from transformers import AutoConfig, AutoTokenizer

from slimectl.algorithms.losses import SftLoss
from slimectl.checkpoints.hf import HFCheckpoint, copy_companions
from slimectl.engines.api_keys import ServerKeys, new_key
from slimectl.engines.embedded.engine import EmbeddedEngine, EngineOptions
from slimectl.engines.server.launch import serve_server
from slimectl.engines.sglang.launch import sglang_server
from slimectl.engines.sglang.topology import ServerSpec
from slimectl.engines.sglang.weight_client import SglangWorkers
from slimectl.engines.supervisor.server_process import ServerOptions
from slimectl.engines.weight_sync.base import InProcessSync, WeightSyncBase
from slimectl.engines.weight_sync.delta import DeltaSync
from slimectl.engines.weight_sync.disk import DiskSync
from slimectl.engines.weight_sync.distributed import DistributedSync
from slimectl.engines.weight_sync.memory import TensorSync
from slimectl.policies.fsdp.policy import FsdpPolicy
from slimectl.policies.lora import LoraOptions
from slimectl.policies.optimizer import OptimizerOptions
from slimectl.policies.options import TrainerOptions
from slimectl.protocols import NamedTensors, WeightSync
from slimectl.types import Metrics, TrainingSample

KEYS = ServerKeys(admin_api_key=new_key())
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
WARM_UP = 2
"""Rounds that are not counted: a first push writes whole files and touches new memory."""


def written(model: Path, folder: Path, tensors: NamedTensors) -> None:
    copy_companions(model, folder)
    HFCheckpoint().write(folder, tensors)


def transports(
    policy: FsdpPolicy, url: str, model: Path, folder: Path, dtype: torch.dtype, buffer_bytes: int, *, adapters: bool
) -> dict[str, WeightSyncBase]:
    workers = SglangWorkers([url], keys=KEYS)
    if adapters:
        by_name = {"tensor": TensorSync, "distributed": DistributedSync}
        options = {"buffer_bytes": buffer_bytes, "adapters": True}
        return {name: by_name[name](policy, workers, **options) for name in workers.adapter_transports}
    files = {"write": partial(written, model), "dtype": dtype}
    stream = {"buffer_bytes": buffer_bytes, "dtype": dtype}
    return {
        "disk": DiskSync(policy, workers, folder=folder / "disk", **files),
        "delta": DeltaSync(policy, workers, folder=folder / "delta", **files),
        "tensor": TensorSync(policy, workers, **stream),
        "distributed": DistributedSync(policy, workers, **stream),
    }


def step(policy: FsdpPolicy) -> None:
    length = 32
    tokens = torch.randint(1000, (length + 8,)).tolist()
    policy.forward_backward(
        [TrainingSample(tokens=tokens, response_length=length, loss_weights=[1 / length] * length)], SftLoss()
    )
    policy.optim_step()


def timed(act: Callable[[], Metrics], group: int = 0) -> Metrics:
    """What `act` returns, its seconds, and the CPU seconds of this process and of a group of processes."""
    started, trainer, engine = time.perf_counter(), time.process_time(), cpu_seconds(group)
    metrics = act()
    cpu = {"trainer": time.process_time() - trainer, "engine": cpu_seconds(group) - engine}
    return metrics | {"seconds": time.perf_counter() - started, **cpu}


def cpu_seconds(group: int) -> float:
    """CPU seconds of all processes of a group, in nanoseconds' resolution; of none for group 0."""
    total = 0.0
    for stat in Path("/proc").glob("[0-9]*/stat") if group else []:
        with suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[2]) == group:
                # The clock of another process (clock_getcpuclockid): /proc counts in hundredths of a second.
                total += time.clock_gettime(~int(stat.parent.name) << 3 | 2)
    return total


def measure(policy: FsdpPolicy, syncs: dict[tuple[str, str], tuple[WeightSync, int]], size: int, rounds: int) -> None:
    flat, into = torch.randint(255, (size,), dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    copies: list[Metrics] = []
    pushes: dict[tuple[str, str], list[Metrics]] = {key: [] for key in syncs}
    for number in range(rounds + WARM_UP):
        step(policy)
        for key, (sync, group) in syncs.items():
            copy, push = timed(lambda: {"copied": float(len(into.copy_(flat)))}), timed(sync.push, group)
            if number >= WARM_UP:
                copies.append(copy)
                pushes[key].append(push)
    copy, fastest = median(copies), min(each["seconds"] for each in copies)
    print(
        f"a copy of {size / 1e6:.0f} MB: {copy['seconds'] * 1e3:.0f} ms (best {fastest * 1e3:.0f}),"
        f" {size / copy['seconds'] / 1e9:.1f} GB/s, {copy['trainer']:.3f} CPU s"
    )
    titles = [
        "push s",
        "best",
        "paused",
        "trainer",
        "engine",
        "CPU s",
        "GB/s",
        "copies",
        "of best",
        "by CPU",
        "MB sent",
    ]
    print(f"{'engine':<12}{'transport':<12}" + "".join(f"{title:>8}" for title in titles))
    for (engine, name), each in pushes.items():
        push = median(each)
        best, cpu = min(metrics["seconds"] for metrics in each), push["trainer"] + push["engine"]
        row = [push["seconds"], best, push["pause_time"], push["trainer"], push["engine"], cpu]
        row += [size / push["seconds"] / 1e9, push["seconds"] / copy["seconds"], best / fastest]
        row += [cpu / copy["trainer"], push["bytes"] / 1e6]
        print(f"{engine:<12}{name:<12}" + "".join(f"{value:8.3f}" for value in row), flush=True)


def median(found: list[Metrics]) -> Metrics:
    return {key: statistics.median(metrics[key] for metrics in found) for key in found[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory")
    parser.add_argument("--sglang", help="Python with SGLang; only `slimectl serve` is measured without")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--buffer", type=int, default=512, help="MiB in one message")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm") if Path("/dev/shm").is_dir() else None)
    parser.add_argument("--lora", type=int, metavar="RANK", help="train adapters, and push them alone too")
    parser.add_argument("--only", help="pairs of engine and transport, e.g. serve/tensor,embedded/memory; else all")
    options = parser.parse_args()
    torch.set_num_threads(1)
    bf16, fp32, memory = machine()
    print(f"machine, one thread: bf16 {bf16:.0f} GFLOP/s, fp32 {fp32:.0f} GFLOP/s, memory {memory:.1f} GB/s")
    model, dtype = options.model.absolute(), getattr(torch, options.dtype)
    pairs = options.only.split(",") if options.only else []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.folder)))
        servers = {}
        for suffix in ("", "-lora") if options.lora else ("",):
            name = f"serve{suffix}"
            of_server = ServerOptions(folder / f"{name}.log", dtype=options.dtype, keys=KEYS)
            servers[name] = serve_server(ServerSpec(name, model), of_server)
            if options.sglang:
                spec = ServerSpec(f"sglang{suffix}", model)
                of_server = replace(of_server, log=folder / f"{spec.name}.log")
                servers[spec.name] = sglang_server(spec, of_server, python=options.sglang)
        lora = LoraOptions(options.lora, 2.0 * options.lora, LINEAR) if options.lora else None
        policy = FsdpPolicy(model, HFCheckpoint(), TrainerOptions(optimizer=OptimizerOptions(lr=1e-6), lora=lora))
        size = sum(tensor.numel() for _, tensor in policy.weights()) * dtype.itemsize
        embedded = EmbeddedEngine(
            AutoConfig.from_pretrained(model), AutoTokenizer.from_pretrained(model), EngineOptions(dtype=dtype)
        )
        syncs: dict[tuple[str, str], tuple[WeightSync, int]] = {
            ("embedded", "memory"): (InProcessSync(policy, embedded), 0)
        }
        for engine, server in servers.items():
            if pairs and not any(pair.startswith(f"{engine}/") for pair in pairs):
                continue
            stack.callback(server.stop)
            where = server.start(), model, folder / engine, dtype, options.buffer * 2**20
            by_name = transports(policy, *where, adapters=engine.endswith("-lora"))
            for name, sync in by_name.items():
                stack.callback(sync.close)
                syncs[engine, name] = sync, server.pid() or 0
        selection = {key: sync for key, sync in syncs.items() if not pairs or "/".join(key) in pairs}
        measure(policy, selection, size, options.rounds)


if __name__ == "__main__":
    main()
