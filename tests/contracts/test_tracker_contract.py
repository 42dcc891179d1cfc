"""What every tracker promises (protocols.Tracker): the numbers that went in can be read where people look for them."""

from __future__ import annotations

import html
import io
import json
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import forkserver
import pytest
from tracked import Seen, move_trackio, swanlab_records, swanlab_seen, wandb_rows

from slimectl.protocols import Tracker
from slimectl.trackers.base import Identity, TrackedRun
from slimectl.trackers.jsonl import JsonlTracker
from slimectl.trackers.mlflow import MlflowTracker
from slimectl.trackers.stdout import StdoutTracker
from slimectl.trackers.swanlab import SwanlabTracker
from slimectl.trackers.tensorboard import TensorboardTracker
from slimectl.trackers.trackio import TrackioTracker
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


Rows = list[dict[str, Any]]

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
        return json.dumps(self.rows())

    def rows(self) -> Rows:
        return json.loads(self.path.read_text().splitlines()[-1])["rows"]


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
        self.killed = 0

    def open(self, resumed_at: int | None = None) -> Tracker:
        return WandbTracker(run_in(self.folder, resumed=resumed_at is not None))

    def seen(self) -> Seen:
        found: Seen = {}
        for row in wandb_rows(self.folder, killed=self.killed):
            for name in row.keys() & EXPECTED.keys():
                found.setdefault(name, []).append((int(row["train/step"]), row[name]))
        return found

    def texts(self) -> str:
        return json.dumps(self.rows())

    def rows(self) -> Rows:
        assert any(row.get("eval/step") == 3 for row in wandb_rows(self.folder, killed=self.killed))
        (file,) = self.folder.glob("wandb/offline-run-*/files/media/table/eval/small/samples*.json")
        table = json.loads(file.read_text())
        return [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]

    def tables(self) -> int:
        rows = wandb_rows(self.folder, killed=self.killed)
        return sum("eval/small/samples/_type" in row for row in rows)


class Swanlab:
    def __init__(self, folder: Path) -> None:
        self.folder = folder / "swanlab"

    def open(self, resumed_at: int | None = None) -> Tracker:
        return SwanlabTracker(run_in(self.folder.parent, resumed=resumed_at is not None))

    def seen(self) -> Seen:
        return {name: points for name, points in swanlab_seen(self.folder).items() if name in EXPECTED}

    def texts(self) -> str:
        return json.dumps(self.rows())

    def rows(self) -> Rows:
        (file,) = self.folder.glob("**/media/**/*.json")
        return json.loads(file.read_text())["rowData"]

    def tables(self) -> int:
        return sum(record.media.key == "eval/small/samples" for record in swanlab_records(self.folder))


class Mlflow:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def open(self, resumed_at: int | None = None) -> Tracker:
        return MlflowTracker(run_in(self.folder, resumed=resumed_at is not None))

    def run(self) -> tuple[Any, str]:
        """MLflow's own client, and its only run."""
        from mlflow.tracking import MlflowClient

        client = MlflowClient(tracking_uri=f"sqlite:///{self.folder}/mlflow/mlflow.db")
        experiments = [experiment.experiment_id for experiment in client.search_experiments()]
        (run,) = client.search_runs(experiments)
        return client, run.info.run_id

    def seen(self) -> Seen:
        client, run_id = self.run()
        names = client.get_run(run_id).data.metrics
        return {name: [(at.step, at.value) for at in client.get_metric_history(run_id, name)] for name in names}

    def texts(self) -> str:
        return json.dumps(self.rows())

    def rows(self) -> Rows:
        client, run_id = self.run()
        path = client.download_artifacts(run_id, "eval/small/samples/step_000003.json", str(self.folder))
        table = json.loads(Path(path).read_text())
        return [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]


class Trackio:
    def __init__(self, folder: Path) -> None:
        self.project = "-".join(folder.parts[-2:])

    def open(self, resumed_at: int | None = None) -> Tracker:
        return TrackioTracker(run_in(Path("unused"), resumed=resumed_at is not None), project=self.project)

    def lines(self) -> list[dict]:
        from trackio import SQLiteStorage

        return SQLiteStorage.get_logs(self.project, "a")

    def seen(self) -> Seen:
        seen: Seen = {}
        for line in self.lines():
            for name in line.keys() - {"step", "timestamp"}:
                seen.setdefault(name, []).append((line["step"], line[name]))
        return seen

    def texts(self) -> str:
        return json.dumps(self.rows())

    def rows(self) -> Rows:
        (line,) = [line for line in self.lines() if "eval/small/samples" in line]
        assert line["step"] == 3
        return line["eval/small/samples"]["_value"]

    def tables(self) -> int:
        return sum("eval/small/samples" in line for line in self.lines())


BUFFERED = (Wandb, Swanlab, Trackio)
"""Those libraries write to disk when they like, at the latest when they are closed."""


