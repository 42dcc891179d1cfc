"""Describes this machine: hardware and installed packages, as a run records them, and its speed."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RECORDED = (
    "torch", "transformers", "numpy", "safetensors", "huggingface-hub", "ray", "megatron-core", "sglang", "vllm",
    "peft", "reasoning-gym",
)  # fmt: skip
"""Packages whose versions a run records in its manifest."""
NVIDIA_SMI_S = 10.0
"""Maximum seconds to wait for the names of the GPUs."""


def environment() -> dict[str, Any]:
    """Return this machine's hardware, Python and packages, as a run records them. Nothing heavy is imported."""
    versions = {}
    for package in RECORDED:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    hardware = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": processor(),
        "cores": cores(),
        "memory_gib": memory_gib(),
        "gpus": gpus(),
    }
    return hardware | {"packages": versions}


def memory_gib() -> float | None:
    """Return the memory of this machine in GiB, or None if the system does not tell."""
    with suppress(OSError, ValueError):
        return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)
    return None


def gpus() -> list[str]:
    """Return the names of the GPUs of this machine, from NVIDIA's tool: asking torch would start CUDA here."""
    if not (tool := shutil.which("nvidia-smi")):
        return []
    with suppress(OSError, subprocess.SubprocessError):
        query = [tool, "--query-gpu=name", "--format=csv,noheader"]
        answer = subprocess.run(query, capture_output=True, text=True, timeout=NVIDIA_SMI_S, check=True)
        return [line.strip() for line in answer.stdout.splitlines() if line.strip()]
    return []


@dataclass(frozen=True)
class MachineSpeed:
    """Speed of one thread of this machine, and its description, as a reference for other figures."""

    processor: str
    cores: int
    fp32_gflops: float
    bf16_gflops: float
    copy_gb_per_s: float
    """Bytes copied per second, each read and written once, between blocks larger than the caches."""
    versions: dict[str, str]


def machine_speed(*, size: int = 512, copied_mib: int = 128) -> MachineSpeed:
    """Measure matrix products of `size` x `size` and memory copies on one thread. The fastest of several counts."""
    import torch

    import slimectl

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rates = []
        for dtype in (torch.float32, torch.bfloat16):
            matrix = torch.ones(size, size, dtype=dtype)
            rates.append(2 * size**3 / _fastest(partial(torch.mm, matrix, matrix)) / 1e9)
        block = torch.ones(copied_mib * 2**18)
        target = torch.empty_like(block)
        copy = block.nbytes / _fastest(partial(target.copy_, block)) / 1e9
    finally:
        torch.set_num_threads(threads)
    versions = {"slimectl": slimectl.__version__, "torch": torch.__version__, "python": platform.python_version()}
    return MachineSpeed(processor(), cores(), rates[0], rates[1], copy, versions)


def _fastest(work: Callable[[], object], limit_s: float = 0.25) -> float:
    """Return the CPU seconds of the fastest call among those within `limit_s`, at least two.

    The first call may set up a kernel. Without hardware support, bfloat16 is a hundred times slower than float32.
    """
    seconds: list[float] = []
    while len(seconds) < 2 or sum(seconds) < limit_s:
        started = time.process_time()
        work()
        seconds.append(max(time.process_time() - started, 1e-9))
    return min(seconds)


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the name of the processor as reported by the system."""
    with suppress(OSError):
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("model name", "Model", "cpu model") and value.strip():
                return value.strip()
    return platform.processor() or platform.machine()
