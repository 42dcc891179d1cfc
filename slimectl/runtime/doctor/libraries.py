"""Checks of torch, its kernels and collective operations, and of the engine's own Python, all in child processes."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

from slimectl.errors import SlimectlError
from slimectl.runtime import builders
from slimectl.runtime.check_result import CheckResult, failure, info, passed, warning
from slimectl.runtime.doctor.gpus import cuda_of
from slimectl.runtime.doctor.scope import Scope, run_within
from slimectl.system.stdio import quantity

PROBE_S = 180.0
"""Maximum seconds of a child process. The first kernels of a GPU compile."""
CUDA_DRIVERS = {11: 450, 12: 525, 13: 580}
"""Oldest driver release for every CUDA version (docs.nvidia.com/deploy/cuda-compatibility)."""
SLOWEST_SHARE = 0.8
"""A GPU with less than this share of the fastest one's speed is a warning."""
VERSIONS = "constraints-gpu.txt"
CUDA_REMEDIES = {
    "802": "Start nvidia-fabricmanager in the driver's version: `sudo systemctl restart nvidia-fabricmanager`",
    "system not yet initialized": "Start nvidia-fabricmanager: `sudo systemctl restart nvidia-fabricmanager`",
    "803": "Remove other versions of libcuda.so, such as /usr/local/cuda/compat, from LD_LIBRARY_PATH",
    "804": "Remove /usr/local/cuda/compat from LD_LIBRARY_PATH. This GPU does not support it",
    "too old": "Install a newer driver, or a torch for an older CUDA",
    "unknown error": "Reload the driver with `sudo rmmod nvidia_uvm && sudo modprobe nvidia_uvm`, or reboot",
    "out of memory": "Stop the processes that hold the GPU's memory",
    "no kernel image": "Install a torch that supports this GPU: a newer one for newer GPUs",
}
"""Remedies by what CUDA says."""
ONLY_FOR = {
    "grouped GEMM": "mixtures of experts on Megatron-core",
    "linear attention": "models such as Qwen3.5",
}
"""Kernels that few models need."""


class Probe:
    """The lines that a child process printed, and why it ended early, or ""."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "slimectl.runtime.doctor.probe", *arguments]
        stdout, stderr, code = run_within(command, PROBE_S)
        self.ended = "" if code == 0 else (stderr.strip().splitlines() or ["no message"])[-1]
        if code is None:
            self.ended = f"stopped after {PROBE_S:.0f} s"
        elif code < 0:
            self.ended = f"killed by {signal.Signals(-code).name}"
        self.lines: list[dict[str, Any]] = []
        for line in stdout.splitlines():
            with suppress(json.JSONDecodeError):  # libraries print, too
                self.lines.append(json.loads(line))

    def find(self, key: str) -> dict[str, Any] | None:
        """Return the last line with a key."""
        return next((line for line in reversed(self.lines) if key in line), None)


def libraries(scope: Scope) -> Iterator[CheckResult]:
    """Check torch's build against the driver, then kernels and collective operations on the devices."""
    if find_spec("torch") is None:
        yield info("torch", "not installed. To run models: pip install 'slimectl[torch]'")
        return
    expected = len(scope.visible) if scope.placement.on_gpu else 0
    probe = Probe("kernels", str(expected))
    torch = probe.find("version")
    if torch is None:
        remedy = "Install it again: pip install --force-reinstall 'slimectl[torch]'"
        yield failure("torch", f"cannot be imported: {probe.ended}", remedy)
        return
    build = _build(scope, torch, expected)
    yield build
    if build.fine is False:
        return
    yield from (_kernel(line) for line in probe.lines if "check" in line)
    if probe.ended:
        name = str((probe.find("begin") or torch)["begin"])
        yield failure(name, f"its process was {probe.ended}", f"Install it in the version of {VERSIONS}")
    ranks = torch["count"] or scope.placement.actor_gpus_per_node
    if torch["count"] or ranks > 1:
        yield _all_reduce(ranks, str(torch["nccl"]))


