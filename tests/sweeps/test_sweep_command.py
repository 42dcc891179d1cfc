"""`slimectl sweep` whole: its table, its folder, kills at any moment, failures, signals and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

from workshop import Workshop

BASE = """config = "slimectl.toml"
[run]
num_rollout = {rounds}
keep_samples = false
[eval]
data = {{}}
[sweep]
metric = "rollout/raw_reward"
"""
HALVING = (
    BASE.format(rounds=3)
    + """
method = "halving"
[sweep.settings]
train.lr = [1e-3, 1e-2, 3e-3]
"""
)


def table(workshop: Workshop, name: str, *options: str, code: int = 0) -> list[dict[str, Any]]:
    """The records of a sweep, run to its end."""
    lines = workshop.slimectl("sweep", f"{name}.toml", "--json", "--slots", "2", *options, code=code).splitlines()
    return [json.loads(line) for line in lines]


def without_folder(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "folder"} for row in rows]


def processes_in(folder: Path) -> list[str]:
    """Command lines of the processes whose folder is this one."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cwd"):
        try:
            if os.readlink(place) == str(folder):
                found.append((place.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return [line for line in found if " run " in line or " sweep " in line]


def test_a_killed_sweep_resumes_to_the_table_of_an_undisturbed_one_and_leaves_no_process(workshop: Workshop):
    for name in ("whole", "broken"):
        (workshop.folder / f"{name}.toml").write_text(HALVING)
    whole = without_folder(table(workshop, "whole"))
    # By hand: 3 trials of 1 round, then one of 3. The best of the rewards after round 1 goes on.
    assert [(row["state"], row["rounds"]) for row in whole] == [("finished", 3), ("dropped", 1), ("dropped", 1)]
    folder = workshop.folder / "sweeps" / "broken"
    moments = ("trial_001/trial.toml", "trial_002/seed_1/metrics.jsonl", "*/seed_1/step_000002")
    for moment in moments:
        process = workshop.start("sweep", "broken.toml", stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        while process.poll() is None and not list(folder.glob(moment)):
            time.sleep(0.002)
        assert process.poll() is None, moment
        process.kill()
        process.wait()
    assert without_folder(table(workshop, "broken")) == whole
    assert processes_in(workshop.folder) == []
