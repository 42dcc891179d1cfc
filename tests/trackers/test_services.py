"""What wandb and SwanLab are told of a run, read back from what they wrote."""

from __future__ import annotations

import builtins
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tracked import swanlab_records, swanlab_seen, trackio_seen, wandb_records, wandb_rows
from trackers.test_resumed_curves import kill_after
from workshop import Workshop

from slimectl.errors import BackendError, MissingExtraError, SettingsError
from slimectl.plugins.registry import TRACKERS
from slimectl.runtime import builders
from slimectl.settings.layers import from_assignments
from slimectl.settings.loading import resolve
from slimectl.trackers.arguments import accepted_arguments
from slimectl.trackers.base import Identity, TrackedRun
from slimectl.trackers.swanlab import SwanlabTracker
from slimectl.trackers.wandb import WandbTracker

KEY = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def keys_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("SWANLAB_API_KEY", KEY)


def settings(*assignments: str) -> Any:
    return resolve([from_assignments(["run.name=a", "track.mode=offline", *assignments])]).settings


def track(folder: Path, *assignments: str, rounds: tuple[int, ...] = (1, 2)) -> None:
    """Four optimizer steps a round, tracked."""
    [tracker] = builders.start_trackers(settings(*assignments), folder)
    for number in rounds:
        tracker.log({"train/lr": 0.5, "rollout/raw_reward": 0.25, "rollout/step": float(number)}, step=4 * number)
    tracker.log({"eval/small_accuracy": 0.75, "eval/step": float(rounds[-1])}, step=4 * rounds[-1])
    tracker.close()


def run_in(folder: Path) -> TrackedRun:
    return TrackedRun(folder, lambda: Identity(run_id="abcdefgh", mode="offline"))


def everything_in(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in folder.rglob("*") if file.is_file())


def test_wandb_gets_project_group_name_and_the_settings_and_never_a_key(tmp_path: Path):
    track(tmp_path, "track.with=['wandb']", "track.project=maths", "track.group=ablation", "track.entity=team")
    [run] = [record.run for record in wandb_records(tmp_path) if record.HasField("run")]
    assert (run.project, run.run_group, run.entity) == ("maths", "ablation", "team")
    assert run.display_name == f"a-{run.run_id[:6]}"
    assert len(run.run_id) == 8
    assert '"lr"' in next(item.value_json for item in run.config.update if item.key == "train")
    assert KEY.encode() not in everything_in(tmp_path)


def test_wandb_draws_each_metric_along_its_own_axis(tmp_path: Path):
    track(tmp_path, "track.with=['wandb']")
    axes = {r.metric.name: r.metric.step_metric for r in wandb_records(tmp_path) if r.HasField("metric")}
    assert axes["rollout/raw_reward"] == "rollout/step"
    assert axes["train/lr"] == "train/step"
    assert axes["eval/small_accuracy"] == "eval/step"
    points = [(row["rollout/step"], row["rollout/raw_reward"]) for row in wandb_rows(tmp_path) if "train/lr" in row]
    assert points == [(1, 0.25), (2, 0.25)]


def test_all_metrics_may_stand_on_the_train_step(tmp_path: Path):
    track(tmp_path, "track.with=['wandb']", "track.always_use_train_step=true")
    axes = {r.metric.name: r.metric.step_metric for r in wandb_records(tmp_path) if r.HasField("metric")}
    assert set(axes.values()) == {"train/step"}


@pytest.mark.parametrize(
    ("key", "tracker", "words"),
    [
        ("api_key=env:X", "trackio", "without a tracker that has accounts. Add wandb, swanlab or mlflow"),
        ("host=http://a", "mlflow", "without wandb. Add it"),
        ("entity=team", "trackio", "without wandb or swanlab. Add one"),
        ("run_id=mine", "trackio", "without a tracker that identifies runs by an id. Add wandb, swanlab or mlflow"),
        ("group=mine", "tensorboard", "without a tracker that uses it. Add wandb, swanlab, mlflow or trackio"),
        ("prometheus_host=0.0.0.0", "wandb", "without an endpoint. Set track.prometheus_port"),
        ("naming=roll", "stdout", "on the terminal, which has its own labels. Add another"),
    ],
)
def test_a_setting_of_a_tracker_that_is_not_chosen_is_refused(key: str, tracker: str, words: str):
    name = key.partition("=")[0]
    with pytest.raises(SettingsError, match=f"track.{name} has no effect {words}"):
        resolve([from_assignments([f"track.{key}", f"track.with=['{tracker}']"])])


def test_a_resumed_run_has_the_same_id_and_another_run_another(tmp_path: Path):
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
    wandb = "track.with=['wandb']"
    folders = (tmp_path / "a", tmp_path / "a", tmp_path / "b")
    ids = [builders.identity(settings(wandb), folder).run_id for folder in folders]
    assert ids[0] == ids[1] != ids[2]
    given = builders.identity(settings(wandb, "track.run_id=mine", "track.random_suffix=false"), tmp_path / "a")
    assert (given.run_id, given.name) == ("mine", "a")


