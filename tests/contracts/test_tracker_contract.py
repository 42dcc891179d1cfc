"""What every tracker promises (protocols.Tracker): the numbers that went in can be read where people look for them."""

from __future__ import annotations

import html
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from tracked import Seen, swanlab_seen, wandb_rows

from slimectl.protocols import Tracker
from slimectl.trackers.base import Identity, TrackedRun
from slimectl.trackers.jsonl import JsonlTracker
from slimectl.trackers.stdout import StdoutTracker
from slimectl.trackers.swanlab import SwanlabTracker
from slimectl.trackers.tensorboard import TensorboardTracker
from slimectl.trackers.wandb import WandbTracker

TRACKED = {
    1: {"train/lr": 0.5, "rollout/raw_reward": 0.25, "train/grad_norm": 2.0},
    2: {"train/lr": -0.125, "rollout/raw_reward": 0.75, "train/grad_norm": 0.0625, "eval/small_accuracy": 0.375},
    7: {"train/lr": 1e-6, "rollout/raw_reward": 0.0},
}
EXPECTED: Seen = {
    "train/lr": [(1, 0.5), (2, -0.125), (7, 1e-6)],
    "rollout/raw_reward": [(1, 0.25), (2, 0.75), (7, 0.0)],
    "train/grad_norm": [(1, 2.0), (2, 0.0625)],
    "eval/small_accuracy": [(2, 0.375)],
}


OFFLINE = Identity(run_id="run12345", name="a", mode="offline")


def run_in(folder: Path, **facts: Any) -> TrackedRun:
    return TrackedRun(folder, lambda: OFFLINE, **facts)


class Jsonl:
    def __init__(self, folder: Path) -> None:
        self.path = folder / "tracked.jsonl"

    def open(self, resumed_at: int | None = None) -> Tracker:
        return JsonlTracker(run_in(self.path.parent))

    def seen(self) -> Seen:
        found: Seen = {}
        for line in map(json.loads, self.path.read_text().splitlines()):
            for name, value in line["metrics"].items():
                found.setdefault(name, []).append((line["step"], value))
        return found

    def texts(self) -> str:
        return json.dumps([json.loads(line).get("rows") for line in self.path.read_text().splitlines()])


class Tensorboard:
    def __init__(self, folder: Path) -> None:
        self.folder = folder / "tensorboard"

    def open(self, resumed_at: int | None = None) -> Tracker:
        return TensorboardTracker(run_in(self.folder.parent, resumed_at=resumed_at))

    def seen(self) -> Seen:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        read = EventAccumulator(str(self.folder), size_guidance={"scalars": 0})
        read.Reload()
        return {name: [(at.step, at.value) for at in read.Scalars(name)] for name in read.Tags()["scalars"]}

    def texts(self) -> str:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        read = EventAccumulator(str(self.folder))
        read.Reload()
        (at,) = read.Tensors("eval/small/samples/text_summary")
        assert at.step == 3
        return at.tensor_proto.string_val[0].decode()


SHORT = {
    "lr": "train/lr",
    "reward": "rollout/raw_reward",
    "grad": "train/grad_norm",
    "small_accuracy": "eval/small_accuracy",
}
"""What a line for people calls them."""


class Stdout:
    def __init__(self, folder: Path) -> None:
        self.stream = io.StringIO()

    def open(self, resumed_at: int | None = None) -> Tracker:
        return StdoutTracker(self.stream)

    def seen(self) -> Seen:
        found: Seen = {}
        for line in self.stream.getvalue().splitlines():
            step, rest = re.fullmatch(r"step +(\d+)  (.*)", line).groups()
            for name, value in (pair.rsplit(" ", 1) for pair in rest.split("  ")):
                found.setdefault(SHORT[name], []).append((int(step), float(value)))
        return found

    def texts(self) -> str:
        return self.stream.getvalue()