def _build(scope: Scope, torch: Mapping[str, Any], expected: int) -> CheckResult:
    """Return whether torch can use the GPUs."""
    name, built = f"torch {torch['version']}", torch["cuda"]
    if not expected:
        return passed("torch", f"{torch['version']}, {quantity(torch['threads'], 'thread')}")
    if built is None:
        remedy = f"Run: pip install --force-reinstall -c {VERSIONS} torch"
        return failure("torch", f"{name} is a build without CUDA, so {expected} GPUs stay unused", remedy)
    version, supported = tuple(int(part) for part in built.split(".")[:2]), cuda_of(scope)
    limit = ".".join(map(str, supported or ()))
    if supported and version[0] > supported[0]:
        release = CUDA_DRIVERS.get(version[0], "for it")
        remedy = f"Install driver release {release} or newer, or a torch for CUDA {supported[0]}"
        return failure("torch", f"{name} is for CUDA {built}, but the driver supports {limit}", remedy)
    if torch["error"]:
        remedy = _remedy(torch["error"], "Fix the findings about GPUs first. If there are none, reboot")
        return failure("torch", f"CUDA does not start: {torch['error']}", remedy)
    if torch["count"] < expected:
        text = f"{name} sees {torch['count']} of {expected} GPUs"
        return failure("torch", text, "Look at `sudo dmesg | grep -i xid`")
    if supported and version > supported:
        remedy = "Kernels that are compiled at run time may fail. Install a newer driver"
        return warning("torch", f"{name} is for CUDA {built}, the driver for {limit}", remedy)
    return passed("torch", f"{torch['version']} for CUDA {built}, NCCL {torch['nccl']}")


def _remedy(problem: str, default: str) -> str:
    """Return the remedy for a message of CUDA."""
    return next((remedy for part, remedy in CUDA_REMEDIES.items() if part in problem.lower()), default)


def _kernel(line: Mapping[str, Any]) -> CheckResult:
    name = str(line["check"])
    if "problem" in line:
        remedy = _remedy(line["problem"], f"Install it in the version of {VERSIONS}, or remove it")
        if name in ONLY_FOR:
            return warning(name, f"{line['problem']}. Only {ONLY_FOR[name]} need it", remedy)
        return failure(name, line["problem"], remedy)
    if "tflops" in line:
        slowest, fastest = min(line["tflops"]), max(line["tflops"])
        text = f"{slowest:.0f} to {fastest:.0f} TFLOP/s in bfloat16"
        if slowest < SLOWEST_SHARE * fastest:
            remedy = "Check its clocks, temperature and other processes. It sets the pace of every step"
            return warning(name, f"visible GPU {line['tflops'].index(slowest)} is slow: {text}", remedy)
        return passed(name, text)
    if not line["error"] <= line["tolerance"]:
        remedy = "Do not train here. Update torch and the driver, then test the GPU with `dcgmi diag -r 3`"
        return failure(name, f"wrong results: relative error {line['error']:.2g}", remedy)
    return passed(name, f"forward and backward, relative error {line['error']:.1g}")


def _all_reduce(ranks: int, nccl: str) -> CheckResult:
    """Sum numbers over all GPUs with NCCL, one process each, or over the ranks of a CPU with gloo."""
    probe = Probe("all_reduce", str(ranks), "nccl" if nccl else "gloo")
    name = f"NCCL {nccl}, {ranks} GPUs" if nccl else f"gloo, {ranks} processes"
    problem, done = probe.find("problem"), probe.find("seconds")
    if problem or done is None:
        text = str(problem["problem"]).splitlines()[0] if problem else probe.ended
        remedy = "Run it again with NCCL_DEBUG=INFO, then with NCCL_P2P_DISABLE=1. If that helps, check NVLink and ACS"
        if not nccl:
            remedy = "Unset GLOO_SOCKET_IFNAME, and check that processes may open sockets on 127.0.0.1"
        return failure("all_reduce", f"{name}: {text}", remedy)
    rate = 2 * (ranks - 1) / ranks * done["bytes"] / done["seconds"] / 1e9
    return passed("all_reduce", name + (f", {rate:.0f} GB/s each" if nccl and ranks > 1 else ""))


def engine(scope: Scope) -> Iterator[CheckResult]:
    """Check the engine's library in the Python that the settings name."""
    settings = scope.settings
    if settings.engine.url or find_spec("torch") is None:
        return
    try:
        has_gpu = bool(scope.visible) and settings.engine.device != "cpu"
        installation = builders.engine_backend(settings).examine(settings, has_gpu=has_gpu)
    except SlimectlError as error:
        message, _, remedy = str(error).partition(". ")
        yield failure("engine", message, remedy.rstrip(".") or "Change that setting")
        return
    if installation is None:
        return
    yield from (failure("engine", problem, f"Run: {installation.remedy}") for problem in installation.failures)
    if installation.conflicts:
        more = f", and {len(installation.conflicts) - 1} more" if len(installation.conflicts) > 1 else ""
        yield warning("engine", installation.conflicts[0] + more, f"If it does not start, run: {installation.remedy}")
    if not installation.failures:
        yield passed("engine", installation.description)
