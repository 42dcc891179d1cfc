"""Describes this machine: hardware and installed packages as check results, and its speed."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from slimectl.system.redaction import redact_text

OPTIONAL = {
    "transformers": ("torch", "running models"),
    "ray": ("ray", "--executor ray"),
    "megatron-core": ("megatron", "--backend megatron"),
    "tensorboard": ("tensorboard", "track.with = tensorboard"),
    "reasoning-gym": ("quickstart", "the quickstart recipe"),
    "pyarrow": ("parquet", "Parquet prompts"),
    "zstandard": ("zstd", ".zst records and delta weight pushes"),
    "xxhash": ("zstd", "delta weight pushes"),
}
RECORDED = (
    "torch", "transformers", "numpy", "safetensors", "huggingface-hub", "ray", "megatron-core", "sglang", "vllm",
    "peft", "reasoning-gym",
)  # fmt: skip
"""Packages whose versions a run records in its manifest."""
NVIDIA_SMI_S = 10.0
"""Maximum seconds to wait for the names of the GPUs."""
MODULES = {"megatron-core": "megatron", "reasoning-gym": "reasoning_gym"}


@dataclass(frozen=True)
class CheckResult:
    """Result of one check. `fine` is None for plain information."""

    what: str
    fine: bool | None
    detail: str
    exit_code: int = 1
    """Exit code of the command if the check failed."""

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON, with `fine` null for plain information."""
        return {"check": self.what, "fine": self.fine, "detail": redact_text(self.detail)}

    def __str__(self) -> str:
        mark = {True: "ok", False: "FAIL", None: "-"}[self.fine]
        return redact_text(f"{mark:<5} {self.what:<22} {self.detail}")


def machine() -> Iterator[CheckResult]:
    """Yield this machine's hardware and installed packages."""
    yield CheckResult("python", sys.version_info >= (3, 11), platform.python_version())
    yield from _torch()
    yield CheckResult("cores", None, str(cores()))
    for folder in (Path(), Path("/dev/shm")):
        if folder.exists():
            free = shutil.disk_usage(folder).free / 2**30
            yield CheckResult(f"free in {folder.absolute()}", free > 1, f"{free:.1f} GiB")
    for package, (extra, purpose) in OPTIONAL.items():
        if find_spec(MODULES.get(package, package)) is None:
            yield CheckResult(package, None, f"not installed. For {purpose}: pip install 'slimectl[{extra}]'")
        else:
            installed = _version(package)
            problem = unsupported(package, installed, _requirements())
            yield CheckResult(package, None if problem else True, f"{installed}{problem}")


def _torch() -> Iterator[CheckResult]:
    """Yield torch's version and the GPUs that it sees, or how to install it."""
    try:
        import torch
    except ModuleNotFoundError:
        yield CheckResult("torch", None, "not installed. To run models: pip install 'slimectl[torch]'")
        return
    cuda = torch.cuda.is_available()
    names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())) if cuda else "none"
    yield CheckResult("torch", True, f"{torch.__version__}, {torch.get_num_threads()} threads")
    yield CheckResult("GPUs", None, names)


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


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "no metadata"


def _requirements() -> Sequence[str]:
    """Return the requirements of the installed slimectl. A plain checkout has none."""
    try:
        return requires("slimectl") or ()
    except PackageNotFoundError:
        return ()


def unsupported(package: str, installed: str, requirements: Iterable[str]) -> str:
    """Return a warning if an installed version is outside the range of a requirement, else "".

    >>> unsupported("ray", "3.1", ["ray<3,>=2.44; extra == 'ray'"])
    ', but slimectl was tried with <3,>=2.44. Run: pip install "ray<3,>=2.44"'
    """
    from packaging.requirements import Requirement
    from packaging.version import InvalidVersion

    for requirement in map(Requirement, requirements):
        with suppress(InvalidVersion):  # a package without metadata
            if requirement.name == package and not requirement.specifier.contains(installed, prereleases=True):
                bounds = requirement.specifier
                return f', but slimectl was tried with {bounds}. Run: pip install "{package}{bounds}"'
    return ""


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
