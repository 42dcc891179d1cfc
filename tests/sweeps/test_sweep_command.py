"""`slimectl sweep` whole: its table, its folder, kills at any moment, failures, signals and what is refused."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
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
    whole = table(workshop, "whole")
    # By hand: 3 trials of 1 round, then one of 3. The best of the rewards after round 1 goes on.
    assert [(row["state"], row["rounds"]) for row in whole] == [("finished", 3), ("dropped", 1), ("dropped", 1)]
    (winner,) = [row for row in whole if row["best"]]
    lines = (workshop.folder / winner["folder"] / "seed_1" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["metrics"] for line in lines if "train/lr" in line]
    rates = [step["train/lr"] / winner["settings"]["train.lr"] for step in steps]
    # The linear decay of the whole run, although the first rung ended after one round.
    assert rates == pytest.approx([1, 2 / 3, 1 / 3])
    folder = workshop.folder / "sweeps" / "broken"
    moments = ("trial_001/trial.toml", "trial_002/seed_1/metrics.jsonl", "*/seed_1/step_000002")
    for moment in moments:
        process = workshop.start("sweep", "broken.toml", stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        while process.poll() is None and not list(folder.glob(moment)):
            time.sleep(0.002)
        assert process.poll() is None, moment
        process.kill()
        process.wait()
    assert without_folder(table(workshop, "broken")) == without_folder(whole)
    assert processes_in(workshop.folder) == []


def test_a_trial_that_fails_is_the_last_with_its_reason_and_is_tried_again_only_when_asked(workshop: Workshop):
    reward = (workshop.folder / "reward.py").read_text()
    guard = "def reward(sample, args):\n    assert args.scale < 9, 'scale is too large'\n"
    (workshop.folder / "reward.py").write_text(reward.replace("def reward(sample):\n", guard))
    settings = "[sweep.settings]\ncustom.scale = [1, 9]\n"
    (workshop.folder / "s.toml").write_text(BASE.format(rounds=1) + settings)
    first, second = table(workshop, "s")
    assert (first["trial"], first["state"], first["best"]) == ("trial_001", "finished", True)
    assert (second["trial"], second["state"], second["best"]) == ("trial_002", "failed", False)
    assert "scale is too large" in second["seeds"]["1"]["reason"]
    assert "trial_002 (custom.scale = 9) failed: " in workshop.stderr
    log = workshop.folder / "sweeps" / "s" / "trial_002" / "seed_1.log"
    assert table(workshop, "s") == [first, second]  # nothing runs again
    assert log.read_text().count("sweep: slimectl run") == 1
    workshop.slimectl("run", "-c", "sweeps/s/best.toml", "--dry-run")
    (workshop.folder / "reward.py").write_text(reward.replace("def reward(sample):", "def reward(sample, args):"))
    assert [row["state"] for row in table(workshop, "s", "--retry-failed")] == ["finished", "finished"]


def test_a_sweep_whose_first_trials_cannot_start_stops_with_the_reason(workshop: Workshop):
    settings = "[model]\npath = 'nowhere'\n[sweep.settings]\ntrain.lr = [1, 2, 3]\n"
    (workshop.folder / "s.toml").write_text(BASE.format(rounds=1) + settings)
    assert table(workshop, "s", code=2) == []
    last = workshop.stderr.splitlines()[-1]
    assert "nowhere" in last
    assert last.endswith("so the sweep stops. Fix it, and repeat the command with --retry-failed.")


def test_ctrl_c_lets_the_runs_save_and_names_the_command_that_resumes(workshop: Workshop):
    (workshop.folder / "s.toml").write_text(BASE.format(rounds=500) + "seeds = [1, 2]\n")
    pipe = subprocess.PIPE
    process = workshop.start("sweep", "s.toml", "--slots", "2", stdout=pipe, stderr=pipe)
    runs = [workshop.folder / "sweeps" / "s" / "trial_001" / f"seed_{seed}" for seed in (1, 2)]
    while not all((run / "metrics.jsonl").exists() for run in runs):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 130
    assert re.search(r"trial_001 +0/2 +\d+/500 +- +stopped", out.decode())
    assert err.decode().splitlines()[-1] == "resume with: slimectl sweep s.toml --slots 2"
    assert all((run / "latest").is_symlink() for run in runs)
    assert processes_in(workshop.folder) == []
