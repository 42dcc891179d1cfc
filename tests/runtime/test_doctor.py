"""slimectl doctor on machines with faults: each has its finding and its remedy, which docs/guides/doctor.md lists."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest
from gpu_machine import PROCESS, GpuMachine

from slimectl.engines.supervisor.installed import conflicts
from slimectl.runtime.check_result import CheckResult
from slimectl.runtime.doctor import checks, environment, gpus, host, libraries, probe, scope
from slimectl.runtime.doctor.scope import Scope
from slimectl.settings import Settings

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "doctor.md"
CLEARED = ("CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_P2P_DISABLE")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GpuMachine:
    made = GpuMachine(tmp_path / "a machine")
    monkeypatch.setenv("PATH", f"{made.folder / 'bin'}:{os.environ['PATH']}")
    for name in CLEARED:
        monkeypatch.delenv(name, raising=False)
    return made


class Case:
    """What a fault is made with: the machine, the environment, and settings by section."""

    def __init__(self, machine: GpuMachine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.machine, self.settings, self.setenv = machine, dict[str, dict[str, object]](), monkeypatch.setenv
        self.limits, self.setattr = ExitStack(), monkeypatch.setattr

    def scope(self) -> Scope:
        return Scope(Settings.model_validate(self.settings), self.machine.root)

    def limit(self, kind: int, number: int) -> None:
        """Lower a limit of this process until the end of the test."""
        before = resource.getrlimit(kind)
        self.limits.callback(resource.setrlimit, kind, before)
        resource.setrlimit(kind, (number, before[1]))

    def torch(self, *, cuda: str = "13.0", error: str = "", count: int = 2) -> None:
        """Put a package before torch that answers as a torch with these GPUs would. It is imported by a real child."""
        folder = self.machine.folder / "packages" / "torch"
        (folder / "nn").mkdir(parents=True)
        for name in ("distributed.py", "nn/__init__.py", "nn/functional.py"):
            (folder / name).touch()
        (folder / "__init__.py").write_text(TORCH.format(cuda=cuda, error=error, count=count))
        self.setenv("PYTHONPATH", f"{folder.parent}:{os.environ.get('PYTHONPATH', '')}")


TORCH = """
from types import SimpleNamespace as Space
__version__ = "2.13.0"
version = Space(cuda="{cuda}")
def init():
    if "{error}":
        raise RuntimeError("{error}")
