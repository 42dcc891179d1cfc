"""Checks of the machine around the GPUs: Python and packages, cores, memory, limits, shared memory, disk."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path

from slimectl.runtime.check_result import CheckResult, failure, info, passed, warning
from slimectl.runtime.doctor.scope import Scope
from slimectl.runtime.machine import cores
from slimectl.system.control_groups import control_groups, memories, number

GIB = 2**30
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
MODULES = {"megatron-core": "megatron", "reasoning-gym": "reasoning_gym"}
FEWEST_FILES = 4096
"""Open files of a run with many requests at the same time."""
FEWEST_PROCESSES = 4096
CORES_PER_GPU = 2
LOWEST_FREE = GIB
"""Free bytes below which a disk or shared memory fails."""
DISK_SAMPLE = 32 * 2**20
SLOWEST_DISK = 100e6
"""Bytes per second below which writing checkpoints is a warning. Eight billion parameters then take 16 minutes."""


def python(_scope: Scope) -> Iterator[CheckResult]:
    """Check the version of Python."""
    installed = platform.python_version()
    is_new = sys.version_info >= (3, 11)
    yield passed("python", installed) if is_new else failure("python", installed, "Install Python 3.11 or newer")


def packages(_scope: Scope) -> Iterator[CheckResult]:
    """List optional packages, and warn of versions that slimectl was not tried with."""
    requirements = _requirements()
    for package, (extra, purpose) in OPTIONAL.items():
        if find_spec(MODULES.get(package, package)) is None:
            yield info(package, f"not installed. For {purpose}: pip install 'slimectl[{extra}]'")
            continue
        installed = _version(package)
        bounds = unsupported(package, installed, requirements)
        if bounds:
            text = f"{installed}, but slimectl was tried with {bounds}"
            yield warning(package, text, f'Run: pip install "{package}{bounds}"')
        else:
            yield passed(package, installed)


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
    """Return the range of a requirement that excludes the installed version, else "".

    >>> unsupported("ray", "3.1", ["ray<3,>=2.44; extra == 'ray'"])
    '<3,>=2.44'
    """
    from packaging.requirements import Requirement
    from packaging.version import InvalidVersion

    for requirement in map(Requirement, requirements):
        with suppress(InvalidVersion):  # a package without metadata
            if requirement.name == package and not requirement.specifier.contains(installed, prereleases=True):
                return str(requirement.specifier)
    return ""


def processors(scope: Scope) -> Iterator[CheckResult]:
    """Check the cores that this process may use: affinity and the quota of its control group."""
    usable, quota = float(cores()), _cpu_quota(scope)
    text = f"{usable:g} of {os.cpu_count()}"
    if quota is not None and quota < usable:
        usable, text = quota, f"{quota:g} by the quota of the control group, {text} visible"
    needed = CORES_PER_GPU * len(scope.visible)
    if usable < needed:
        remedy = "Ask for more: `docker run --cpus`, `--cpus-per-task` of Slurm, or limits.cpu of the pod"
        yield warning("cores", f"{text}, but {len(scope.visible)} GPUs need {needed}", remedy)
    else:
        yield info("cores", text)


def memory(scope: Scope) -> Iterator[CheckResult]:
    """Check the free memory of the machine and of its control group."""
    if not (all_memories := list(memories(scope.root))):
        return
    machine, tightest = all_memories[0], min(all_memories, key=lambda memory: memory.free)
    free, text = tightest.free, f"{machine.free / GIB:.1f} of {machine.total / GIB:.1f} GiB free"
    if tightest is not machine:
        limit = f"{tightest.free / GIB:.1f} of {tightest.total / GIB:.1f} GiB free in the control group"
        text = f"{limit}, {text} on the machine"
    one_gpu = max((gpu.number("fb_memory_usage/total") or 0) * 2**20 for gpu in scope.visible) if scope.visible else 0
    remedy = "Ask for more: `docker run --memory`, `--mem` of Slurm, or limits.memory of the pod"
    if free < LOWEST_FREE:
        yield failure("memory", text, remedy)
    elif free < one_gpu:
        text += ", less than one GPU has. Loading a model and cluster.colocate need that"
        yield warning("memory", text, remedy)
    else:
        yield passed("memory", text)


def _cpu_quota(scope: Scope) -> float | None:
    """Return the cores that the control groups allow, or None without a limit."""
    quotas = []
    for group in control_groups("cpu", scope.root):
        texts = scope.read(f"{group}/cpu.max").split() or [
            scope.read(f"{group}/cpu.cfs_{name}_us") for name in ("quota", "period")
        ]
        with suppress(ValueError):  # a group without a limit has the word max, or no file
            quota, period = map(int, texts)
            quotas += [quota / period] if quota > 0 else []
    return min(quotas, default=None)


def limits(scope: Scope) -> Iterator[CheckResult]:
    """Check the limits of open files, processes and locked memory."""
    files, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= files < FEWEST_FILES:
        can_raise = most_files < 0 or most_files >= FEWEST_FILES  # -1 is unlimited
        highest = 65536 if most_files < 0 else min(65536, most_files)
        remedy = f"Run `ulimit -n {highest}` first" if can_raise else "Raise nofile in /etc/security/limits.conf"
        yield warning("open files", f"{files}, and many requests at the same time need {FEWEST_FILES}", remedy)
    else:
        yield passed("open files", _limit(files))
    processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    pids = [number(group / "pids.max") for group in control_groups("pids", scope.root)]
    allowed = min([limit for limit in (processes, *pids) if limit is not None and limit >= 0], default=-1)
    if 0 <= allowed < FEWEST_PROCESSES:
        remedy = "Raise it: `ulimit -u`, `docker run --pids-limit`, or TasksMax of systemd"
        yield warning("processes", f"{allowed} with threads, and engines need {FEWEST_PROCESSES}", remedy)
    else:
        yield passed("processes", _limit(allowed))
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if (scope.root / "sys/class/infiniband").is_dir() and locked != resource.RLIM_INFINITY:
        text = f"{locked // 1024} KiB, and InfiniBand needs unlimited"
        yield warning("locked memory", text, "Run `ulimit -l unlimited`, or `docker run --ulimit memlock=-1`")


def _limit(number: int) -> str:
    return "unlimited" if number < 0 else str(number)


def shared_memory(scope: Scope) -> Iterator[CheckResult]:
    """Check the space in /dev/shm, through which NCCL and weight updates go."""
    folder = scope.root / "dev/shm"
    if folder.is_dir():
        free = shutil.disk_usage(folder).free
        remedy = "Start the container with `--shm-size=16g` or `--ipc=host`. In Kubernetes mount an emptyDir in memory"
        is_writable = os.access(folder, os.W_OK)
        text = f"{free / GIB:.1f} GiB free" if is_writable else "not writable"
        is_fine = free > LOWEST_FREE and is_writable
        yield passed("/dev/shm", text) if is_fine else failure("/dev/shm", text, remedy)


def disk(scope: Scope) -> Iterator[CheckResult]:
    """Check the folder of runs: free space, and the speed of a real file that is flushed to the disk."""
    folder = Path(scope.settings.run.dir).absolute()
    while not os.path.exists(folder):  # unlike Path.exists, also where a folder above cannot be read
        folder = folder.parent
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    if free < LOWEST_FREE or (status.f_files and not status.f_favail):
        text = f"{free / GIB:.1f} GiB and {status.f_favail} files free in {folder}"
        yield failure("disk", text, "Free space, or set run.dir to another disk")
        return
    try:
        write, read = disk_speed(folder)
    except OSError as error:
        remedy = "Set run.dir to a folder that you may write to"
        yield failure("disk", f"cannot write in {folder}: {error.strerror}", remedy)
        return
    text = f"{free / GIB:.1f} GiB free in {folder}, writes {write / 1e6:.0f} MB/s, reads {read / 1e6:.0f} MB/s"
    yield judge_disk(text, write)


def disk_speed(folder: Path) -> tuple[float, float]:
    """Return the bytes per second of writing and reading a file. Raises OSError."""
    block = os.urandom(4 * 2**20)  # no disk compresses it
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        started = time.perf_counter()
        for _ in range(DISK_SAMPLE // len(block)):
            file.write(block)
        os.fsync(file.fileno())
        flushed = time.perf_counter()
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # read from the disk, not from memory
        file.seek(0)
        restarted = time.perf_counter()
        while file.read(len(block)):
            pass
        ended = time.perf_counter()
    return DISK_SAMPLE / max(flushed - started, 1e-9), DISK_SAMPLE / max(ended - restarted, 1e-9)


def judge_disk(text: str, write: float) -> CheckResult:
    """Return the result for a disk that writes this many bytes per second."""
    if write >= SLOWEST_DISK:
        return passed("disk", text)
    minutes = 12 * 8e9 / write / 60  # float32 weights and both moments of Adam
    remedy = f"Set run.dir to a faster disk, or save less often. A checkpoint of 8B parameters takes {minutes:.0f} min"
    return warning("disk", text, remedy)
