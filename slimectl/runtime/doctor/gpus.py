"""Checks of NVIDIA GPUs: driver, visibility, memory, errors, clocks, modes, and the links between them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import combinations

from slimectl.runtime.check_result import CheckResult, failure, info, passed, warning
from slimectl.runtime.doctor.scope import Gpu, NvidiaSmiError, Scope, nvidia_smi
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
RESET = "Stop all work on it, then `sudo nvidia-smi --gpu-reset -i {gpus}`, or reboot"
HARDWARE_XIDS = {
    "48": "uncorrectable memory error", "62": "internal micro-controller halt", "64": "row remapping failed",
    "74": "NVLink error", "79": "GPU has fallen off the bus", "92": "many correctable memory errors",
    "94": "contained memory error", "95": "uncontained memory error", "119": "GSP timeout", "120": "GSP error",
    "140": "unrecovered memory error", "154": "GPU or machine needs a reset",
}  # fmt: skip
"""Xid errors of the hardware or driver (docs.nvidia.com/deploy/xid-errors). Programs cause most of the others."""
XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+)")
SLOWDOWNS = {
    "hw_thermal_slowdown": "too hot",
    "sw_thermal_slowdown": "too hot",
    "hw_power_brake_slowdown": "slowed down by the power supply",
}


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
        if count:
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
    busy = False
    for gpu in scope.visible:
        total, free = gpu.number("fb_memory_usage/total"), gpu.number("fb_memory_usage/free")
        used = gpu.number("fb_memory_usage/used")
        if total is None or free is None or used is None or used <= USED_SHARE * total:
            continue
        busy = True
        holders = [
            f"{process.findtext('process_name', '')} (pid {process.findtext('pid')}, {process.findtext('used_memory')})"
            for process in gpu.report.iter("process_info")
        ]
        text = f"GPU {gpu.index}: {free / 1024:.1f} of {total / 1024:.1f} GiB free, held by "
        text += ", ".join(holders) or "no listed process"
        remedy = "Stop these processes, or choose other GPUs with CUDA_VISIBLE_DEVICES"
        if not holders:
            remedy = "Find the process with `sudo fuser -v /dev/nvidia*`, or look in other containers"
        yield (failure if free < FREE_SHARE * total else warning)("GPU memory", text, remedy)
    if scope.visible and not busy:
        lowest = min((gpu.number("fb_memory_usage/free") or 0) / 1024 for gpu in scope.visible)
        yield passed("GPU memory", f"{lowest:.1f} GiB free on each")


def errors(scope: Scope) -> Iterator[CheckResult]:
    """Check memory errors, pending repairs, the fabric of NVSwitches, and Xid errors of the kernel's log."""
    findings = [
        *_those(scope, _uncorrectable, "uncorrectable memory errors since the driver was loaded", RESET),
        *_those(scope, _repair_pending, "a memory repair is pending", RESET),
        *_those(scope, _irreparable, "memory can no longer be repaired", "Replace GPU {gpus}"),
        *_those(scope, _needs_recovery, "the driver asks for a reset", RESET),
        *_those(
            scope,
            lambda gpu: gpu.text("fabric/state") in ("Not Started", "In Progress"),
            "not connected to the NVSwitches yet, so CUDA does not start",
            "Start nvidia-fabricmanager in the driver's version: `sudo systemctl restart nvidia-fabricmanager`",
        ),
        *_kernel_log(scope),
    ]
    yield from findings
    if scope.visible and not findings:
        yield passed("GPU errors", "none")


def _those(scope: Scope, is_bad: Callable[[Gpu], bool], text: str, remedy: str) -> Iterator[CheckResult]:
    """Yield a failure that lists the GPUs for which `is_bad` holds, if there are any."""
    if bad := [gpu for gpu in scope.visible if is_bad(gpu)]:
        yield failure(
            "GPU errors", f"{_names(bad, scope)}: {text}", remedy.format(gpus=",".join(str(g.index) for g in bad))
        )


def _uncorrectable(gpu: Gpu) -> bool:
    counters = (counter for counter in gpu.report.findall("ecc_errors/volatile/*") if "uncorrectable" in counter.tag)
    return any((counter.text or "").strip().strip("0").isdigit() for counter in counters)


def _repair_pending(gpu: Gpu) -> bool:
    fields = (
        "retired_pages/pending_retirement", "remapped_rows/remapped_row_pending", "ecc_errors/channel_repair_pending",
        "ecc_errors/tpc_repair_pending",
    )  # fmt: skip
    return any(gpu.text(field) == "Yes" for field in fields)


def _irreparable(gpu: Gpu) -> bool:
    return "Yes" in (gpu.text("remapped_rows/remapped_row_failure"), gpu.text("ecc_errors/unrepairable_memory"))


def _needs_recovery(gpu: Gpu) -> bool:
    action = gpu.text("gpu_recovery_action") or gpu.text("gpu_reset_status/reset_required")
    return action in ("Reset", "Reboot", "Drain P2P", "Drain and Reset", "Yes")


