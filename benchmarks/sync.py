"""What a push of new weights takes, by transport and engine, beside a plain copy of the same bytes in memory.

    python benchmarks/sync.py --model DIR [--sglang PYTHON] [--dtype bfloat16] [--rounds 5] [--folder DIR]

One process trains the model of DIR with AdamW at a learning rate of 1e-6, a step a round, and pushes after each step to
one engine of each kind on this machine, `slimectl serve` and SGLang (where --sglang names its Python), with every
transport in turns; the first round is not counted. Masters are float32; what is sent is --dtype, and the cast is part
of the push. The copy is of the same bytes, by torch, on one thread, in every round. Printed are medians of the whole
push, of the time in which the engine was paused, and of the CPU seconds of trainer and engine together (which other
work on the machine disturbs least); GB/s of the model over the whole push, how many copies fit into it, by the clock
and by CPU seconds, and the bytes that were sent. `delta` alone sends less than the model. Files go to --folder (a
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
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from slimectl.algorithms.losses import SftLoss
from slimectl.checkpoints.hf import HFCheckpoint, copy_companions
from slimectl.engines.api_keys import Keys, new_key
from slimectl.engines.server.launch import serve_server
from slimectl.engines.sglang.launch import sglang_server
from slimectl.engines.sglang.weight_client import SglangWorkers
from slimectl.policies.fsdp.policy import FsdpPolicy
from slimectl.policies.optimizer import OptimizerOptions
from slimectl.protocols import NamedTensors
from slimectl.types import Metrics, TrainingSample
from slimectl.weight_sync.base import WeightSyncBase
from slimectl.weight_sync.delta import DeltaSync
from slimectl.weight_sync.disk import DiskSync
from slimectl.weight_sync.distributed import DistributedSync
from slimectl.weight_sync.memory import TensorSync

KEYS = Keys(admin_api_key=new_key())


def written(model: Path, folder: Path, tensors: NamedTensors) -> None:
    copy_companions(model, folder)
    HFCheckpoint().write(folder, tensors)


def transports(
    policy: FsdpPolicy, url: str, model: Path, folder: Path, dtype: torch.dtype, buffer_bytes: int
) -> dict[str, WeightSyncBase]:
    workers = SglangWorkers([url], keys=KEYS)
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


def timed(act: Callable[[], Metrics], group: int | None = None) -> Metrics:
    """What `act` returns, and its "seconds" and "cpu" seconds, those of a process group included."""
    started, used = time.perf_counter(), cpu_seconds(group)
    metrics = act()
    return metrics | {"seconds": time.perf_counter() - started, "cpu": cpu_seconds(group) - used}


def cpu_seconds(group: int | None) -> float:
    """Of this process and of all processes of a group."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat") if group else []:
        with suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[2]) == group:
                ticks += int(fields[11]) + int(fields[12])
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def measure(
    policy: FsdpPolicy, syncs: dict[tuple[str, str], tuple[WeightSyncBase, int]], size: int, rounds: int
) -> None:
    flat, into = torch.randint(255, (size,), dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    copies: list[Metrics] = []
    found: dict[tuple[str, str], list[Metrics]] = {key: [] for key in syncs}
    for number in range(rounds + 1):
        step(policy)
        for key, (sync, group) in syncs.items():
            copy, push = timed(lambda: {"copied": float(len(into.copy_(flat)))}), timed(sync.push, group)
            if number:
                copies.append(copy)
                found[key].append(push)
    copy = median(copies)
    print(f"a copy of {size / 1e6:.0f} MB: {copy['seconds'] * 1e3:.0f} ms, {size / copy['seconds'] / 1e9:.1f} GB/s")
    titles = ["push s", "best", "paused", "CPU s", "GB/s", "copies", "by CPU", "MB sent"]
    print(f"{'engine':<8}{'transport':<13}" + "".join(f"{title:>8}" for title in titles))
    for (engine, name), each in found.items():
        push = median(each)
        best = min(metrics["seconds"] for metrics in each)
        row = [push["seconds"], best, push["pause_time"], push["cpu"], size / push["seconds"] / 1e9]
        row += [push["seconds"] / copy["seconds"], push["cpu"] / copy["cpu"], push["bytes"] / 1e6]
        print(f"{engine:<8}{name:<13}" + "".join(f"{value:8.2f}" for value in row), flush=True)


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
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, dtype = options.model.absolute(), getattr(torch, options.dtype)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.folder)))
        options_of_serve = {"dtype": options.dtype, "wait_for_weights": True, "keys": KEYS}
        servers = {"serve": serve_server(model, log=folder / "serve.log", **options_of_serve)}
        if options.sglang:
            servers["sglang"] = sglang_server(
                model, log=folder / "sglang.log", python=options.sglang, dtype=options.dtype
            )
        syncs: dict[tuple[str, str], tuple[WeightSyncBase, int]] = {}
        policy = FsdpPolicy(model, HFCheckpoint(), optimizer=OptimizerOptions(lr=1e-6))
        size = sum(tensor.numel() for _, tensor in policy.weights()) * dtype.itemsize
        for engine, server in servers.items():
            stack.callback(server.stop)
            made = transports(policy, server.start(), model, folder / engine, dtype, options.buffer * 2**20)
            for name, sync in made.items():
                stack.callback(sync.close)
                syncs[engine, name] = sync, server.pid() or 0
        measure(policy, syncs, size, options.rounds)


if __name__ == "__main__":
    main()
