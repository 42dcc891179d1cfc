"""Accounts of trackers: which key they send, that offline sends nothing, and settings that name other settings."""

from __future__ import annotations

import base64
import json
import sqlite3
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tracked import move_trackio, swanlab_records, swanlab_seen, wandb_records, wandb_rows
from workshop import Workshop

from slimectl.errors import BackendError, SettingsError
from slimectl.migrate.launch_scripts.reading import read
from slimectl.migrate.launch_scripts.writing import settings_file
from slimectl.runtime import builders
from slimectl.settings.layers import from_assignments, from_file
from slimectl.settings.loading import resolve

KEY = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Service:
    """A server that refuses every key, and what it was asked."""

    url: str = ""
    requests: list[tuple[str, str | None]] = field(default_factory=list)


@pytest.fixture
def service() -> Iterator[Service]:
    asked = Service()

    class Refusal(BaseHTTPRequestHandler):
        def refuse(self) -> None:
            asked.requests.append((self.path, self.headers.get("Authorization")))
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(401)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        do_GET = do_POST = do_PUT = refuse

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Refusal)
    asked.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield asked
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def hosts(service: Service, monkeypatch: pytest.MonkeyPatch) -> Service:
    """Every tracker's server is the service, and this machine has no login and no key."""
    for name in ("WANDB_BASE_URL", "SWANLAB_API_HOST", "SWANLAB_WEB_HOST", "MLFLOW_TRACKING_URI"):
        monkeypatch.setenv(name, service.url)
    for name in ("WANDB_API_KEY", "SWANLAB_API_KEY", "WANDB_MODE", "SWANLAB_MODE", "WANDB_SERVICE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "another")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MY_KEY", KEY)
    return service


def settings(*assignments: str) -> Any:
    return resolve([from_assignments(["run.name=a", "track.project=p", *assignments])]).settings


SENT = {
    "wandb": "Basic " + base64.b64encode(f"api:{KEY}".encode()).decode(),
    "swanlab": KEY,
    "mlflow": f"Bearer {KEY}",
}


@pytest.mark.parametrize(
    ("tracker", "key"),
    [
        ("wandb", "track.api_key=env:MY_KEY"),
        ("wandb", 'track.kwargs.wandb={api_key = "env:MY_KEY"}'),
        ("wandb", 'track.kwargs={api_key = "env:MY_KEY", project = "p"}'),
        ("swanlab", "track.api_key=env:MY_KEY"),
        ("swanlab", 'track.kwargs.swanlab={api_key = "env:MY_KEY"}'),
        ("swanlab", 'track.kwargs.swanlab={login_kwargs = {api_key = "env:MY_KEY"}}'),
        ("mlflow", "track.api_key=env:MY_KEY"),
        ("mlflow", 'track.kwargs.mlflow={api_key = "env:MY_KEY"}'),
    ],
)
def test_a_key_of_the_settings_reaches_the_server(tracker: str, key: str, hosts: Service, tmp_path: Path):
    host = [f"track.host={hosts.url}"] if tracker == "wandb" else []  # it reads WANDB_BASE_URL once a process
    given = settings(f"track.with=['{tracker}']", key, *host)
    builders.check_trackers(given)
    with pytest.raises(BackendError, match=f"{tracker} cannot start"):
        builders.start_trackers(given, tmp_path)
    assert {sent for _, sent in hosts.requests} == {SENT[tracker]}


def test_a_run_offline_sends_nothing_and_needs_no_key(hosts: Service, workshop: Workshop, monkeypatch: Any):
    for name in ("WANDB_API_KEY", "SWANLAB_API_KEY"):
        monkeypatch.setenv(name, "no key at all")
    trackers = (
        "-s", "track.with=['wandb', 'swanlab']", "-s", "track.mode=offline", "-s", "run.num_rollout=1",
        "-s", 'track.kwargs.swanlab={login_kwargs = {api_key = "env:NOWHERE"}}',
        "-s", 'track.kwargs.wandb={api_key = "env:NOWHERE", notes = "offline"}',
    )  # fmt: skip
    workshop.slimectl("run", *trackers)
    assert hosts.requests == []
    folder = workshop.folder / "runs" / "a"
    rewards = [line["metrics"]["rollout/raw_reward"] for line in workshop.metrics("a") if "train/lr" in line["metrics"]]
    assert [row["rollout/raw_reward"] for row in wandb_rows(folder) if "train/lr" in row] == rewards
    assert [value for _, value in swanlab_seen(folder / "swanlab")["rollout/raw_reward"]] == rewards