cuda = Space(
    init=init, device_count=lambda: {count}, nccl=Space(version=lambda: (2, 29, 7)),
)
get_num_threads = lambda: 1
Tensor = object
"""


class Fault(NamedTuple):
    """A fault: how it is made, the check that finds it, and what it must say."""

    name: str
    check: Callable[[Scope], Iterator[CheckResult]]
    make: Callable[[Case], object]
    status: str
    finding: str
    remedy: str


def without_tool(case: Case) -> None:
    (case.machine.folder / "bin" / "nvidia-smi").unlink()
    case.setenv("PATH", str(case.machine.folder / "bin"))
    for bus in ("0000:01:00.0", "0000:02:00.0"):
        case.machine.write(f"sys/bus/pci/devices/{bus}/vendor", "0x10de\n")
        case.machine.write(f"sys/bus/pci/devices/{bus}/class", "0x030200\n")
    case.machine.write("sys/bus/pci/devices/0000:03:00.0/vendor", "0x8086\n")


def hanging(case: Case) -> None:
    (case.machine.folder / "bin" / "nvidia-smi").write_text("#!/bin/sh\nsleep 60\n")
    case.setattr(scope, "NVIDIA_SMI_S", 0.1)


def held(case: Case, *, pid: str | None = "4211") -> None:
    memory = "<used>4 MiB</used><free>81005 MiB</free>"
    case.machine.change(memory, "<used>70900 MiB</used><free>10108 MiB</free>", gpu=1)
    if pid is not None:
        case.machine.change("<processes></processes>", f"<processes>{PROCESS.format(pid=pid)}</processes>", gpu=1)


def xids(case: Case) -> None:
    line = "NVRM: Xid (PCI:0000:02:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
    application = "NVRM: Xid (PCI:0000:01:00): 31, pid=4211, name=python, Ch 00000008, MMU Fault"
    case.machine.write("dev/kmsg", f"4,1,2,-;{line}\n4,2,3,-;{application}\n")


def setting(section: str, **values: object) -> Callable[[Case], object]:
    return lambda case: case.settings.update({section: values})


def changed(old: str, new: str, gpu: int | None = 1) -> Callable[[Case], object]:
    return lambda case: case.machine.change(old, new, gpu=gpu)


def variable(name: str, value: str) -> Callable[[Case], object]:
    return lambda case: case.setenv(name, value)


def element(tag: str, old: str, new: str) -> Callable[[Case], object]:
    return changed(f"<{tag}>{old}</{tag}>", f"<{tag}>{new}</{tag}>")


def both(*makers: Callable[[Case], object]) -> Callable[[Case], object]:
    return lambda case: [make(case) for make in makers]


def blocked_peers(case: Case) -> None:
    case.machine.matrix("topology", [[" X ", "SYS"], ["SYS", " X "]])
    case.machine.matrix("peers", [[" X ", "CNS"], ["CNS", " X "]])


def broken_torch(case: Case) -> None:
    case.torch()
    package = case.machine.folder / "packages" / "torch" / "__init__.py"
    package.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")


def cuda_libraries(case: Case) -> None:
    folder = case.machine.folder / "cuda" / "lib64"
    folder.mkdir(parents=True)
    (folder / "libnccl.so.2").touch()
    case.setenv("LD_LIBRARY_PATH", f"/nowhere:{folder}")


def other_python(case: Case) -> None:
    case.settings |= {"engine": {"backend": "sglang"}, "sglang": {"python": sys.executable}}


def no_python(case: Case) -> None:
    case.settings |= {"engine": {"backend": "vllm"}, "vllm": {"python": "/opt/vllm/bin/python"}}


def quota(case: Case) -> None:
    case.machine.write("proc/self/cgroup", "0::/system.slice/slurm/job_7\n")
    case.machine.write("sys/fs/cgroup/system.slice/slurm/job_7/cpu.max", "max 100000\n")
    case.machine.write("sys/fs/cgroup/system.slice/slurm/cpu.max", "50000 100000\n")
    case.machine.write("sys/fs/cgroup/system.slice/slurm/job_7/memory.max", f"{40 * 2**30}\n")
    case.machine.write("sys/fs/cgroup/system.slice/slurm/job_7/memory.current", f"{30 * 2**30}\n")
    case.machine.write(
        "sys/fs/cgroup/system.slice/slurm/job_7/memory.stat", f"anon {2**30}\ninactive_file {20 * 2**30}\n"
    )


def old_group(case: Case) -> None:
    case.machine.write("proc/self/cgroup", "5:cpu,cpuacct:/docker/ab\n4:memory:/docker/ab\n3:pids:/docker/ab\n")
    case.machine.write("sys/fs/cgroup/pids/docker/ab/pids.max", "100\n")
    case.machine.write("sys/fs/cgroup/memory/docker/ab/memory.limit_in_bytes", f"{2**29}\n")
    case.machine.write("sys/fs/cgroup/memory/docker/ab/memory.usage_in_bytes", f"{2**27}\n")


def small_shared_memory(case: Case) -> None:
    """A file system without space."""
    (case.machine.root / "dev/shm/.keep").unlink()
    (case.machine.root / "dev/shm").rmdir()
    (case.machine.root / "dev/shm").symlink_to("/proc")


def infiniband(case: Case) -> None:
    case.machine.write("sys/class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE\n")
    case.limit(resource.RLIMIT_MEMLOCK, 64 * 1024)


def result_of(line: dict[str, object]) -> Callable[[Scope], Iterator[CheckResult]]:
    """Return a check whose child printed this line."""
    return lambda scope: iter([libraries._kernel(line)])


def all_reduce(scope: Scope) -> Iterator[CheckResult]:
    yield libraries._all_reduce(2, "")


def nothing(case: Case) -> None: ...


def loopback_name(given: Scope) -> Iterator[CheckResult]:
    """Run the check in a process whose host is named localhost."""
    code = (
        "import dataclasses, json, sys\nfrom pathlib import Path\n"
        "from slimectl.runtime.doctor import environment, scope\n"
        "from slimectl.settings import Settings\n"
        "machine = scope.Scope(Settings.model_validate(json.loads(sys.argv[1])), Path(sys.argv[2]))\n"
        "print(json.dumps([dataclasses.asdict(result) for result in environment.network(machine)]))"
    )
    settings = given.settings.model_dump_json(include={"cluster"})
    inside = ["sh", "-c", 'hostname localhost && "$@"', "sh", sys.executable, "-c", code, settings, str(given.root)]
    done = subprocess.run(["unshare", "-ru", *inside], capture_output=True, text=True, check=False)
    if "unshare" in done.stderr:
        pytest.skip("needs user namespaces")
    yield from (CheckResult(**result) for result in json.loads(done.stdout))


SEEN = "<clocks_event_reason_hw_thermal_slowdown>{}</clocks_event_reason_hw_thermal_slowdown>"
LIMIT = "<current_power_limit>{} W</current_power_limit>"
WIDTH = "<current_link_width>{}x</current_link_width>"
NO_DRIVER = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. "
MISMATCH = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.126"
NO_IMAGE = "AcceleratorError: CUDA error: no kernel image is available for execution on the device"
LOST = "Unable to determine the device handle for GPU0000:02:00.0: GPU is lost.  Reboot the system to recover this GPU"

FAULTS = [
    Fault("no driver", gpus.driver, without_tool, "FAIL", "2 NVIDIA GPUs on the PCI bus", "Install the NVIDIA driver"),
    Fault("no nvidia-smi in a container", gpus.driver,
          both(without_tool, lambda case: case.machine.write("dev/nvidiactl", "")), "warn",
          "2 GPUs, but no nvidia-smi", "NVIDIA_DRIVER_CAPABILITIES=compute,utility"),
    Fault("driver not loaded", gpus.driver, lambda case: case.machine.fail(NO_DRIVER), "FAIL",
          "couldn't communicate", "sudo modprobe nvidia"),
    Fault("driver updated in use", gpus.driver, lambda case: case.machine.fail(MISMATCH), "FAIL",
          "version mismatch NVML library version: 580.126", "Reboot"),
    Fault("driver hangs", gpus.driver, hanging, "FAIL", "nvidia-smi does not answer within 0 s", "dmesg"),
    Fault("GPU lost", gpus.driver, lambda case: case.machine.fail(LOST), "FAIL", "GPU is lost", "Power-cycle"),
    Fault("GPUs gone from a container", gpus.driver,
          lambda case: case.machine.fail("Failed to initialize NVML: Unknown Error"), "FAIL", "Unknown Error",
          "In a container, restart it"),
    Fault("absent GPU in CUDA_VISIBLE_DEVICES", gpus.visibility, variable("CUDA_VISIBLE_DEVICES", "0,5"), "FAIL",
          "CUDA_VISIBLE_DEVICES=0,5 names absent GPUs (5)", "numbers from 0 to 1"),
    Fault("empty CUDA_VISIBLE_DEVICES", gpus.visibility, variable("CUDA_VISIBLE_DEVICES", ""), "FAIL",
          "hides 2 GPUs", "Unset it"),
    Fault("fewer GPUs than the settings use", gpus.visibility, setting("cluster", actor_num_gpus_per_node=4), "FAIL",
          "2 (NVIDIA H100 80GB HBM3), but the settings use 4", "cluster.actor_num_gpus_per_node"),
    Fault("memory held by a process", gpus.memory, held, "FAIL",
          "GPU 1: 9.9 of 79.6 GiB free, held by python (pid 4211, 70144 MiB)", "Stop these processes"),
    Fault("memory held by an unlisted process", gpus.memory, lambda case: held(case, pid=None), "FAIL",
          "held by no listed process", "sudo fuser -v /dev/nvidia*"),
    Fault("uncorrectable memory error", gpus.fields, element("dram_uncorrectable", "0", "2"), "FAIL",
          "GPU 1: uncorrectable memory errors", "sudo nvidia-smi --gpu-reset -i 1"),
    Fault("row remapping pending", gpus.fields, element("remapped_row_pending", "No", "Yes"), "FAIL",
          "GPU 1: a memory repair is pending", "--gpu-reset -i 1"),
    Fault("row remapping failed", gpus.fields, element("remapped_row_failure", "No", "Yes"), "FAIL",
          "GPU 1: memory can no longer be repaired", "Replace GPU 1"),
    Fault("driver asks for a reset", gpus.fields, element("gpu_recovery_action", "None", "Drain and Reset"), "FAIL",
          "GPU 1: the driver asks for a reset", "--gpu-reset -i 1"),
    Fault("Xid errors", gpus.fields, xids, "warn", "Xid 79 (GPU has fallen off the bus) of 0000:02:00",
          "dcgmi diag -r 3"),
    Fault("fabric manager not running", gpus.fields,
          changed("<state>Completed</state>", "<state>In Progress</state>", None), "FAIL",
          "all GPUs: not connected to the NVSwitches", "systemctl restart nvidia-fabricmanager"),
    Fault("overheated", gpus.fields, changed(SEEN.format("Not Active"), SEEN.format("Active")), "warn",
          "GPU 1: too hot", "Check fans"),
    Fault("power limit", gpus.fields, changed(LIMIT.format("700.00"), LIMIT.format("400.00")), "warn",
          "GPU 1: power limit 400 W of 700 W", "sudo nvidia-smi -i 1 -pl 700"),
    Fault("narrow PCIe link", gpus.fields, changed(WIDTH.format(16), WIDTH.format(4)), "warn",
          "GPU 1: PCIe x4 instead of x16", "Check the slot"),
    Fault("persistence mode off", gpus.fields, element("persistence_mode", "Enabled", "Disabled"), "warn",
          "GPU 1: persistence mode is off", "sudo nvidia-smi -pm 1"),
    Fault("MIG", gpus.fields,
          both(element("current_mig", "Disabled", "Enabled"), setting("cluster", actor_num_gpus_per_node=2)), "FAIL",
          "GPU 1: MIG is on", "sudo nvidia-smi -mig 0"),
    Fault("exclusive compute mode", gpus.fields,
          both(element("compute_mode", "Default", "Exclusive_Process"), setting("cluster", colocate=True)), "FAIL",
          "trainer and engine cannot share a GPU", "sudo nvidia-smi -c DEFAULT"),
    Fault("no peer-to-peer", gpus.links, blocked_peers, "warn",
          "no peer-to-peer in 1 of 1 pairs, such as 0 and 1 (CNS)", "turn off ACS"),
    Fault("torch without CUDA", libraries.libraries, nothing, "FAIL", "is a build without CUDA, so 2 GPUs",
          "pip install --force-reinstall -c constraints-gpu.txt torch"),
    Fault("driver too old for torch", libraries.libraries,
          both(changed("<cuda_version>13.0", "<cuda_version>12.4", None), lambda case: case.torch()), "FAIL",
          "torch 2.13.0 is for CUDA 13.0, but the driver supports 12.4", "Install driver release 580 or newer"),
    Fault("CUDA does not start", libraries.libraries,
          lambda case: case.torch(error="Error 802: system not yet initialized"), "FAIL",
          "CUDA does not start: Error 802", "systemctl restart nvidia-fabricmanager"),
    Fault("GPU too new for torch", result_of({"check": "attention", "problem": NO_IMAGE}), nothing, "FAIL",
          "no kernel image is available", "Install a torch that supports this GPU"),
    Fault("GPU that torch does not see", libraries.libraries, lambda case: case.torch(count=1), "FAIL",
          "torch 2.13.0 sees 1 of 2 GPUs", "dmesg"),
    Fault("kernel with wrong results", result_of({"check": "attention", "error": 0.4, "tolerance": 0.03}), nothing,
          "FAIL", "wrong results: relative error 0.4", "Do not train here"),
    Fault("kernel that does not run", result_of({"check": "linear attention", "problem": "ImportError: no triton"}),
          nothing, "warn", "ImportError: no triton. Only models such as Qwen3.5 need it", "constraints-gpu.txt"),
    Fault("slow GPU", result_of({"check": "GPU speed", "tflops": [690.0, 701.0, 410.0]}), nothing, "warn",
          "visible GPU 2 is slow: 410 to 701 TFLOP/s", "sets the pace"),
    Fault("ranks that cannot connect", all_reduce, variable("GLOO_SOCKET_IFNAME", "absent0"), "FAIL",
          "gloo, 2 processes", "Unset GLOO_SOCKET_IFNAME"),
    Fault("torch crashes", libraries.libraries, broken_torch, "FAIL", "cannot be imported: killed by SIGSEGV",
          "pip install --force-reinstall"),
    Fault("engine not installed", libraries.engine, other_python, "FAIL", "has no sglang", "Run: "),
    Fault("wrong engine Python", libraries.engine, no_python, "FAIL",
          "vllm.python: cannot run /opt/vllm/bin/python as Python", "Set the path of a Python"),
    Fault("few cores", host.processors, quota, "warn", "0.5 by the quota of the control group", "docker run --cpus"),
    Fault("little memory", host.memory, quota, "warn", "30.0 of 40.0 GiB free in the control group",
          "docker run --memory"),
    Fault("almost no memory", host.memory, old_group, "FAIL", "0.4 of 0.5 GiB free in the control group",
          "docker run --memory"),
    Fault("few processes allowed", host.limits, old_group, "warn", "100 with threads", "--pids-limit"),
    Fault("few open files", host.limits, lambda case: case.limit(resource.RLIMIT_NOFILE, 1024), "warn",
          "1024, and many", "Run `ulimit -n"),
    Fault("InfiniBand without locked memory", host.limits, infiniband, "warn", "64 KiB, and InfiniBand needs unlimited",
          "memlock=-1"),
    Fault("small /dev/shm", host.shared_memory, small_shared_memory, "FAIL", "0.0 GiB free", "--shm-size=16g"),
    Fault("no space for runs", host.disk, setting("run", dir="/proc/runs"), "FAIL", "0.0 GiB and 0 files free in /proc",
          "Free space, or set run.dir"),
    Fault("slow disk", lambda scope: iter([host.judge_disk("writes 20 MB/s", 20e6)]), nothing, "warn", "writes 20 MB/s",
          "A checkpoint of 8B parameters takes 80 min"),
    Fault("host name of the loopback", loopback_name,
          setting("cluster", actor_num_nodes=2, actor_num_gpus_per_node=8, executor="ray"),
          "warn", "localhost resolves to 127.0.0.1, which other machines cannot reach", "/etc/hosts"),
    Fault("several machines", checks.machines,
          setting("cluster", actor_num_nodes=2, actor_num_gpus_per_node=8), "warn",
          "only this one was checked, and the settings use 2", "srun --nodes=2 --ntasks-per-node=1"),
    Fault("absent network interface", environment.network, variable("NCCL_SOCKET_IFNAME", "=ens5"), "FAIL",
          "NCCL_SOCKET_IFNAME==ens5 does not exist", "Set it to one of eth0, lo"),
    Fault("network interface down", environment.network, variable("GLOO_SOCKET_IFNAME", "ib0"), "FAIL",
          "GLOO_SOCKET_IFNAME=ib0 is down", "Set it to one of eth0, lo"),
    Fault("InfiniBand port down", environment.network,
          lambda case: case.machine.write("sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN\n"), "warn",
          "InfiniBand mlx5_0: no active port (1: DOWN)", "NCCL_IB_HCA=^mlx5_0"),
    Fault("peer-to-peer turned off", environment.variables, variable("NCCL_P2P_DISABLE", "1"), "warn",
          "NCCL_P2P_DISABLE=1: NCCL copies through host memory", "Unset NCCL_P2P_DISABLE"),
    Fault("expandable segments", environment.variables,
          both(variable("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"), setting("cluster", colocate=True),
               setting("engine", backend="vllm")), "FAIL", "cannot release their memory",
          "Unset PYTORCH_CUDA_ALLOC_CONF"),
    Fault("other CUDA libraries", environment.variables, cuda_libraries, "warn", "has libnccl.so.2",
          "Remove the folder from LD_LIBRARY_PATH"),
    Fault("proxy before the engine", environment.variables,
          both(variable("http_proxy", "http://proxy:3128"), variable("no_proxy", "localhost"),
               setting("engine", url=["http://10.0.0.7:30000"])), "warn", "not left out for the engine 10.0.0.7",
          "Add 10.0.0.7 to NO_PROXY"),
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_has_a_finding_and_a_remedy(fault: Fault, machine: GpuMachine, monkeypatch: pytest.MonkeyPatch):
    case = Case(machine, monkeypatch)
    with case.limits:
        fault.make(case)
        results = list(fault.check(case.scope()))
    found = [result for result in results if result.status == fault.status]
    assert len(found) == 1, [str(result) for result in results]
    assert fault.finding in found[0].detail
    assert fault.remedy in found[0].remedy
    assert found[0].to_json()["remedy"] == found[0].remedy
    assert not [result for result in results if result.status not in (fault.status, "ok", "-")]


def test_a_healthy_machine_has_no_finding(machine: GpuMachine, monkeypatch: pytest.MonkeyPatch):
    case = Case(machine, monkeypatch)
    cheap = (
        gpus.driver, gpus.visibility, gpus.memory, gpus.fields, gpus.links,
        environment.network, environment.variables, host.memory, host.shared_memory,
    )  # fmt: skip
    details = {result.what: (result.status, result.detail) for check in cheap for result in check(case.scope())}
    assert details.pop("free GPU memory") == ("-", "79.1 to 79.1 GiB")
    assert {status for status, _ in details.values()} == {"ok"}
    assert details["driver"][1] == "580.95.05, for CUDA up to 13.0"
    assert details["GPUs"][1] == "2 x NVIDIA H100 80GB HBM3"
    assert details["GPU links"][1] == "NVLink (NV18), peer-to-peer"
    assert details["network"][1] == "eth0, lo"


def test_the_guide_lists_every_fault_with_its_remedy():
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    listed = {row[0]: (row[1], row[-1]) for row in rows if row[1] in ("FAIL", "warn")}
    assert {name: status for name, (status, _) in listed.items()} == {fault.name: fault.status for fault in FAULTS}
    for fault in FAULTS:
        assert fault.remedy.replace("`", "") in listed[fault.name][1].replace("`", ""), fault.name


def doctor(*arguments: str, machine: GpuMachine | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command in its own process."""
    folder = PAGE.parent if machine is None else machine.folder
    command = [sys.executable, "-m", "slimectl", "doctor", *arguments]
    return subprocess.run(
        command, cwd=folder, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )


