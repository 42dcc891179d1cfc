"""Self-test: checks the machine and its packages, and that engine and trainer compute equal log-probabilities."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from slimectl import builders
from slimectl.data.hashing import tensor_checksum
from slimectl.hooks.user_hooks import UserHooks
from slimectl.protocols import Policy
from slimectl.runtime.rollout_worker import RolloutService
from slimectl.settings import Settings
from slimectl.stages.run import run
from slimectl.types import Prompt, SamplerState

OPTIONAL = {
    "ray": ("ray", "--executor ray"),
    "megatron-core": ("megatron", "--backend megatron"),
    "tensorboard": ("tensorboard", "track.with = tensorboard"),
    "reasoning-gym": ("quickstart", "the quickstart recipe"),
    "pyarrow": ("parquet", "Parquet prompts"),
    "zstandard": ("zstd", ".zst records and delta weight pushes"),
}
MODULES = {"megatron-core": "megatron", "reasoning-gym": "reasoning_gym"}
QUESTIONS = ("The capital of France is", "One, two, three,", "Water boils at", "Once upon a time", "def add(a, b):")


@dataclass(frozen=True)
class CheckResult:
    """Result of one check; `fine` is None for information that is neither right nor wrong."""

    what: str
    fine: bool | None
    detail: str

    def __str__(self) -> str:
        mark = {True: "ok", False: "FAIL", None: "-"}[self.fine]
        return f"{mark:<5} {self.what:<22} {self.detail}"


def machine() -> Iterator[CheckResult]:
    """Yield the installed packages and the hardware of this machine."""
    import torch

    yield CheckResult("python", sys.version_info >= (3, 11), platform.python_version())
    cuda = torch.cuda.is_available()
    names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())) if cuda else "none"
    yield CheckResult("torch", True, f"{torch.__version__}, {torch.get_num_threads()} threads")
    yield CheckResult("GPUs", None, names)
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


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "without metadata"


def questions() -> Iterator[Prompt]:
    """Yield prompts that any language model can continue."""
    for index, text in enumerate(QUESTIONS):
        yield Prompt(text, label="", index=index)


def self_test(settings: Settings, *, steps: int) -> Iterator[CheckResult]:
    """Run `steps` rounds of the real loop with learning rate 0; no weight may change, and log-probabilities must match.

    Engine and trainer compute the probability of the same tokens from the same weights; a difference beyond rounding
    is an error in weights, positions, masks or temperature.
    """
    model = builders.model_folder(settings.model.path)
    with TemporaryDirectory(prefix="slimectl-doctor-") as scratch:
        executor = builders.executor(settings, logs=Path(scratch) / "logs")
        side = policy = sync = None
        try:
            policy = builders.policy(settings, model, total_steps=None, lr=0.0, executor=executor)
            side = RolloutService(settings, model, executor=executor, folder=Path(scratch))
            sync = side.sync(policy)
            initial = _checksums(policy)
            reports = run(
                partial(side.sampler.rounds, SamplerState()),
                policy,
                sync,
                settings,
                executor=executor,
                hooks=UserHooks(settings),
            )
            for report, _ in zip(reports, range(steps), strict=False):
                difference = report.metrics.get("train/train_rollout_logprob_abs_diff", float("nan"))
                allowed = settings.run.max_logprob_mismatch or float("inf")
                detail = f"{difference:.2e} a token between engine and trainer, {allowed:g} allowed"
                yield CheckResult(f"agreement, step {report.step}", difference <= allowed, detail)
            changed = [name for name, checksum in _checksums(policy).items() if initial[name] != checksum]
            detail = (
                f"{len(initial)} tensors"
                if not changed
                else f"{len(changed)} of {len(initial)} moved, first {changed[0]}"
            )
            yield CheckResult(f"weights after {steps} steps", not changed, detail)
        finally:
            for part in (sync, side, policy, executor):
                if part is not None:
                    part.close()


def _checksums(policy: Policy) -> dict[str, str]:
    return {name: tensor_checksum(tensor) for name, tensor in policy.weights()}
