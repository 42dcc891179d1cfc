"""This machine: its hardware and the installed packages, as results of checks."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from slimectl.redaction import redact_text

OPTIONAL = {
    "ray": ("ray", "--executor ray"),
    "megatron-core": ("megatron", "--backend megatron"),
    "tensorboard": ("tensorboard", "track.with = tensorboard"),
    "reasoning-gym": ("quickstart", "the quickstart recipe"),
    "pyarrow": ("parquet", "Parquet prompts"),
    "zstandard": ("zstd", ".zst records and delta weight pushes"),
    "xxhash": ("zstd", "delta weight pushes"),
}
MODULES = {"megatron-core": "megatron", "reasoning-gym": "reasoning_gym"}


@dataclass(frozen=True)
class CheckResult:
    """Result of one check; `fine` is None for information that is neither right nor wrong."""

    what: str
    fine: bool | None
    detail: str
    exit_code: int = 1
    """Exit code of the command if the check failed."""

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON, with `fine` null where there is nothing to pass."""
        return {"check": self.what, "fine": self.fine, "detail": redact_text(self.detail)}

    def __str__(self) -> str:
        mark = {True: "ok", False: "FAIL", None: "-"}[self.fine]
        return redact_text(f"{mark:<5} {self.what:<22} {self.detail}")


def machine() -> Iterator[CheckResult]:
    """Yield the installed packages and the hardware of this machine."""
    yield CheckResult("python", sys.version_info >= (3, 11), platform.python_version())
    yield from _torch()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield CheckResult("cores", None, str(cores))
    for folder in (Path(), Path("/dev/shm")):
        if folder.exists():
            free = shutil.disk_usage(folder).free / 2**30
            yield CheckResult(f"free in {folder.absolute()}", free > 1, f"{free:.1f} GiB")
    for package, (extra, purpose) in OPTIONAL.items():
        if find_spec(MODULES.get(package, package)) is None:
            yield CheckResult(package, None, f"absent; for {purpose}: pip install 'slimectl[{extra}]'")
        else:
            yield CheckResult(package, True, _version(package))


def _torch() -> Iterator[CheckResult]:
    """Yield torch's version and the GPUs that it sees, or how to install it."""
    try:
        import torch
    except ModuleNotFoundError:
        yield CheckResult("torch", None, "absent; for all that runs a model: pip install 'slimectl[torch]'")
        return
    cuda = torch.cuda.is_available()
    names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())) if cuda else "none"
    yield CheckResult("torch", True, f"{torch.__version__}, {torch.get_num_threads()} threads")
    yield CheckResult("GPUs", None, names)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "without metadata"
