"""A machine with GPUs that are not there: a program `nvidia-smi` that prints what NVIDIA's prints, and a file tree."""

from __future__ import annotations

from pathlib import Path

GPU = """
  <gpu id="00000000:{bus}:00.0">
    <product_name>NVIDIA H100 80GB HBM3</product_name>
    <persistence_mode>Enabled</persistence_mode>
    <mig_mode><current_mig>Disabled</current_mig><pending_mig>Disabled</pending_mig></mig_mode>
    <mig_devices>None</mig_devices>
    <uuid>GPU-{index}513536b-7d19-9063-b049-1e69664bb298</uuid>
    <minor_number>{index}</minor_number>
    <gpu_reset_status><reset_required>No</reset_required></gpu_reset_status>
    <gpu_recovery_action>None</gpu_recovery_action>
    <pci><pci_gpu_link_info>
      <pcie_gen><max_link_gen>5</max_link_gen><current_link_gen>1</current_link_gen></pcie_gen>
      <link_widths><max_link_width>16x</max_link_width><current_link_width>16x</current_link_width></link_widths>
    </pci_gpu_link_info></pci>
    <clocks_event_reasons>
      <clocks_event_reason_gpu_idle>Active</clocks_event_reason_gpu_idle>
      <clocks_event_reason_sw_power_cap>Not Active</clocks_event_reason_sw_power_cap>
      <clocks_event_reason_hw_thermal_slowdown>Not Active</clocks_event_reason_hw_thermal_slowdown>
      <clocks_event_reason_hw_power_brake_slowdown>Not Active</clocks_event_reason_hw_power_brake_slowdown>
      <clocks_event_reason_sw_thermal_slowdown>Not Active</clocks_event_reason_sw_thermal_slowdown>
    </clocks_event_reasons>
    <fb_memory_usage>
      <total>81559 MiB</total><reserved>551 MiB</reserved><used>4 MiB</used><free>81005 MiB</free>
    </fb_memory_usage>
    <compute_mode>Default</compute_mode>
    <ecc_errors>
      <volatile>
        <sram_correctable>0</sram_correctable>
        <sram_uncorrectable_parity>0</sram_uncorrectable_parity>
        <sram_uncorrectable_secded>0</sram_uncorrectable_secded>
        <dram_correctable>3</dram_correctable>
        <dram_uncorrectable>0</dram_uncorrectable>
      </volatile>
      <aggregate><dram_uncorrectable>2</dram_uncorrectable></aggregate>
      <channel_repair_pending>No</channel_repair_pending>
      <tpc_repair_pending>No</tpc_repair_pending>
      <unrepairable_memory>No</unrepairable_memory>
    </ecc_errors>
    <retired_pages><pending_retirement>N/A</pending_retirement></retired_pages>
    <remapped_rows>
      <remapped_row_pending>No</remapped_row_pending><remapped_row_failure>No</remapped_row_failure>
    </remapped_rows>
    <temperature><gpu_temp>34 C</gpu_temp></temperature>
    <gpu_power_readings>
      <current_power_limit>700.00 W</current_power_limit><default_power_limit>700.00 W</default_power_limit>
    </gpu_power_readings>
    <fabric><state>Completed</state><status>Success</status></fabric>
    <processes></processes>
  </gpu>"""
REPORT = """<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v13.dtd">
<nvidia_smi_log>
  <timestamp>Tue Dec 30 09:49:57 2025</timestamp>
  <driver_version>580.95.05</driver_version>
  <cuda_version>13.0</cuda_version>
  <attached_gpus>{count}</attached_gpus>{gpus}
</nvidia_smi_log>
"""
PROCESS = (
    "<process_info><gpu_instance_id>N/A</gpu_instance_id><pid>{pid}</pid><type>C</type>"
    "<process_name>python</process_name><used_memory>70144 MiB</used_memory></process_info>"
)
TOOL = """#!/bin/sh
cd {folder}
case "$*" in
  "-q -x") name=report ;;
  "topo -m") name=topology ;;
  "topo -p2p r") name=peers ;;
  *) echo "ERROR: Option $* is not recognized." ; exit 2 ;;
esac
if [ -f failure ]; then cat failure; exit 9; fi
cat $name
"""
MEMORY = "MemTotal: 1056784336 kB\nMemAvailable: 1000000000 kB\n"


class GpuMachine:
    """A folder with `bin/nvidia-smi`, the files that it prints, and `root` with /proc, /sys and /dev."""

    def __init__(self, folder: Path, gpus: int = 2) -> None:
        self.folder, self.root = folder, folder / "root"
        (folder / "bin").mkdir(parents=True)
        tool = folder / "bin" / "nvidia-smi"
        tool.write_text(TOOL.format(folder=f"'{folder}'"))
        tool.chmod(0o755)
        listed = "".join(GPU.format(index=index, bus=f"{index + 1:02x}") for index in range(gpus))
        (folder / "report").write_text(REPORT.format(count=gpus, gpus=listed))
        for name, cell in (("topology", "NV18"), ("peers", "OK")):
            self.matrix(name, [[" X " if row == column else cell for column in range(gpus)] for row in range(gpus)])
        self.write("proc/meminfo", MEMORY)
        for name, state in (("lo", "unknown"), ("eth0", "up"), ("ib0", "down")):
            self.write(f"sys/class/net/{name}/operstate", state)
        self.write("dev/shm/.keep", "")

    def write(self, path: str, text: str) -> None:
        """Write a file below the root."""
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def matrix(self, name: str, cells: list[list[str]]) -> None:
        """Write a matrix as `nvidia-smi topo` prints it. The header of `-m` is underlined."""
        header = "\t".join(["", *(f"\x1b[4mGPU{index}" for index in range(len(cells))), "CPU Affinity\x1b[0m"])
        rows = ["\t".join([f"GPU{index}", *row, "0-47"]) for index, row in enumerate(cells)]
        (self.folder / name).write_text("\n".join([header, *rows, "", "Legend:", "", "  X    = Self", ""]))

    def change(self, old: str, new: str, *, gpu: int | None = None) -> None:
        """Replace a text of the report, of one GPU or of all. It must be there."""
        path = self.folder / "report"
        head, *gpus = path.read_text().split("<gpu id=")
        parts = [head, *gpus]
        for number in range(len(parts)) if gpu is None else [gpu + 1]:
            assert gpu is None or old in parts[number]
            parts[number] = parts[number].replace(old, new)
        assert any(new in part for part in parts)
        path.write_text("<gpu id=".join(parts))

    def fail(self, text: str) -> None:
        """Let nvidia-smi print this and fail."""
        (self.folder / "failure").write_text(text)
