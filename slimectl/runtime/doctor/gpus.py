"""Checks of NVIDIA GPUs: driver, visibility, memory, errors, clocks, modes, and the links between them."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import combinations
from typing import NamedTuple

from slimectl.runtime.check_result import CheckResult, failure, info, passed, warning
from slimectl.runtime.doctor.scope import NvidiaSmiError, Scope, nvidia_smi
from slimectl.system.stdio import quantity

NVIDIA_VENDOR = "0x10de"
DRIVER_REMEDIES = {
    "version mismatch": "The driver was updated while it was in use. Reboot the machine",
    "couldn't communicate": "Load the driver with `sudo modprobe nvidia`. After a kernel update, install it again",
    "No devices were found": "Look for a lost GPU with `sudo dmesg | grep -i xid`, then power-cycle the machine",
    "is lost": "Power-cycle the machine. If the GPU gets lost again, check its seating and power, or replace it",
    "Permissions": "Give your user access to /dev/nvidia*, for example with its group",
    "Unknown Error": "In a container, restart it, because it lost access to the GPUs. Otherwise reboot",
    "does not answer": "The driver hangs. Look at `sudo dmesg | grep -i xid`, then reboot",
}
"""Remedies by what nvidia-smi prints."""
FREE_SHARE, USED_SHARE = 0.5, 0.1
"""Less free memory than the first fails. More used memory than the second is a warning."""
HARDWARE_XIDS = {
    "48": "uncorrectable memory error", "62": "internal micro-controller halt", "64": "row remapping failed",
    "74": "NVLink error", "79": "GPU has fallen off the bus", "92": "many correctable memory errors",
    "94": "contained memory error", "95": "uncontained memory error", "119": "GSP timeout", "120": "GSP error",
    "140": "unrecovered memory error", "154": "GPU or machine needs a reset",
}  # fmt: skip
"""Xid errors of the hardware or driver (docs.nvidia.com/deploy/xid-errors). Programs cause most of the others."""
XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+)")
FINE = {
    "GPU errors": "none",
    "GPU clocks": "no heat or power slowdown, full PCIe width",
    "GPU modes": "persistence on, MIG off, shared compute mode",
}
"""Checks of the report's fields, with the result of each without a finding."""


class Rule(NamedTuple):
    """A finding for all GPUs in which a field (the end of its path) has a bad value, a regular expression."""

    name: str
    fields: str
    bad: str
    text: str
    remedy: str
    fails: Callable[[Scope], bool] = lambda _: True


