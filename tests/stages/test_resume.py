"""kill -9 at any moment, then --resume: the same weights and the same bytes as an undisturbed run."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from workshop import REWARD, Workshop, killed, set_up

pytestmark = pytest.mark.slow

KILLS_AT_BYTES = (0, 1, 900, 2000, 3500, 5000)
"""Sizes of metrics.jsonl at which the run is killed: before the first line, and somewhere in each later round."""


SHAPED = ("-s", "algorithm.norm_mean_type=running", "-s", "algorithm.norm_std_type=running", "-s", "train.ppo_epochs=2",
          "-s", "rollout.easy_threshold=0.5", "-s", "rollout.retire_after=2", "-s", "rollout.shuffle=true")  # fmt: skip
"""Settings with a state of their own: running moments, later epochs, and difficulty pools."""


@pytest.mark.parametrize(
    ("options", "files", "kills_at"),
    [
        (
            ("--backend", "fsdp", *SHAPED),
            ("policy/model.safetensors", "policy/README.md", "trainer/policy/optimizer.safetensors"),
            KILLS_AT_BYTES,
        ),
        (
            ("--backend", "fsdp", "-s", "run.async_save=true", "-s", "train.optimizer=muon"),
            ("policy/model.safetensors", "policy/README.md", "trainer/policy/optimizer.safetensors"),
            KILLS_AT_BYTES[1::2],
        ),
        (
            ("--backend", "megatron", "-s", "megatron.save_format=torch_dist"),
            ("policy/__0_0.distcp", "policy/__0_1.distcp", "policy/README.md"),
            KILLS_AT_BYTES[2::2],
        ),
    ],
    ids=["fsdp", "background", "megatron"],
)
def test_a_killed_and_resumed_run_writes_the_bytes_of_an_undisturbed_one(
    workshop: Workshop, options: tuple[str, ...], files: tuple[str, ...], kills_at: tuple[int, ...]
):
    workshop.slimectl("run", "--name", "whole", *options)
    whole, broken = workshop.folder / "runs" / "whole", workshop.folder / "runs" / "broken"
    command = ["run", "--name", "broken", *options]
    kills = 0
    for at_bytes in kills_at:
        kills += killed(workshop, command, broken / "metrics.jsonl", at_bytes)
        command = ["run", "--resume", "runs/broken"]
    assert kills >= len(kills_at) - 1
    workshop.slimectl("run", "--resume", "runs/broken")
    assert (broken / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    for file in files:
        last = Path("step_000006") / file
        assert (broken / last).read_bytes() == (whole / last).read_bytes()
    assert not list(broken.glob(".tmp-*"))


LAST_ROUND = 2
KILL = """

import os, sys
from pathlib import Path

def kill(event, arguments):
    \"\"\"Kill this process at the event that POINT names: kind, end of the path, lines of the last round by then.\"\"\"
    global point
    if not point or event != point[0]:
        return
    path = arguments[event == "os.symlink"]
    if str(path).endswith("runs/broken/" + point[1]):
        awaited, point = point, None
        metrics = Path("runs/broken/metrics.jsonl")
        if (metrics.read_text() if metrics.exists() else "").count('"rollout_id": 2') == int(awaited[2]):
            os.kill(os.getpid(), 9)
        point = awaited