@pytest.fixture(scope="module")
def mlflow_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty database; making one takes MLflow seconds."""
    from mlflow.tracking import MlflowClient

    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(tracking_uri=f"sqlite:///{path}").search_experiments()
    return path


PLACES = [Jsonl, Tensorboard, Stdout, Wandb, Swanlab, Mlflow, Trackio]


@pytest.fixture(params=PLACES, ids=lambda kind: kind.__name__.lower())
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Jsonl:
    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)
    if request.param is Trackio:
        move_trackio(monkeypatch, tmp_path)
    if request.param is Mlflow:
        (tmp_path / "mlflow").mkdir()
        shutil.copy(request.getfixturevalue("mlflow_database"), tmp_path / "mlflow")
    return request.param(tmp_path)


def approximately(seen: Seen) -> dict[str, list]:
    """Trackers round: event files hold float32, a line for people four digits."""
    return {name: [(step, pytest.approx(value, rel=1e-3)) for step, value in points] for name, points in seen.items()}


@pytest.mark.parametrize(
    "place",
    [pytest.param(kind, marks=pytest.mark.slow if kind is Mlflow else ()) for kind in PLACES],
    indirect=True,
    ids=lambda kind: kind.__name__.lower(),
)
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


KILLED = """
import os, signal, sys
from importlib import import_module
from pathlib import Path
from slimectl.trackers.base import Identity, TrackedRun
name, folder, project = sys.argv[1:]
run = TrackedRun(Path(folder), lambda: Identity(run_id="run12345", name="a", mode="offline"))
tracker = getattr(import_module(f"slimectl.trackers.{name}"), f"{name.capitalize()}Tracker")(run, project=project)
tracker.log({"train/lr": 0.5, "rollout/raw_reward": 0.25, "rollout/step": 1.0}, step=1)
tracker.log({"train/lr": 0.25}, step=2)
tracker.table("eval/small/samples", [{"prompt": "p"}], step=3)
tracker.flush()
tracker.log({"train/lr": 0.125}, step=3)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.parametrize("place", BUFFERED, indirect=True, ids=lambda kind: kind.__name__.lower())
def test_a_killed_run_has_every_point_once_when_it_goes_on(place: Any, tmp_path: Path):
    """The checkpoint was saved at step 1; step 2 is known to be written, step 3 may be lost."""
    project = getattr(place, "project", "slimectl")
    words = (type(place).__name__.lower(), str(tmp_path), project)
    # wandb's service of this process, which wandb puts into the environment, would keep what the killed one sent.
    environment = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
    process = forkserver.run_python(KILLED, words, cwd=tmp_path, env=environment)
    assert process.returncode == -signal.SIGKILL, process.stderr
    place.killed = 1
    tracker = place.open(resumed_at=1)
    for step, rate in ((2, 0.25), (3, 0.125), (4, 1.0)):
        tracker.log({"train/lr": rate, "perf/step_time": 9.0}, step=step)
    tracker.table("eval/small/samples", [{"prompt": "p"}], step=3)
    tracker.close()
    seen = place.seen()
    assert seen["train/lr"] == [(1, 0.5), (2, 0.25), (3, 0.125), (4, 1.0)]
    assert seen["rollout/raw_reward"] == [(1, 0.25)]
    assert place.tables() == 1


def test_mlflow_skips_what_it_has_when_a_run_goes_on(tmp_path: Path, mlflow_database: Path):
    (tmp_path / "mlflow").mkdir()
    shutil.copy(mlflow_database, tmp_path / "mlflow")
    place = Mlflow(tmp_path)
    place.open().log({"train/lr": 0.5, "rollout/raw_reward": 0.25, "rollout/step": 1.0}, step=4)  # and killed
    for _ in "again", "and once more":
        tracker = place.open(resumed_at=0)
        tracker.log({"train/lr": 0.5, "rollout/raw_reward": 0.25, "rollout/step": 1.0, "train/loss": 0.0}, step=4)
    tracker.log({"rollout/raw_reward": 0.5, "rollout/step": 2.0}, step=4)  # a round without a step
    tracker.close()
    assert place.seen() == {
        "train/lr": [(4, 0.5)],
        "train/loss": [(4, 0.0)],
        "rollout/raw_reward": [(1, 0.25), (2, 0.5)],
        "rollout/step": [(1, 1.0), (2, 2.0)],
    }


def test_a_table_of_texts_can_be_read(place: Jsonl):
    tracker = place.open()
    texts = {"response": "a | <b>\n# é", "label": "7", "reward": 0.25}
    rows = [{"prompt": f"{word}?", **texts} for word in ("one", "two")]
    tracker.table("eval/small/samples", rows, step=3)
    tracker.close()
    assert not hasattr(place, "rows") or place.rows() == rows
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