RESET = "Stop all work on it, then `sudo nvidia-smi --gpu-reset -i {gpus}`, or reboot"
HEAT = "Check fans, air flow and power cables. Until then the slowest GPU sets the pace of every step"
RULES = (
    Rule(
        "GPU errors",
        "volatile/sram_uncorrectable volatile/sram_uncorrectable_parity volatile/sram_uncorrectable_secded "
        "volatile/dram_uncorrectable",
        r"[1-9]\d*", "uncorrectable memory errors since the driver was loaded", RESET,
    ),
    Rule(
        "GPU errors",
        "pending_retirement remapped_row_pending channel_repair_pending tpc_repair_pending",
        "Yes", "a memory repair is pending", RESET,
    ),
    Rule(
        "GPU errors", "remapped_row_failure unrepairable_memory", "Yes",
        "memory can no longer be repaired", "Replace GPU {gpus}",
    ),
    Rule(
        "GPU errors", "gpu_recovery_action reset_required", "Reset|Reboot|Drain.*|Yes",
        "the driver asks for a reset", RESET,
    ),
    Rule(
        "GPU errors", "fabric/state", "Not Started|In Progress",
        "not connected to the NVSwitches yet, so CUDA does not start",
        "Start nvidia-fabricmanager in the driver's version: `sudo systemctl restart nvidia-fabricmanager`",
    ),
    Rule(
        "GPU clocks",
        "clocks_event_reason_hw_thermal_slowdown clocks_event_reason_sw_thermal_slowdown "
        "clocks_throttle_reason_hw_thermal_slowdown clocks_throttle_reason_sw_thermal_slowdown",  # before driver 535
        "Active", "too hot", HEAT, lambda _: False,
    ),
    Rule(
        "GPU clocks",
        "clocks_event_reason_hw_power_brake_slowdown clocks_throttle_reason_hw_power_brake_slowdown",
        "Active", "slowed down by the power supply", HEAT, lambda _: False,
    ),
    Rule(
        "GPU modes", "persistence_mode", "Disabled", "persistence mode is off, so every start takes seconds longer",
        "Turn it on with `sudo nvidia-smi -pm 1`, outside the container", lambda _: False,
    ),
    Rule(
        "GPU modes", "current_mig", "Enabled", "MIG is on, and NCCL cannot connect MIG slices",
        "Turn it off with `sudo nvidia-smi -mig 0`, or use settings for one GPU", lambda scope: scope.needed_gpus > 1,
    ),
    Rule(
        "GPU modes", "compute_mode", "Prohibited", "compute mode Prohibited",
        "Change it with `sudo nvidia-smi -c DEFAULT`",
    ),
    Rule(
        "GPU modes", "compute_mode", "Exclusive_Process",
        "compute mode Exclusive_Process, so trainer and engine cannot share a GPU",
        "Change it with `sudo nvidia-smi -c DEFAULT`", lambda scope: scope.settings.cluster.colocate,
    ),
)  # fmt: skip


def driver(scope: Scope) -> Iterator[CheckResult]:
    """Check that the driver answers, and list its version and the GPUs."""
    try:
        report = scope.report
    except FileNotFoundError:
        devices = (scope.root / "sys/bus/pci/devices").glob("*")
        count = sum(
            scope.read(f"{device}/vendor") == NVIDIA_VENDOR and scope.read(f"{device}/class").startswith("0x03")
            for device in devices
        )
        if count and (scope.root / "dev/nvidiactl").exists():
            remedy = "Start the container with NVIDIA_DRIVER_CAPABILITIES=compute,utility"
            yield warning("driver", f"{count} GPUs, but no nvidia-smi, so they cannot be checked", remedy)
        elif count:
            remedy = "Install the NVIDIA driver. In a container, start it with `--gpus all` and the utility capability"
            yield failure("driver", f"{count} NVIDIA GPUs on the PCI bus, but no nvidia-smi", remedy)
        else:
            yield info("GPUs", "none, so models run on the CPU")
        return
    except NvidiaSmiError as error:
        text = str(error)
        default = "Run `nvidia-smi` to see the whole message, then install the driver again or reboot"
        yield failure(
            "driver", text, next((DRIVER_REMEDIES[part] for part in DRIVER_REMEDIES if part in text), default)
        )
        return
    version = report.findtext("driver_version")
    yield passed("driver", f"{version}, for CUDA up to {'.'.join(map(str, cuda_of(scope) or ('?',)))}")


def cuda_of(scope: Scope) -> tuple[int, ...] | None:
    """Return the newest CUDA version that the driver supports. Drivers since 610 name it after the user-mode driver."""
    with suppress(NvidiaSmiError, FileNotFoundError, ValueError):
        text = scope.report.findtext("cuda_version") or scope.report.findtext("cuda_umd_version") or ""
        return tuple(int(part) for part in text.split("."))
    return None