def _kernel_log(scope: Scope) -> Iterator[CheckResult]:
    """Yield the Xid errors of the hardware since the machine started. Only root may read the log on most systems."""
    counts: dict[tuple[str, str], int] = {}
    for device, code in XID.findall(_messages(scope)):
        if code in HARDWARE_XIDS:
            counts[device, code] = counts.get((device, code), 0) + 1
    for (device, code), count in counts.items():
        text = f"Xid {code} ({HARDWARE_XIDS[code]}) of {device} in the kernel's log, {quantity(count, 'time')}"
        remedy = (
            f"Reset the GPU or reboot. If Xid {code} returns, run `dcgmi diag -r 3`, and replace the GPU if it fails"
        )
        yield warning("GPU errors", text, remedy)


def _messages(scope: Scope) -> str:
    """Return the kernel's log. A read of /dev/kmsg returns one message, and by default waits after the last."""
    lines = []
    with suppress(OSError):  # no permission, or BlockingIOError after the last message
        descriptor = os.open(scope.root / "dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
        try:
            while line := os.read(descriptor, 8192):
                lines.append(line.decode(errors="replace"))
        finally:
            os.close(descriptor)
    return "".join(lines)


def clocks(scope: Scope) -> Iterator[CheckResult]:
    """Check what slows GPUs down: heat, power limits, narrow PCIe links."""
    findings = []
    for gpu in scope.visible:
        name = f"GPU {gpu.index}"
        active = [element.tag for element in gpu.report.iter() if (element.text or "").strip() == "Active"]
        reasons = {reason for key, reason in SLOWDOWNS.items() if any(tag.endswith(key) for tag in active)}
        for reason in sorted(reasons):
            degrees = gpu.text("temperature/gpu_temp")
            remedy = "Check fans, air flow and power cables. Until then the slowest GPU sets the pace of every step"
            findings.append(warning("GPU clocks", f"{name}: {reason}, at {degrees}", remedy))
        for section in ("gpu_power_readings", "power_readings"):  # drivers before 535 use the second name
            limit, default = (gpu.number(f"{section}/{key}_power_limit") for key in ("current", "default"))
            limit = limit or gpu.number(f"{section}/power_limit")
            if limit and default and limit < default:
                remedy = f"Raise it with `sudo nvidia-smi -i {gpu.index} -pl {default:.0f}`"
                findings.append(warning("GPU clocks", f"{name}: power limit {limit:.0f} W of {default:.0f} W", remedy))
        widths = "pci/pci_gpu_link_info/link_widths"
        width, widest = (gpu.number(f"{widths}/{key}_link_width") for key in ("current", "max"))
        if width and widest and width < widest:
            text = f"{name}: PCIe x{width:.0f} instead of x{widest:.0f}"
            findings.append(warning("GPU clocks", text, "Check the slot, the riser and the BIOS. Copies take longer"))
    yield from findings
    if scope.visible and not findings:
        yield passed("GPU clocks", "no heat or power slowdown, full PCIe width")


def modes(scope: Scope) -> Iterator[CheckResult]:
    """Check persistence, MIG and compute modes."""
    visible = scope.visible
    lazy = [gpu for gpu in visible if gpu.text("persistence_mode") == "Disabled"]
    if lazy:
        text = f"{_names(lazy, scope)}: persistence mode is off, so every start takes seconds longer"
        yield warning("GPU modes", text, "Turn it on with `sudo nvidia-smi -pm 1`, outside the container")
    sliced = [gpu for gpu in visible if gpu.text("mig_mode/current_mig") == "Enabled"]
    if sliced:
        text = f"{_names(sliced, scope)}: MIG is on, and NCCL cannot connect MIG slices"
        remedy = "Turn it off with `sudo nvidia-smi -mig 0`, or use settings for one GPU"
        yield (failure if scope.needed_gpus > 1 else warning)("GPU modes", text, remedy)
    closed = [gpu for gpu in visible if gpu.text("compute_mode") == "Prohibited"]
    exclusive = [gpu for gpu in visible if gpu.text("compute_mode") == "Exclusive_Process"]
    remedy = "Turn it off with `sudo nvidia-smi -c DEFAULT`"
    if closed:
        yield failure("GPU modes", f"{_names(closed, scope)}: compute mode Prohibited", remedy)
    if exclusive:
        text = f"{_names(exclusive, scope)}: compute mode Exclusive_Process, so trainer and engine cannot share a GPU"
        yield (failure if scope.settings.cluster.colocate else warning)("GPU modes", text, remedy)
    if visible and not (lazy or sliced or closed or exclusive):
        yield passed("GPU modes", "persistence on, MIG off, shared compute mode")


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


def _names(gpus: Sequence[Gpu], scope: Scope) -> str:
    if len(gpus) == len(scope.visible) > 1:
        return "all GPUs"
    return f"GPU{'s' if len(gpus) > 1 else ''} {', '.join(str(gpu.index) for gpu in gpus)}"
