"""Memory and disk of a run are those of the planner's formulas, and a run that does not fit is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from slimectl.errors import SettingsError, StorageError
from slimectl.runtime.capacity import disk, memory, shape_of
from slimectl.settings import Settings, resolve
from slimectl.settings.layers import from_assignments
from slimectl.system.control_groups import Memory, memories


def settings(*assignments: str) -> Settings:
    return resolve([from_assignments(["model.card=tiny", "train.device=cpu", *assignments])]).settings


def peak_mib(text: str) -> float:
    number, unit = re.match(r"training ([\d.]+) (\w)iB", text).groups()
    return float(number) * {"M": 1, "G": 1024}[unit]


def test_what_fits_is_described():
    assert shape_of(settings()) == "llama, 4 layers, 886 k parameters"
    assert re.fullmatch(r"training \S+ MiB, engine \S+ MiB, of \S+ GiB free", memory(settings()))
    # Float32 weights and AdamW's two moments: 12 bytes x 886,272.
    assert re.fullmatch(r"2 checkpoints of 10.1 MiB and the next, \S+ .iB free in runs", disk(settings()))


def test_a_vision_tower_is_counted_and_its_optimizer_only_where_it_is_trained():
    vision = ("model.card=tiny-vl",)
    assert shape_of(settings(*vision)) == "qwen2_5_vl_text, 2 layers, 668 k parameters"
    trained = (*vision, "train.freeze_vision_tower=false")
    # 4 bytes x 667,712 and 8 bytes x 461,056 of the decoder alone; 12 bytes x 667,712.
    assert disk(settings(*vision)).startswith("2 checkpoints of 6.06 MiB")
    assert disk(settings(*trained)).startswith("2 checkpoints of 7.64 MiB")
    # Gradients and moments of the tower: 12 bytes x 206,656.
    assert peak_mib(memory(settings(*trained))) - peak_mib(memory(settings(*vision))) == pytest.approx(2.36, abs=1.1)


def test_recomputation_and_shorter_packs_take_less():
    whole = peak_mib(memory(settings()))
    assert peak_mib(memory(settings("train.recompute_granularity=full"))) < whole
    assert peak_mib(memory(settings("train.max_tokens_per_gpu=1024"))) < whole


def test_what_does_not_fit_names_the_keys_that_help():
    with pytest.raises(SettingsError, match=r"^train.max_tokens_per_gpu: 1000000000 needs training .*\. Lower it"):
        memory(settings("train.max_tokens_per_gpu=1000000000", "run.rollout_batch_size=1000000"))
    with pytest.raises(StorageError, match=r"^run.dir: runs: 1000000000 checkpoints of .*run.keep_checkpoints\.$"):
        disk(settings("run.keep_checkpoints=1000000000"))


def test_a_model_is_not_created_where_it_does_not_fit(tmp_path: Path, slimectl: Callable[..., tuple[int, str, str]]):
    code, out, err = slimectl("models", "create", "kimi-k2", str(tmp_path / "new"))
    assert (code, out) == (1, "")
    assert re.fullmatch(r"slimectl: \S+: kimi-k2 needs 3.73 TiB on disk, but \S+ .iB are free. Free some\n", err)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def slimectl() -> Callable[..., tuple[int, str, str]]:
    from typer.testing import CliRunner

    from slimectl.cli.app import app

    def call(*words: str) -> tuple[int, str, str]:
        result = CliRunner().invoke(app, list(words))
        return result.exit_code, result.stdout, result.stderr

    return call


def machine(root: Path, groups: str, files: dict[str, str]) -> Path:
    """Write what Linux would show of a machine with 2 MiB, of which half is free."""
    files |= {"proc/meminfo": "MemTotal: 2048 kB\nMemAvailable: 1024 kB\n", "proc/self/cgroup": groups}
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_every_control_group_around_the_process_limits_its_memory(tmp_path):
    job = "sys/fs/cgroup/slurm/job/"
    files = {
        job + "memory.max": "1000000\n",
        job + "memory.current": "700000\n",
        job + "memory.stat": "anon 100000\ninactive_file 250000\nactive_file 5\n",
        job + "step/memory.max": "max\n",
        "sys/fs/cgroup/slurm/memory.max": "1500000\n",
    }
    found = list(memories(machine(tmp_path, "0::/slurm/job/step\n", files)))
    assert found == [Memory(2097152, 1048576), Memory(1000000, 550000), Memory(1500000, 1500000)]


def test_control_groups_of_version_1_limit_memory_too(tmp_path):
    group = "sys/fs/cgroup/memory/"
    files = {
        group + "docker/memory.limit_in_bytes": "500000\n",
        group + "docker/memory.usage_in_bytes": "600000\n",
        group + "docker/memory.stat": "inactive_file 9\ntotal_inactive_file 50000\n",
        group + "memory.limit_in_bytes": "9223372036854771712\n",  # no limit
    }
    found = list(memories(machine(tmp_path, "4:memory:/docker\n3:cpu,cpuacct:/docker\n", files)))
    assert found == [Memory(2097152, 1048576), Memory(500000, 0)]


def test_memory_is_unknown_where_the_system_does_not_tell(tmp_path):
    assert list(memories(tmp_path)) == []