def visibility(scope: Scope) -> Iterator[CheckResult]:
    """Check CUDA_VISIBLE_DEVICES, and whether there are as many GPUs as the settings use."""
    gpus, visible, names = scope.gpus, scope.visible, scope.visible_names
    if not gpus:
        if scope.settings.train.device == "cuda":
            yield failure("GPUs", "train.device = cuda, but there is no GPU", "Set train.device = auto or cpu")
        return
    counted = f"{len(visible)} of {len(gpus)}" if len(visible) < len(gpus) else str(len(gpus))
    kinds = ", ".join(dict.fromkeys(gpu.name for gpu in visible or gpus))
    wrong = [name for name in names or () if scope.gpu_of(name) is None]
    if wrong:
        remedy = f"Set it to numbers from 0 to {len(gpus) - 1} or UUIDs of `nvidia-smi -L`, or unset it"
        value = os.environ["CUDA_VISIBLE_DEVICES"]
        yield failure("GPUs", f"CUDA_VISIBLE_DEVICES={value} names absent GPUs ({', '.join(wrong)})", remedy)
    elif not visible:
        yield failure("GPUs", f"CUDA_VISIBLE_DEVICES is empty and hides {len(gpus)} GPUs ({kinds})", "Unset it")
    elif len(visible) < scope.needed_gpus:
        remedy = "Use more GPUs, lower cluster.actor_num_gpus_per_node or engine.num_engines, or set cluster.colocate"
        yield failure("GPUs", f"{counted} ({kinds}), but the settings use {scope.needed_gpus}", remedy)
    else:
        yield passed("GPUs", f"{counted} x {kinds}")


def memory(scope: Scope) -> Iterator[CheckResult]:
    """Check that no other process holds the memory of the GPUs."""
    free_gib: list[float] = []
    for gpu in scope.visible:
        total, used, free = (gpu.number(f"fb_memory_usage/{name}") for name in ("total", "used", "free"))
        if total is None or used is None or free is None:
            continue  # memory that GPU and CPU share
        free_gib.append(free / 1024)
        if used <= USED_SHARE * total:
            continue
        holders = ", ".join(
            f"{process.findtext('process_name')} (pid {process.findtext('pid')}, {process.findtext('used_memory')})"
            for process in gpu.report.iter("process_info")
        )
        remedy = "Stop these processes, or choose other GPUs with CUDA_VISIBLE_DEVICES"
        if not holders:
            remedy = "Find the process with `sudo fuser -v /dev/nvidia*`, or look in other containers"
        text = f"GPU {gpu.index}: {free / 1024:.1f} of {total / 1024:.1f} GiB free"
        result = failure if free < FREE_SHARE * total else warning
        yield result("GPU memory", f"{text}, held by {holders or 'no listed process'}", remedy)
    if free_gib:
        yield info("free GPU memory", f"{min(free_gib):.1f} to {max(free_gib):.1f} GiB")


def fields(scope: Scope) -> Iterator[CheckResult]:
    """Check the report's fields for errors, slowdowns and modes, and the kernel's log for Xid errors."""
    findings = []
    for rule in RULES:
        bad = [gpu for gpu in scope.visible if any(re.fullmatch(rule.bad, text) for text in gpu.texts(rule.fields))]
        if bad:
            names = f"GPU{'s' if len(bad) > 1 else ''} {', '.join(str(gpu.index) for gpu in bad)}"
            text = f"{'all GPUs' if len(bad) == len(scope.visible) > 1 else names}: {rule.text}"
            remedy = rule.remedy.format(gpus=",".join(str(gpu.index) for gpu in bad))
            findings.append((failure if rule.fails(scope) else warning)(rule.name, text, remedy))
    findings += [*_kernel_log(scope), *_limits(scope)]
    for name, text in FINE.items() if scope.visible else ():
        ours = [finding for finding in findings if finding.what == name]
        yield from ours or [passed(name, text)]


