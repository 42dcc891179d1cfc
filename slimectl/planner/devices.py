"""Devices of a process: memory in use, and the peak rate of matrix products."""

from __future__ import annotations

import os
import re
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MEASURED_SIZE = 1024
"""Rows and columns of the matrices whose product is timed."""

MEASURED_S = 0.5
"""How long products are repeated. The fastest counts."""

PEAK_TFLOPS = {
    "V100": 125.0, "A10": 125.0, "A100": 311.9, "A800": 311.9, "L4": 121.0, "L40S": 362.1, "RTX 4090": 165.2,
    "H20": 148.0, "H100": 989.4, "H100 PCIe": 756.0, "H100 NVL": 835.0, "H800": 989.4, "H200": 989.4, "B200": 2250.0,
    "MI250X": 383.0, "MI300X": 1307.4,
}  # fmt: skip
"""Peak TFLOP/s of dense 16-bit products, by words in the device's name, from the vendors' data sheets."""


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of torch's allocator on the present device, in bytes. The maxima are since the last reset."""

    index: int
    allocated: int
    reserved: int
    max_allocated: int
    max_reserved: int
    total: int


@dataclass(frozen=True)
class ProcessMemory:
    """Memory of a process in bytes: resident and virtual (0 where the system does not say), and of its GPU."""

    rss: int = 0
    vms: int = 0
    device: DeviceMemory | None = None
    pack_splits: int = 0
    """How many packs did not fit since the process started."""


_pack_splits = 0


def count_pack_split() -> None:
    """Count a pack of this process that did not fit into memory."""
    global _pack_splits
    _pack_splits += 1


OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""Parts of the messages of RuntimeErrors for memory, from CUDA, torch's allocator for CPUs and cuBLAS."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an operation, usually of torch, failed because memory ran out."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in OUT_OF_MEMORY)


def process_memory(*, reset_peak: bool = False) -> ProcessMemory:
    """Return the memory of this process. `reset_peak` resets the maxima of its GPU."""
    rss = vms = 0
    with suppress(OSError):  # Linux only
        pages = Path("/proc/self/statm").read_bytes().split()
        vms, rss = (int(count) * os.sysconf("SC_PAGE_SIZE") for count in pages[:2])
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return ProcessMemory(rss, vms, None, _pack_splits)
    cuda = torch.cuda
    memory = DeviceMemory(
        cuda.current_device(), cuda.memory_allocated(), cuda.memory_reserved(), cuda.max_memory_allocated(),
        cuda.max_memory_reserved(), cuda.mem_get_info()[1],
    )  # fmt: skip
    if reset_peak:
        cuda.reset_peak_memory_stats()
    return ProcessMemory(rss, vms, memory, _pack_splits)


def peak_flops(name: str) -> float | None:
    """Return the peak FLOP/s in 16 bits of a device by its name, or None for one that is not in the table.

    >>> peak_flops("NVIDIA H100 80GB HBM3"), peak_flops("NVIDIA H100 PCIe"), peak_flops("Quadro")
    (989400000000000.0, 756000000000000.0, None)
    """
    name_words = set(re.split(r"[^A-Za-z0-9]+", name))
    matches = [known for known in PEAK_TFLOPS if set(known.split()) <= name_words]
    return PEAK_TFLOPS[max(matches, key=len)] * 1e12 if matches else None


def device_peak() -> float | None:
    """Return the 16-bit peak FLOP/s of this process's GPU, or None without a known GPU."""
    import torch

    return peak_flops(torch.cuda.get_device_name()) if torch.cuda.is_available() else None


def measured_peak(device: str, dtype: str) -> float:
    """Return the FLOP/s of the fastest of many products of square matrices in this process."""
    import torch

    matrix = torch.randn(MEASURED_SIZE, MEASURED_SIZE, device=device).to(getattr(torch, dtype))

    def product_s() -> float:
        started = time.perf_counter()
        matrix @ matrix
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    product_s()  # the first call loads kernels
    deadline, fastest = time.perf_counter() + MEASURED_S, product_s()
    while time.perf_counter() < deadline:
        fastest = min(fastest, product_s())
    return 2.0 * MEASURED_SIZE**3 / fastest