def test_swanlab_gets_project_name_axes_and_never_a_key(tmp_path: Path):
    track(tmp_path, "track.with=['swanlab']", "track.project=maths", "track.group=ablation")
    records = swanlab_records(tmp_path / "swanlab")
    [start] = [record.start for record in records if record.HasField("start")]
    assert (start.project, start.group) == ("maths", "ablation")
    assert start.name == f"a-{start.id[:6]}"
    seen = swanlab_seen(tmp_path / "swanlab")
    assert seen["rollout/raw_reward"] == [(4, 0.25), (8, 0.25)]
    assert seen["rollout/step"] == [(4, 1.0), (8, 2.0)]
    assert seen["eval/small_accuracy"] == [(8, 0.75)]
    assert KEY.encode() not in everything_in(tmp_path)


def test_swanlab_leaves_ctrl_c_to_the_run_and_stdout_to_data(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    asked: list[int] = []
    before = signal.signal(signal.SIGINT, lambda *_: asked.append(1))
    hook = sys.excepthook
    try:
        tracker = SwanlabTracker(run_in(tmp_path))
        os.kill(os.getpid(), signal.SIGINT)
        tracker.log({"train/lr": 0.5}, step=1)
        tracker.close()
    finally:
        signal.signal(signal.SIGINT, before)
    assert asked == [1]
    assert sys.excepthook is hook
    assert swanlab_seen(tmp_path / "swanlab")["train/lr"] == [(1, 0.5)]
    assert capfd.readouterr().out == ""


def test_swanlab_takes_the_names_that_roll_gives_its_arguments(tmp_path: Path):
    arguments = f'logdir = "{tmp_path / "logs"}", experiment_name = "first"'
    track(tmp_path, "track.with=['swanlab']", f"track.tracker_kwargs={{{arguments}}}")
    [start] = [record.start for record in swanlab_records(tmp_path / "logs") if record.HasField("start")]
    assert start.name == "first"


def test_tensorboard_writes_where_its_own_log_dir_says(tmp_path: Path):
    track(
        tmp_path, "track.with=['tensorboard']", "track.mode=none", f'track.kwargs={{log_dir = "{tmp_path / "curves"}"}}'
    )
    assert [file.parent for file in tmp_path.rglob("events.out.tfevents.*")] == [tmp_path / "curves"]


def test_a_hook_logs_into_the_run_by_wandb_itself(tmp_path: Path):
    import wandb

    [tracker] = builders.start_trackers(settings("track.with=['wandb']"), tmp_path)
    wandb.log({"mine/verdict": 0.5})
    tracker.log({"train/lr": 0.25}, step=4)
    tracker.close()
    assert wandb.run is None
    rows = wandb_rows(tmp_path)
    assert [row["mine/verdict"] for row in rows if "mine/verdict" in row] == [0.5]
    assert [row["train/lr"] for row in rows if "train/lr" in row] == [0.25]


def test_a_run_of_the_programs_own_stays_the_global_one(tmp_path: Path):
    import wandb

    own = wandb.init(mode="disabled")
    [tracker] = builders.start_trackers(settings("track.with=['wandb']"), tmp_path)
    assert wandb.run is own
    tracker.close()
    own.finish()


def test_arguments_of_the_users_go_to_the_library(tmp_path: Path):
    track(tmp_path, "track.with=['wandb']", 'track.kwargs.wandb={notes = "on a laptop", tags = ["small"]}')
    [run] = [record.run for record in wandb_records(tmp_path) if record.HasField("run")]
    assert (run.notes, list(run.tags)) == ("on a laptop", ["small"])


@pytest.mark.parametrize("name", ["wandb", "swanlab"])
def test_one_that_cannot_start_stops_the_run_with_the_way_out(name: str, tmp_path: Path):
    (tmp_path / "track.json").write_text('{"run_id": "abcdefgh"}')
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    with pytest.raises(BackendError, match=rf"{name} cannot start: .*\. Set {name.upper()}_API_KEY"):
        builders.start_trackers(settings(f"track.with=['{name}']", f"track.dir={blocked}"), tmp_path)


@pytest.mark.parametrize(
    ("tracker", "arguments", "words"),
    [
        ("wandb", '{notez = "x"}', r"wandb\.notez: no such argument\. Did you mean notes\?"),
        ("wandb", "{settings = {silentt = true}}", r"wandb\.settings\.silentt: .*Did you mean silent\?"),
        ("swanlab", '{experiment_nam = "x"}', r"swanlab\.experiment_nam: .*Did you mean experiment_name\?"),
        ("swanlab", '{login_kwargs = {hots = "x"}}', r"swanlab\.login_kwargs\.hots: .*Did you mean host\?"),
        ("swanlab", "{settings = {terminal = {typo = 1}}}", r"swanlab\.settings\.terminal\.typo: .*max_length"),
        ("swanlab", "{settings = 1}", r"swanlab\.settings: 1 is not a table"),
        ("tensorboard", '{logdir = "x"}', r"tensorboard\.logdir: .*Did you mean log_dir\?"),
        ("mlflow", '{uri = "x"}', r"mlflow\.uri: .*use one: api_key, experiment_name"),
        ("trackio", '{spaceid = "x"}', r"trackio\.spaceid: .*Did you mean space_id\?"),
        ("jsonl", '{file = "x"}', r"jsonl\.file: no such argument\. Drop it, or use one: path"),
        ("stdout", '{file = "x"}', r"stdout\.file: no such argument\. Drop it: this tracker has no arguments"),
    ],
)
def test_an_argument_that_the_tracker_does_not_take_is_refused(
    tmp_path: Path, tracker: str, arguments: str, words: str
):
    mistaken = settings(f"track.with=['{tracker}', 'wandb']", f"track.kwargs={{{tracker} = {arguments}}}")
    for start in (builders.check_trackers, lambda mistaken: builders.start_trackers(mistaken, tmp_path)):
        with pytest.raises(SettingsError, match=rf"^track\.kwargs\.{words}"):
            start(mistaken)


def test_a_value_that_the_library_does_not_take_is_named(tmp_path: Path):
    short = settings("track.with=['swanlab']", "track.kwargs={settings = {terminal = {max_length = 9}}}")
    with pytest.raises(BackendError, match=r"swanlab cannot start: terminal\.max_length: Input should be"):
        builders.start_trackers(short, tmp_path)


def test_every_trackers_arguments_are_checked():
    assert all(accepted_arguments(TRACKERS.load(name)) is not None for name in TRACKERS.parts)


def test_swanlab_keeps_the_console_to_the_user_beside_settings_of_the_users(tmp_path: Path):
    import swanlab

    [tracker] = builders.start_trackers(
        settings("track.with=['swanlab']", "track.kwargs={settings = {terminal = {max_length = 999}}}"), tmp_path
    )
    terminal = swanlab.get_run()._ctx.config.settings.terminal
    tracker.close()
    assert (terminal.proxy_type, terminal.max_length) == ("none", 999)


@pytest.mark.parametrize(
    "given", ['track.kwargs.wandb={api_key = "k"}', 'track.kwargs.wandb={settings = {api_key = "very-secret"}}']
)
def test_a_key_among_the_settings_is_refused_and_not_repeated(given: str):
    with pytest.raises(SettingsError, match=r"track\.kwargs: wandb\.api_key is a secret.*WANDB_API_KEY") as refused:
        settings(given)
    assert "very-secret" not in str(refused.value)


@pytest.mark.parametrize("kind", [WandbTracker, SwanlabTracker])
def test_a_missing_library_names_its_extra(
    kind: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name in ("wandb", "swanlab"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtraError, match=r"pip install 'slimectl\[(wandb|swanlab)\]'"):
        kind(run_in(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_lacks_a_library_is_refused_before_it_has_a_folder(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys.modules["slimectl.runtime.builders.trackers"], "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"track\.with needs wandb"):
        builders.check_trackers(settings("track.with=['stdout', 'wandb']"))


@pytest.mark.slow
def test_a_killed_run_and_its_resume_are_one_curve_under_both_namings(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
):
    # wandb's service of this process, which wandb puts into the environment, would write the run's file when it likes.
    monkeypatch.delenv("WANDB_SERVICE", raising=False)
    monkeypatch.setenv("TRACKIO_DIR", str(workshop.folder / "trackio"))
    trackers = ["-s", "track.with=['wandb', 'swanlab', 'trackio']", "-s", "track.mode=offline"]
    tracked = [*trackers, "-s", "track.naming=both", "-s", "run.num_rollout=4", "-s", "run.save_interval=2"]
    own = ["-s", 'eval.data.small={path = "prompts.jsonl@[0:3]", n_samples_per_prompt = 2, max_response_len = 4}']
    kill_after(workshop, 3, "run", *tracked, *own)
    workshop.slimectl("run", "--resume", "runs/a")
    assert "failed" not in workshop.stderr
    folder = workshop.folder / "runs" / "a"
    assert len({r.run.run_id for r in wandb_records(folder, killed=1) if r.HasField("run")}) == 1
    rows = wandb_rows(folder, killed=1)
    for ours, theirs in [("rollout/raw_reward", "critic/score/mean"), ("eval/small", "val/small/score/mean")]:
        points = [(row[ours], row[theirs]) for row in rows if ours in row]
        assert [a for a, _ in points] == [b for _, b in points]
    lines = workshop.metrics("a")
    seen = {"swanlab": swanlab_seen(folder / "swanlab"), "trackio": trackio_seen(workshop.folder / "trackio")}
    for name in ("rollout/raw_reward", "train/lr", "eval/small"):
        curve = [(line["step"], line["metrics"][name]) for line in lines if name in line["metrics"]]
        assert len(curve) >= 3
        assert [row[name] for row in rows if name in row] == [value for _, value in curve]
        for tracker, points in seen.items():
            assert points[name] == curve, tracker
    assert max(line["metrics"].get("eval/small/response_len/max", 0) for line in lines) <= 4
    assert KEY.encode() not in everything_in(folder)