point = os.environ.get("POINT", "").split()
sys.addaudithook(kill)
"""
KILLS_IN_THE_LAST_ROUND = (
    "os.mkdir .tmp-step_000001 0",
    "open perf.jsonl 1",
    "open metrics.jsonl 1",  # for the evaluation
    "os.mkdir .tmp-step_000002/policy 2",
    "os.rename .tmp-step_000002 2",
    "os.symlink .tmp-latest 2",
    "os.rename .tmp-latest 2",
    "os.rename .tmp-manifest.json 2",
)
"""Where runs are killed in the last of two rounds, one after the other: event, file, lines of that round by then."""


TIMED = ("perf.jsonl", "timeline.jsonl")


def outcome(run: Path) -> dict[str, Any]:
    """What a run ends with; perf.jsonl and timeline.jsonl have times, and so their sizes are no matter."""
    files = [run / "metrics.jsonl", *sorted(run.rglob("*.safetensors")), *sorted(run.rglob("samples.jsonl"))]
    states = [json.loads(path.read_text()) for path in sorted(run.rglob("state.json"))]
    for state in states:
        state["sizes"] = {name: size for name, size in state["sizes"].items() if name not in TIMED}
    return {
        "digests": {str(file.relative_to(run)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files},
        "states": states,
        "latest": os.readlink(run / "latest"),
        "counts": json.loads((run / "manifest.json").read_text())["counts"],
        "names": sorted(path.name for path in run.iterdir()),
    }


def test_kills_in_the_last_round_leave_no_trace_in_what_the_run_ends_with(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
):
    (workshop.folder / "reward.py").write_text(REWARD + KILL)
    rounds = ("-s", f"run.num_rollout={LAST_ROUND}", "-s", "eval.before_train=false")
    workshop.slimectl("run", "--name", "whole", *rounds)
    command = ["run", "--name", "broken", *rounds]
    for point in KILLS_IN_THE_LAST_ROUND:
        monkeypatch.setenv("POINT", point)
        assert workshop.start(*command, stderr=subprocess.DEVNULL).wait(timeout=300) == -signal.SIGKILL, point
        command = ["run", "--resume", "runs/broken"]
    monkeypatch.delenv("POINT")
    workshop.slimectl("run", "--resume", "runs/broken")
    assert outcome(workshop.folder / "runs" / "broken") == outcome(workshop.folder / "runs" / "whole")


TENSOR = ["cluster.actor_num_gpus_per_node=2", "megatron.tensor_model_parallel_size=2"]


SCHEDULE = ("-s", "train.lr_decay_iters=3")


@pytest.fixture(scope="module")
def two_rounds(tmp_path_factory: pytest.TempPathFactory, model_dir: Callable[..., Path]) -> Workshop:
    """Megatron's run of three rounds `whole`, and `a`, which ended after two of them."""
    workshop = set_up(tmp_path_factory.mktemp("two rounds"), model_dir("llama"))
    workshop.slimectl("run", "--name", "whole", "--backend", "megatron", "-s", "run.num_rollout=3")
    workshop.slimectl("run", "--backend", "megatron", "-s", "run.num_rollout=2", *SCHEDULE)
    return workshop


@pytest.mark.parametrize(
    "change", [["train.backend=megatron", *TENSOR], ["train.backend=fsdp"]], ids=["tensor", "fsdp"]
)
def test_a_run_goes_on_at_another_layout_or_with_another_policy(
    two_rounds: Workshop, tmp_path: Path, change: list[str]
):
    """Within rounding: the third round's answers are the same, and so are its loss and gradient."""
    shutil.copytree(two_rounds.folder, tmp_path, symlinks=True, dirs_exist_ok=True)
    workshop = Workshop(tmp_path, two_rounds.model)
    changes = [word for each in change for word in ("-s", each)]
    workshop.slimectl("run", "--resume", "runs/a", "-s", "run.num_rollout=3", *SCHEDULE, *changes)
    whole, moved = ([line for line in workshop.metrics(name) if line["step"] == 3] for name in ("whole", "a"))
    assert moved[0]["metrics"] == pytest.approx(whole[0]["metrics"], rel=1e-4, abs=1e-6)


def test_the_first_ctrl_c_finishes_the_round_and_saves(workshop: Workshop):
    process = workshop.start("run", "--name", "a", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    metrics = workshop.folder / "runs" / "a" / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 2):
        time.sleep(0.005)
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, words = process.communicate(timeout=300)
    assert process.returncode == 130, words.decode()
    assert b"Continue with: slimectl run --resume runs/a" in words
    workshop.slimectl("run", "--resume", "runs/a")
    assert workshop.metrics("a")[-1]["rollout_id"] == 6


def test_a_damaged_checkpoint_is_passed_over(workshop: Workshop):
    workshop.slimectl("run", "-s", "run.num_rollout=3")
    file = workshop.folder / "runs" / "a" / "step_000003" / "policy" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    workshop.slimectl("run", "--resume", "runs/a", "-s", "run.num_rollout=4")
    assert "Falling back to the previous checkpoint" in workshop.stderr
    assert [line["step"] for line in workshop.metrics("a") if "train/step" in line["metrics"]] == [1, 2, 3, 4]