def test_the_command_fails_with_remedies_and_warnings_do_not_fail(machine: GpuMachine, monkeypatch: pytest.MonkeyPatch):
    Case(machine, monkeypatch).torch(error="unknown error")
    machine.change("<persistence_mode>Enabled", "<persistence_mode>Disabled", gpu=0)
    (machine.folder / "slimectl.toml").write_text("[train]\nlearning_rate = 1\n")
    done = doctor("--json", machine=machine)
    results = [json.loads(line) for line in done.stdout.splitlines()]
    found = {result["check"]: result for result in results}
    assert done.returncode == 1
    failed = [result["check"] for result in results if result["fine"] is False]
    assert failed[0] == "settings"
    assert "train.learning_rate" in found["settings"]["detail"]
    assert {"GPU modes": "warn", "torch": "fail", "driver": "ok", "python": "ok"}.items() <= {
        name: result["status"] for name, result in found.items()
    }.items()
    assert found["GPU modes"]["fine"] is None
    assert all(result["remedy"] for result in results if result["status"] in ("warn", "fail"))
    assert found["free GPU memory"]["group"] == "GPUs"
    assert f"{len(failed)} of {len(results)} checks failed: {', '.join(dict.fromkeys(failed))}" in done.stderr


def test_a_model_that_is_not_there_offline_is_found(machine: GpuMachine):
    code = (
        "from slimectl.runtime.doctor import checks, environment\nfrom slimectl.runtime.doctor.scope import Scope\n"
        "from slimectl.settings import Settings\n"
        "named = {'model': {'path': 'org/absent'}, 'rollout': {'data': ['org/rows/train*']}}\n"
        "settings = Settings.model_validate(named)\n"
        "for result in environment.variables(Scope(settings)): print(result.detail, result.remedy)"
    )
    variables = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(machine.folder)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | variables, capture_output=True, text=True, check=True
    )
    model, rows = done.stdout.splitlines()
    assert model.startswith("HF_HUB_OFFLINE is set, and org/absent is not in ")
    assert model.endswith("hf download org/absent")
    assert rows.endswith("hf download org/rows --repo-type dataset")