def _kernel_log(scope: Scope) -> Iterator[CheckResult]:
    """Yield the Xid errors of the hardware since the machine started. Only root may read the log on most systems."""
    lines = []
    with suppress(OSError):  # no permission, or BlockingIOError after the last message
        descriptor = os.open(scope.root / "dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
        try:
            while line := os.read(descriptor, 8192):  # one message
                lines.append(line.decode(errors="replace"))
        finally:
            os.close(descriptor)
    for (device, code), count in Counter(XID.findall("".join(lines))).items():
        if code in HARDWARE_XIDS:
            text = f"Xid {code} ({HARDWARE_XIDS[code]}) of {device} in the kernel's log, {quantity(count, 'time')}"
            remedy = f"Reset the GPU or reboot. If Xid {code} returns, test the GPU with `dcgmi diag -r 3`"
            yield warning("GPU errors", text, remedy)


def _limits(scope: Scope) -> Iterator[CheckResult]:
    """Yield power limits below the default, and PCIe links with fewer lanes than possible."""
    for gpu in scope.visible:
        limit, default = (gpu.number(f"gpu_power_readings/{name}_power_limit") for name in ("current", "default"))
        if limit and default and limit < default:
            remedy = f"Raise it with `sudo nvidia-smi -i {gpu.index} -pl {default:.0f}`"
            yield warning("GPU clocks", f"GPU {gpu.index}: power limit {limit:.0f} W of {default:.0f} W", remedy)
        folder = "pci/pci_gpu_link_info/link_widths"
        lanes, widest = (gpu.number(f"{folder}/{name}_link_width") for name in ("current", "max"))
        if lanes and widest and lanes < widest:
            text = f"GPU {gpu.index}: PCIe x{lanes:.0f} instead of x{widest:.0f}"
            yield warning("GPU clocks", text, "Check the slot, the riser and the BIOS. Copies take longer")


def links(scope: Scope) -> Iterator[CheckResult]:
    """Check NVLink and peer-to-peer access between the visible GPUs."""
    indices = [gpu.index for gpu in scope.visible]
    pairs = list(combinations(indices, 2))
    if not pairs:
        return
    try:
        kinds = _matrix(nvidia_smi("topo", "-m"))
        access = _matrix(nvidia_smi("topo", "-p2p", "r"))
        connections = [kinds[pair] for pair in pairs]
        blocked = {pair: state for pair in pairs if (state := access[pair]) != "OK"}
    except (NvidiaSmiError, FileNotFoundError, KeyError) as error:
        yield info("GPU links", f"unknown: {error}")
        return
    if blocked:
        pair, state = next(iter(blocked.items()))
        text = f"no peer-to-peer in {len(blocked)} of {len(pairs)} pairs, such as {pair[0]} and {pair[1]} ({state})"
        remedy = "NCCL copies through host memory. On bare metal turn off ACS and the IOMMU. Consumer GPUs have none"
        yield warning("GPU links", text, remedy)
    nvlinks = sorted({kind for kind in connections if kind.startswith("NV")}, key=lambda kind: int(kind[2:]))
    on_all = all(kind.startswith("NV") for kind in connections)
    if on_all and len(nvlinks) > 1:
        text = f"different numbers of NVLinks between pairs: {', '.join(nvlinks)}"
        yield warning("GPU links", text, "Links may be down. Look at `nvidia-smi nvlink -s`, then reset the GPUs")
    elif not blocked:
        described = "NVLink" if on_all else "NVLink between some pairs" if nvlinks else "PCIe, no NVLink"
        yield passed("GPU links", f"{described} ({', '.join(sorted(set(connections)))}), peer-to-peer")


def _matrix(text: str) -> dict[tuple[int, int], str]:
    """Return the cells of a matrix of `nvidia-smi topo` by their GPUs."""
    rows = [re.sub(r"\x1b\[\d*m", "", line).split() for line in text.splitlines()]
    rows = [row for row in rows if row and re.fullmatch(r"GPU\d+", row[0])]
    header = next((row for row in rows if row[1:2] == ["GPU1"]), None)
    body = [row for row in rows if row is not header]
    names = [row[0] for row in body]
    return {(int(row[0][3:]), int(name[3:])): cell for row in body for name, cell in zip(names, row[1:], strict=False)}