class Wandb:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def open(self, resumed_at: int | None = None) -> Tracker:
        return WandbTracker(run_in(self.folder))

    def seen(self) -> Seen:
        found: Seen = {}
        for row in wandb_rows(self.folder):
            for name in row.keys() & EXPECTED.keys():
                found.setdefault(name, []).append((int(row["train/step"]), row[name]))
        return found

    def texts(self) -> str:
        assert any(row.get("eval/step") == 3 for row in wandb_rows(self.folder))
        (file,) = self.folder.glob("wandb/offline-run-*/files/media/table/eval/small/samples*.json")
        return file.read_text()


class Swanlab:
    def __init__(self, folder: Path) -> None:
        self.folder = folder / "swanlab"

    def open(self, resumed_at: int | None = None) -> Tracker:
        return SwanlabTracker(run_in(self.folder.parent))

    def seen(self) -> Seen:
        return {name: points for name, points in swanlab_seen(self.folder).items() if name in EXPECTED}

    def texts(self) -> str:
        return "".join(file.read_text() for file in sorted(self.folder.glob("**/media/**/*.txt")))


BUFFERED = (Wandb, Swanlab)
"""Those libraries write to disk when they like, at the latest when they are closed."""


@pytest.fixture(params=[Jsonl, Tensorboard, Stdout, Wandb, Swanlab], ids=lambda kind: kind.__name__.lower())
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Jsonl:
    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)
    return request.param(tmp_path)


def approximately(seen: Seen) -> dict[str, list]:
    """Trackers round: event files hold float32, a line for people four digits."""
    return {name: [(step, pytest.approx(value, rel=1e-3)) for step, value in points] for name, points in seen.items()}


def test_every_number_is_found_under_its_name_and_step(place: Jsonl):
    tracker = place.open()
    for step, metrics in TRACKED.items():
        tracker.log(metrics, step=step)
    tracker.close()
    assert place.seen() == approximately(EXPECTED)


def test_a_step_is_there_before_the_tracker_is_closed(place: Jsonl):
    if isinstance(place, BUFFERED):
        pytest.skip("the library has a buffer of its own")
    tracker = place.open()
    tracker.log(TRACKED[1], step=1)
    seen = place.seen()
    tracker.close()
    assert seen["train/lr"] == [(1, 0.5)]
    assert seen["rollout/raw_reward"] == [(1, 0.25)]


def test_a_resumed_run_goes_on_in_the_same_place(place: Jsonl):
    for resumed_at, steps in ((None, (1, 2)), (3, (7,))):
        tracker = place.open(resumed_at)
        for step in steps:
            tracker.log(TRACKED[step], step=step)
        tracker.close()
    assert place.seen()["train/lr"] == approximately(EXPECTED)["train/lr"]


def test_a_table_of_texts_can_be_read(place: Jsonl):
    tracker = place.open()
    rows = [{"prompt": f"{word}?", "answer": "a | <b>", "reward": 0.25} for word in ("one", "two")]
    tracker.table("eval/small/samples", rows, step=3)
    tracker.close()
    found = html.unescape(place.texts())
    assert all(text in found for text in ("one?", "two?", "a | <b>", "0.25"))


def test_nothing_to_say_is_no_error(place: Jsonl):
    tracker = place.open()
    tracker.log({}, step=1)
    tracker.close()
    assert place.seen() == {}


@pytest.mark.parametrize(("one_axis", "steps"), [(False, [1, 3]), (True, [4, 12])])
def test_tensorboard_puts_each_metric_on_its_own_axis(tmp_path: Path, one_axis: bool, steps: list[int]):
    place = Tensorboard(tmp_path)
    tracker = TensorboardTracker(run_in(tmp_path, one_axis=one_axis))
    for step, rollout in ((4, 1), (12, 3)):  # four optimizer steps a round
        tracker.log({"train/lr": 1.0, "rollout/raw_reward": 0.5, "rollout/step": float(rollout)}, step=step)
    tracker.close()
    assert [at for at, _ in place.seen()["rollout/raw_reward"]] == steps
    assert [at for at, _ in place.seen()["train/lr"]] == [4, 12]