def test_versions_between_driver_and_torch(machine: GpuMachine, monkeypatch: pytest.MonkeyPatch):
    """CUDA 13.0 runs on a driver for 13.0 and newer, with a warning on an older minor version. Drivers since 610 report
    the version under another name."""
    case = Case(machine, monkeypatch)
    facts = {"version": "2.13.0", "cuda": "13.2", "error": "", "count": 2, "threads": 1, "nccl": "2.29.7"}
    assert libraries._build(case.scope(), facts, 2).status == "warn"
    machine.change("<cuda_version>13.0</cuda_version>", "<cuda_umd_version>13.4</cuda_umd_version>")
    result = libraries._build(case.scope(), facts, 2)
    assert (result.status, result.detail) == ("ok", "2.13.0 for CUDA 13.2, NCCL 2.29.7")


def test_a_report_with_a_warning_after_it_is_read(machine: GpuMachine, monkeypatch: pytest.MonkeyPatch):
    """nvidia-smi ends with code 14 if the infoROM of a GPU is damaged. Its report is whole."""
    tool = machine.folder / "bin" / "nvidia-smi"
    tool.write_text(tool.read_text() + "echo 'WARNING: infoROM is corrupted at gpu 0000:01:00.0'\nexit 14\n")
    assert [result.status for result in gpus.driver(Case(machine, monkeypatch).scope())] == ["ok"]
    tool.write_bytes(b"\x7fELF")
    [result] = gpus.driver(Case(machine, monkeypatch).scope())
    assert result.detail == f"{tool} cannot run: Exec format error"


