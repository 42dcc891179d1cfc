"""One run a folder, from its first file to the last: refused beside a living one, whole after any end."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest
from workshop import Workshop

from slimectl.data.ownership import files_below, own_run_files

pytestmark = pytest.mark.slow


def test_a_users_folder_with_a_run_toml_is_not_touched(workshop: Workshop):
    folder = workshop.folder / "runs" / "a"
    folder.mkdir(parents=True)
    (folder / "run.toml").write_text("# my own\n")
    (folder / "thesis.txt").write_text("three years of work\n")
    for more in ([], ["--force"]):
        workshop.slimectl("run", *more, code=2)
        assert workshop.stderr == (
            "slimectl: runs/a: contains 'run.toml' but no manifest.json of a run, so slimectl does not write there. "
            "Choose another name for the run with -s run.name=ANOTHER, "
            "or continue a run of an older version with --resume RUN.\n"
        )
    assert {file.name: file.read_text() for file in folder.iterdir()} == {
        "run.toml": "# my own\n", "thesis.txt": "three years of work\n",
    }  # fmt: skip


def test_beside_a_living_run_nothing_begins_and_after_its_death_it_goes_on(workshop: Workshop):
    process = workshop.start("run", "-s", "run.num_rollout=1000", stderr=-3)
    folder = workshop.folder / "runs" / "a"
    while not (folder / "latest").exists():
        time.sleep(0.01)
        assert process.poll() is None
    for command in (["run"], ["run", "--force"], ["run", "--resume", "runs/a"]):
        workshop.slimectl(*command, code=2)
        (line,) = workshop.stderr.splitlines()
        assert line.startswith(f"slimectl: runs/a: another run is active there (process {process.pid} on ")
        assert line.endswith(". Wait until it ends, stop it, or choose another name with -s run.name=ANOTHER.")
    assert process.poll() is None
    process.kill()
    process.wait()
    workshop.slimectl("run", "--resume", "runs/a", "-s", "run.num_rollout=1000", "--dry-run")
    done = len({line["rollout_id"] for line in workshop.metrics("a")})
    workshop.slimectl("run", "--resume", "runs/a", "-s", f"run.num_rollout={done + 1}")
    assert not list(folder.glob(".*"))


def test_the_end_of_a_run_is_repaired_when_it_was_killed_just_before(workshop: Workshop):
    workshop.slimectl("run", "-s", "run.num_rollout=2")
    folder = workshop.folder / "runs" / "a"
    signed = json.loads((folder / "manifest.json").read_text())
    assert (signed["stage"], signed["counts"]) == ("run", {"rounds": 2, "steps": 2})
    (folder / "manifest.json").write_text(json.dumps({"slimectl": "0.1.0", "stage": "run"}))
    before = (folder / "metrics.jsonl").read_bytes()
    assert own_run_files(folder) == files_below(folder)
    for latest in ("step_000001", None):
        (folder / "latest").unlink()
        if latest is not None:
            (folder / "latest").symlink_to(latest)
        workshop.slimectl("run", "--resume", "runs/a")
        assert "All 2 rounds are done" in workshop.stderr
        assert os.readlink(folder / "latest") == "step_000002"
        assert json.loads((folder / "manifest.json").read_text())["counts"] == {"rounds": 2, "steps": 2}
        assert (folder / "metrics.jsonl").read_bytes() == before


def test_metrics_that_were_lost_are_written_again_from_the_checkpoint_before(workshop: Workshop):
    workshop.slimectl("run", "-s", "run.num_rollout=3")
    folder = workshop.folder / "runs" / "a"
    whole = (folder / "metrics.jsonl").read_bytes()
    size = json.loads((folder / "step_000003" / "state.json").read_text())["sizes"]["metrics.jsonl"]
    with (folder / "metrics.jsonl").open("rb+") as file:
        file.truncate(size - 7)  # a torn line: the disk had not all of it when the power went
    workshop.slimectl("run", "--resume", "runs/a")
    assert (
        f"step_000003: metrics.jsonl has {size - 7} bytes, but had {size} when it was saved. Falling" in workshop.stderr
    )
    assert (folder / "metrics.jsonl").read_bytes() == whole
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 4, "met')
    summary = workshop.slimectl("inspect", "runs/a").decode()
    assert summary.startswith("runs/a: 3 rounds, finished, ")
    assert re.search(
        r"\nsettings that differ from slimectl \(its value\)\n.*run\.num_rollout=3 \(6\)\n", summary, re.DOTALL
    )


def test_two_trainings_do_not_save_into_one_folder(workshop: Workshop, tmp_path: Path):
    records = [
        {"index": i, "group_index": i, "tokens": [65, 66], "response_length": 1, "status": "completed"}
        for i in range(2)
    ]
    (workshop.folder / "samples.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    command = ["train", "-", "--model", str(workshop.model), "--save", "better", "-s", "algorithm.name=sft"]
    reading, writing = os.pipe()
    first = workshop.start(*command, stdin=reading, stderr=-3, stdout=-3)
    os.close(reading)
    while not (workshop.folder / ".better.lock").exists():
        time.sleep(0.01)
        assert first.poll() is None
    workshop.slimectl(*command[:1], "samples.jsonl", *command[2:], code=2)
    assert workshop.stderr.startswith(f"slimectl: better: is being written (process {first.pid} on ")
    os.write(writing, (workshop.folder / "samples.jsonl").read_bytes())
    os.close(writing)
    assert first.wait() == 0
    assert (workshop.folder / "better" / "manifest.json").exists()
    assert not list(workshop.folder.glob(".*"))


def test_a_first_run_that_fails_before_its_first_output_leaves_no_folder(workshop: Workshop):
    no_reward = ("run", "-s", "score.custom_rm_path=none", "-s", "eval.interval=none", "-s", "eval.before_train=false")
    workshop.slimectl(*no_reward, code=2)
    assert "no reward is set" in workshop.stderr
    assert not (workshop.folder / "runs").exists()
    # What was there before stays, and so does what somebody else put there.
    folder = workshop.folder / "runs" / "a"
    folder.mkdir(parents=True)
    workshop.slimectl(*no_reward, code=2)
    assert sorted(file.name for file in folder.iterdir()) == ["log.txt", "manifest.json", "run.toml"]
    workshop.slimectl("run", "-s", "run.num_rollout=1")


def test_a_run_that_fails_after_its_first_round_stays(workshop: Workshop):
    failing = "calls = []\ndef reward(sample):\n    calls.append(1)\n    return 1.0 / (len(calls) < 20)\n"
    (workshop.folder / "failing.py").write_text(failing)
    workshop.slimectl("run", "-s", "score.custom_rm_path=failing.py:reward", "-s", "eval.before_train=false", code=2)
    assert (workshop.folder / "runs" / "a" / "step_000001").is_dir()


def test_messages_that_cannot_be_written_stop_no_run(workshop: Workshop):
    with open("/dev/full", "wb") as full:  # as a log on a disk that is full already
        process = workshop.start("run", "-s", "run.num_rollout=1", "-s", "eval.interval=none", stderr=full)
        assert process.wait(timeout=300) == 0
    assert (workshop.folder / "runs" / "a" / "step_000001").is_dir()
