"""Ranks write into the driver's run in wandb's shared mode: real clients, and a server that keeps their lines."""

from __future__ import annotations

import gzip
import json
import os
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from slimectl.errors import SettingsError
from slimectl.executors.local import LocalExecutor
from slimectl.protocols import RankPipe
from slimectl.runtime import builders
from slimectl.settings import Settings
from slimectl.settings.layers import from_assignments
from slimectl.settings.loading import resolve
from slimectl.trackers.base import Identity
from slimectl.trackers.wandb import joined_run

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="needs ray: pip install 'slimectl[ray]'")
KEY = "0123456789abcdef0123456789abcdef01234567"
BUCKET = {"id": "YQ==", "name": "", "config": "{}", "historyLineCount": 0}


class WandbServer(BaseHTTPRequestHandler):
    """As much of wandb's server as a run needs: it is begun, and its lines are streamed."""

    protocol_version = "HTTP/1.1"
    streamed: list[tuple[str, dict[str, Any]]]
    begun: list[dict[str, Any]]

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Content-Encoding") == "gzip":
            data = gzip.decompress(data)
        answer: dict[str, Any] = {}
        if self.path.endswith("/file_stream"):
            self.streamed.append((self.path, json.loads(data).get("files") or {}))
        elif self.path == "/graphql":
            body = json.loads(data)
            answer = {"data": {"createRunFiles": {"runID": "YQ==", "uploadHeaders": [], "files": []}}}
            if "upsertBucket" in body["query"]:
                self.begun.append(body["variables"])
                project = {"id": "YQ==", "name": "maths", "entity": {"id": "YQ==", "name": "team"}}
                bucket = BUCKET | {"name": body["variables"]["name"], "project": project}
                answer = {"data": {"upsertBucket": {"bucket": bucket, "inserted": True}}}
        text = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    WandbServer.streamed, WandbServer.begun = [], []
    with ThreadingHTTPServer(("127.0.0.1", 0), WandbServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def settings(*assignments: str) -> Settings:
    return resolve([from_assignments(["track.with=['wandb']", "track.mode=shared", *assignments])]).settings


def serve(build: Callable[[], Any], pipe: RankPipe) -> None:
    """Let a function of the user's log from a rank, by wandb alone."""
    import wandb

    wandb.log({f"mine/of_rank_{os.environ['RANK']}": 1.0})
    pipe.done(build())
    pipe.recv_bytes()


def one() -> int:
    return 1


@pytest.fixture(params=["local", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.slow, needs_ray])])
def executor(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    if request.param == "local":
        executor: Any = LocalExecutor(logs=tmp_path / "logs")
    else:
        from slimectl.executors.ray import RayExecutor

        executor = RayExecutor(request.getfixturevalue("shared_cluster").address, logs=tmp_path / "logs")
    yield executor
    executor.close()


@pytest.mark.slow
def test_ranks_and_driver_write_into_one_run(
    executor: Any, server: ThreadingHTTPServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    shared = settings(f"track.host=http://127.0.0.1:{server.server_port}", "track.entity=team", "track.project=maths")
    [tracker] = builders.start_trackers(shared, tmp_path)
    group = builders.tracked_executor(executor, shared, tmp_path).group(serve, one, ranks=2)
    assert list(group.answers()) == [1]
    tracker.log({"train/lr": 0.5}, step=4)
    group.end()
    tracker.close()
    run_id = json.loads((tmp_path / "track.json").read_text())["run_id"]
    assert {path for path, _ in WandbServer.streamed} == {f"/files/team/maths/{run_id}/file_stream"}
    lines = [
        json.loads(line)
        for _, files in WandbServer.streamed
        for line in files.get("wandb-history.jsonl", {}).get("content", ())
    ]
    logged = {name: value for line in lines for name, value in line.items() if not name.startswith("_")}
    assert logged == {"mine/of_rank_0": 1.0, "mine/of_rank_1": 1.0, "train/lr": 0.5, "train/step": 4}
    systems = json.dumps([files.get("wandb-events.jsonl") for _, files in WandbServer.streamed])
    assert all(f"/l:{label}" in systems for label in ("driver", "rank-0", "rank-1"))
    assert not any(KEY.encode() in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    assert {begun["displayName"] for begun in WandbServer.begun} == {f"run-{run_id[:6]}", None}


def test_a_rank_that_cannot_join_warns_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("WANDB_SERVICE", "that of the driver")
    served = False
    with joined_run(Identity(run_id="abcdefgh"), tmp_path, "rank-1", {"no_such_setting": 1}):
        served = True
    assert served
    assert "track.mode: rank-1 cannot join the run at wandb: " in caplog.text


def test_other_modes_have_ranks_of_their_own(tmp_path: Path):
    executor = LocalExecutor()
    offline = resolve([from_assignments(["track.with=['wandb']", "track.mode=offline"])]).settings
    assert builders.tracked_executor(executor, offline, tmp_path) is executor


@pytest.mark.slow
def test_a_shared_run_offline_is_refused_in_a_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    builders.check_trackers(settings())
    words = r"^track\.mode: shared contradicts {} = offline: .* wandb has no offline shared mode. Drop {}, or set track"
    with pytest.raises(SettingsError, match=words.format("track.kwargs.wandb.mode", "track.kwargs.wandb.mode")):
        builders.check_trackers(settings("track.kwargs.wandb.mode=offline"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    with pytest.raises(SettingsError, match=words.format("WANDB_MODE", "WANDB_MODE")):
        builders.check_trackers(settings())
    with pytest.raises(SettingsError, match=r"track\.mode: shared works only with wandb\. Add wandb to track\.with"):
        resolve([from_assignments(["track.with=['swanlab']", "track.mode=shared"])])