def test_a_run_on_the_cpu_needs_no_cuda(machine: GpuMachine, monkeypatch: pytest.MonkeyPatch):
    case = Case(machine, monkeypatch)
    case.torch(count=0)
    case.settings["train"] = {"device": "cpu"}
    assert next(libraries.libraries(case.scope())).status == "ok"


def test_numbers_of_nvlinks_that_differ_are_a_warning(machine: GpuMachine):
    lines = [["NV18"] * 4 for _ in range(4)]
    lines[0][3] = lines[3][0] = "NV16"
    wide = GpuMachine(machine.folder / "wide", gpus=4)
    (machine.folder / "bin" / "nvidia-smi").write_text((wide.folder / "bin" / "nvidia-smi").read_text())
    wide.matrix("topology", lines)
    [result] = gpus.links(Scope(Settings(), wide.root))
    assert (result.status, result.detail) == ("warn", "different numbers of NVLinks between pairs: NV16, NV18")


def test_packages_that_do_not_fit_each_other(tmp_path: Path):
    """The requirements of requirements count, those of extras and of other systems do not."""
    packages = {
        "engine 1.0": ["torch==2.13.0", "absent>=1", "kernels>=2; extra == 'gpu'", "old<1; python_version < '3.0'"],
        "torch 2.13.0": ["Numpy_Like<2"],
        "numpy-like 2.1": [],
    }
    for package, requirements in packages.items():
        name, version = package.split()
        folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {each}" for each in requirements)]
        (folder / "METADATA").write_text("Metadata-Version: 2.1\n" + "\n".join(lines) + "\n")
    found = list(conflicts("engine", [str(tmp_path)], "3.12.3", missing=True))
    wrong = "torch 2.13.0 needs Numpy_Like<2, but 2.1 is installed"
    assert found == ["engine 1.0 needs absent>=1, which is not installed", wrong]
    assert list(conflicts("engine", [str(tmp_path)], "3.12.3", missing=False)) == [wrong]


FLA = """
import torch
def chunk_gated_delta_rule(q, k, v, g, beta, scale=None):
    "S_t = e^g S + k beta (v - k' e^g S), o = q' S, one token after the other (arXiv:2412.06464, eq. 10)."
    q, k, v, g, beta = (part[0].float() for part in (q, k, v, g, beta))
    state, outputs = torch.zeros(q.shape[1], q.shape[2], v.shape[2]), []
    for t in range(len(q)):
        state = state * g[t].exp()[:, None, None]
        update = beta[t][:, None] * (v[t] - (k[t][:, :, None] * state).sum(1))
        state = state + k[t][:, :, None] * update[:, None]
        outputs.append((q[t][:, :, None] * state).sum(1) * q.shape[-1] ** -0.5)
    return torch.stack(outputs)[None].bfloat16(), None
"""


def test_linear_attention_is_compared_with_the_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = tmp_path / "fla" / "ops"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package / "gated_delta_rule.py").write_text(FLA)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert probe.linear_attention("cpu") < probe.TOLERANCE
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "fla"]:
            del sys.modules[name]