@pytest.mark.parametrize("variable", ["WANDB_MODE", "SWANLAB_MODE"])
def test_the_mode_of_the_environment_needs_no_key_either(variable: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(variable, "offline")
    given = settings(f"track.with=['{variable.partition('_')[0].lower()}']", "track.api_key=env:NOWHERE")
    builders.check_trackers(given)
    monkeypatch.setenv(variable, "online")
    with pytest.raises(SettingsError, match=r"track\.api_key: env:NOWHERE: the variable is not set"):
        builders.check_trackers(given)


def test_one_key_for_two_accounts_is_refused():
    with pytest.raises(
        SettingsError, match=r"wandb and mlflow have different accounts\. Set track\.kwargs\.wandb\.api"
    ):
        settings("track.with=['wandb', 'mlflow']", "track.api_key=env:MY_KEY")


@pytest.mark.parametrize(
    ("tracker", "advice"),
    [
        ("wandb", "Set WANDB_API_KEY in the environment, or use env:NAME"),
        ("swanlab", "Set SWANLAB_API_KEY in the environment, or use env:NAME"),
        ("mlflow", "Set MLFLOW_TRACKING_TOKEN in the environment, or use env:NAME"),
        ("trackio", "Set HF_TOKEN in the environment, or use env:NAME"),
        ("tensorboard", "settings are written to files. Use env:NAME"),
    ],
)
def test_a_literal_key_is_refused_with_what_works(tracker: str, advice: str):
    with pytest.raises(SettingsError, match=advice):
        settings(f"track.with=['{tracker}']", f'track.kwargs.{tracker}={{api_key = "{KEY}"}}')


def test_settings_of_trackers_may_name_other_settings(tmp_path: Path):
    (tmp_path / "roll.yaml").write_text(
        "exp_name: first\ntrack_with: wandb\n"
        "tracker_kwargs:\n  project: maths-${exp_name}\n  tags: ['lr ${train.lr}']\n"
        "track: {mode: offline, group: '${algorithm.name}', dir: '" + str(tmp_path) + "/${run.name}'}\n"
    )
    given = resolve([from_file(tmp_path / "roll.yaml")]).settings
    builders.check_trackers(given)
    [tracker] = builders.start_trackers(given, tmp_path)
    tracker.close()
    [run] = [record.run for record in wandb_records(tmp_path / "first") if record.HasField("run")]
    assert (run.project, run.run_group, list(run.tags)) == ("maths-first", "grpo", ["lr 1e-06"])
    assert run.display_name.startswith("first-")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("${HOME}", r"track\.project: \$\{HOME\} is not a setting. Write \$\{SECTION.KEY\}, for example"),
        ("${train.learning}", "is not a setting"),
        ("${run.num_rollout}", r"is not set to a string or a number. Set run\.num_rollout, or write the value"),
        ("${track.api_key}", "is not set to a string or a number"),
    ],
)
def test_a_placeholder_that_means_nothing_is_refused(text: str, words: str, tmp_path: Path):
    given = settings("track.with=['wandb']", "track.mode=offline", "run.num_rollout=none", f"track.project={text}")
    with pytest.raises(SettingsError, match=words):
        builders.check_trackers(given)


ROLL = """
exp_name: "words"
pretrain: {model}
rollout_batch_size: 4
num_return_sequences_in_group: 2
track_with: {tracker}
tracker_kwargs:
  {arguments}
"""


@pytest.mark.parametrize(
    ("tracker", "arguments"),
    [
        ("wandb", "{api_key: a_key_of_mine, project: ours, name: '${exp_name}_wandb', notes: a note, tags: [x, y]}"),
        ("wandb", "{api_key: '${oc.env:MY_KEY}', project: ours, name: '${exp_name}_wandb', tags: [x, y]}"),
        (
            "swanlab",
            "{login_kwargs: {api_key: a_key_of_mine}, project: ours, logdir: runs/words/swanlab, "
            "experiment_name: '${exp_name}_swanlab', tags: [x, y]}",
        ),
        ("tensorboard", "{log_dir: 'curves/${exp_name}'}"),
        ("trackio", "{project: ours, name: '${exp_name}_trackio', tags: [x, y]}\ntrackio_max_traces_per_step: 32"),
    ],
)
def test_a_tracker_of_a_file_of_roll_tracks_offline(
    tracker: str, arguments: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    if tracker == "trackio":
        move_trackio(monkeypatch, tmp_path)
    file = tmp_path / "roll.yaml"
    file.write_text(ROLL.format(model="/m", tracker=tracker, arguments=arguments))
    conversion = read(file, environ={"MY_KEY": "a_key_of_mine"}).conversion
    written = settings_file(conversion, file, [])
    assert "a_key_of_mine" not in written
    [track] = [section for section in written.split("\n\n") if section.startswith("[track]")]
    Path("track.toml").write_text(written[written.index(track) :])
    mode = [] if tracker in ("tensorboard", "trackio") else ["track.mode=offline"]
    given = resolve([from_file(Path("track.toml")), from_assignments(["run.name=words", *mode])]).settings
    builders.check_trackers(given)
    folder = tmp_path / "runs" / "words"
    folder.mkdir(parents=True)
    for started in builders.start_trackers(given, folder):
        started.log({"rollout/raw_reward": 0.5}, step=1)
        started.close()
    if tracker == "wandb":
        [run] = [record.run for record in wandb_records(folder) if record.HasField("run")]
        assert (run.project, run.display_name, list(run.tags)) == ("ours", "words_wandb", ["x", "y"])
    elif tracker == "swanlab":
        [start] = [record.start for record in swanlab_records(folder / "swanlab") if record.HasField("start")]
        assert (start.project, start.name, list(start.tags)) == ("ours", "words_swanlab", ["x", "y"])
    elif tracker == "trackio":
        with sqlite3.connect(tmp_path / "ours.db") as database:
            [(name, config)] = database.execute("SELECT run_name, config FROM configs")
        assert (name, json.loads(config)["tags"]) == ("words_trackio", ["x", "y"])
    else:
        assert list((tmp_path / "curves" / "words").glob("events.out.tfevents.*"))
