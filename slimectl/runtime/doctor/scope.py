"""What the checks of a machine read: settings, files below a root, and one report of nvidia-smi.

The report is the XML of `nvidia-smi -q -x`: one call has everything, and a field that a driver does not know is absent.
A CSV query fails as a whole then, and NVML would be one more dependency.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from slimectl.planner.placement import Placement
from slimectl.settings import Settings

NVIDIA_SMI_S = 60.0
"""Maximum seconds of one call. Without persistence mode, the driver first initializes every GPU."""

CORRUPT_INFOROM = 14
"""Exit code of nvidia-smi with a whole report and a warning that a GPU's description of itself is damaged."""
LONGEST = 300
"""Maximum characters of a message of nvidia-smi."""


class NvidiaSmiError(Exception):
    """nvidia-smi failed. The message is what it printed."""


def nvidia_smi(*arguments: str) -> str:
    """Return what nvidia-smi prints. Raises NvidiaSmiError, and FileNotFoundError without the tool."""
    if (tool := shutil.which("nvidia-smi")) is None:
        raise FileNotFoundError("nvidia-smi")
    try:
        stdout, stderr, code = run_within([tool, *arguments], NVIDIA_SMI_S)
    except OSError as error:
        raise NvidiaSmiError(f"{tool} cannot run: {error.strerror}") from None
    if code is None:
        raise NvidiaSmiError(f"nvidia-smi does not answer within {NVIDIA_SMI_S:.0f} s")
    if code not in (0, CORRUPT_INFOROM) or not stdout.strip():
        message = " ".join((stdout + stderr).split())[:LONGEST]
        raise NvidiaSmiError(message or f"nvidia-smi ends with exit code {code}")
    return stdout


def run_within(command: Sequence[str], limit_s: float) -> tuple[str, str, int | None]:
    """Return stdout, stderr and exit code of a command. After `limit_s` it is killed, and the code is None.

    A process that hangs in a driver does not end, even if it is killed. It is then left behind.
    """
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True
    )
    try:
        stdout, stderr = child.communicate(timeout=limit_s)
        return stdout, stderr, child.returncode
    except subprocess.TimeoutExpired:
        _kill(child)
        with suppress(subprocess.TimeoutExpired):
            stdout, stderr = child.communicate(timeout=1)
            return stdout, stderr, None
    except BaseException:  # Ctrl-C does not reach the child's session
        _kill(child)
        raise
    return "", "", None


def _kill(child: subprocess.Popen[str]) -> None:
    """Kill a process and its children."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


@dataclass(frozen=True)
class Gpu:
    """A GPU as nvidia-smi reports it. `index` is its number there."""

    index: int
    report: Element

    def text(self, path: str) -> str:
        """Return the text of a field, or "" if the driver does not report it."""
        return (self.report.findtext(path) or "").strip()

    def texts(self, fields: str) -> list[str]:
        """Return the texts of all fields that have one of these names, separated by blanks."""
        return [(field.text or "").strip() for name in fields.split() for field in self.report.findall(f".//{name}")]

    def number(self, path: str) -> float | None:
        """Return a field without its unit, or None if the driver does not report it."""
        first, *_ = self.text(path).split() or [""]
        try:
            return float(first.rstrip("x"))  # a link width is 16x
        except ValueError:
            return None

    @property
    def name(self) -> str:
        return self.text("product_name")


@dataclass(frozen=True)
class Scope:
    """The settings to check for, and the root of the file system whose /proc, /sys and /dev are read."""

    settings: Settings
    root: Path = Path("/")

    @cached_property
    def report(self) -> Element:
        """The report of nvidia-smi. Raises NvidiaSmiError, and FileNotFoundError without the tool."""
        text = nvidia_smi("-q", "-x")
        try:
            return ElementTree.fromstring(text[: text.rfind(">") + 1])  # warnings may follow
        except ElementTree.ParseError:
            raise NvidiaSmiError(" ".join(text.split())[:LONGEST]) from None

    @cached_property
    def gpus(self) -> list[Gpu]:
        """All GPUs. Empty if nvidia-smi is missing or fails."""
        try:
            return [Gpu(index, report) for index, report in enumerate(self.report.iter("gpu"))]
        except (NvidiaSmiError, FileNotFoundError):
            return []

    @cached_property
    def visible_names(self) -> list[str] | None:
        """The entries of CUDA_VISIBLE_DEVICES, or None if it is not set."""
        value = os.environ.get("CUDA_VISIBLE_DEVICES")
        return None if value is None else [name.strip() for name in value.split(",") if name.strip()]

    @cached_property
    def visible(self) -> list[Gpu]:
        """The GPUs that this process may use. Like CUDA, ignores all entries after the first one that is wrong."""
        if self.visible_names is None:
            return self.gpus
        selected: list[Gpu] = []
        for name in self.visible_names:
            if (gpu := self.gpu_of(name)) is None:
                break
            selected += [gpu] if gpu not in selected else []
        return selected

    def gpu_of(self, name: str) -> Gpu | None:
        """Return the GPU that an entry of CUDA_VISIBLE_DEVICES names: a number, a UUID, or the beginning of one."""
        if name.isdecimal():
            return self.gpus[int(name)] if int(name) < len(self.gpus) else None
        if name.startswith("MIG-"):  # the report has no UUIDs of slices
            return next((gpu for gpu in self.gpus if gpu.text("mig_mode/current_mig") == "Enabled"), None)
        matches = [gpu for gpu in self.gpus if name.startswith("GPU-") and gpu.text("uuid").startswith(name)]
        return matches[0] if len(matches) == 1 else None

    @cached_property
    def placement(self) -> Placement:
        """The GPUs that the settings use. An engine in the trainer's process needs none of its own."""
        cluster, has_servers = self.settings.cluster, self.settings.uses_servers and not self.settings.engine.url
        return Placement(
            cluster.actor_num_nodes,
            cluster.actor_num_gpus_per_node,
            self.settings.engine_gpus if has_servers else (),
            cluster.num_gpus_per_node,
            cluster.colocate,
            on_gpu=self.settings.train.device != "cpu",
        )

    @property
    def needed_gpus(self) -> int:
        """GPUs that the settings use on one machine."""
        if not self.placement.on_gpu:
            return 0
        return min(len(self.placement.bundles), self.settings.cluster.num_gpus_per_node)

    def read(self, path: str) -> str:
        """Return the text of a file below the root, or "" if it cannot be read."""
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""
