"""`slimectl engines` where no engine can change: each line says why and what to do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slimectl.cli import engines
from slimectl.data.engine_requests import EngineReply, EngineRow, EngineState, take_requests, write_state
from slimectl.data.locks import Lock
from slimectl.data.ownership import LOCK
from slimectl.errors import BackendError, SettingsError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "my run"
    folder.mkdir()
    (folder / "manifest.json").write_text(json.dumps({"slimectl": "0", "stage": "run"}))
    (folder / "run.toml").write_text("[engine]\nnum_engines = 2\n")
    return folder


@pytest.fixture
def active(run: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(engines, "_is_active", lambda folder: (run / LOCK).exists())  # this process holds the lock
    with Lock(run / LOCK, "busy"):
        yield run


def test_a_run_that_is_not_active_or_has_no_servers_is_refused(run: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(SettingsError, match=r"elsewhere: is not the folder of a run\. `slimectl runs` lists yours"):
        engines.add(run.parent / "elsewhere")
    with pytest.raises(SettingsError, match=r"is not active\. Continue it with: slimectl run --resume .*my run"):
        engines.list_(run)
    monkeypatch.setattr(engines, "_is_active", lambda folder: True)
    (run / "run.toml").write_text("")
    with pytest.raises(SettingsError, match=r"its only engine is in the process of the run.* --engines 2"):
        engines.remove(run)
    assert not (run / "engines").exists()


def answering(run: Path, monkeypatch: pytest.MonkeyPatch, *replies: EngineReply) -> list[Any]:
    """Let a run reply to the request that comes, one reply each time the command looks. Return its requests."""
    requests: list[Any] = []
    row = EngineRow(3, "http://127.0.0.1:1", "here", "ready", "12", 5)
    remaining = list(replies)

    def sleep(_: float) -> None:
        requests.extend(take_requests(run))
        name = requests[-1][0]
        write_state(run, EngineState([row], {name: remaining.pop(0)}))

    monkeypatch.setattr(engines.time, "sleep", sleep)
    return requests


def test_a_change_prints_its_lines_as_they_come_and_fails_with_what_failed(
    active: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    first = EngineReply(True, ("engine 2 joined",))
    last = EngineReply(False, ("engine 2 joined", "engine 4 joined"), ("engine-3 died while starting",))
    requests = answering(active, monkeypatch, first, last)
    with pytest.raises(BackendError, match=r"^engine-3 died while starting$"):
        engines.add(active, count=3)
    assert capsys.readouterr().out == "engine 2 joined\nengine 4 joined\n"
    assert [(request.action, request.count) for _, request in requests] == [("add", 3)]


def test_engines_are_listed_as_a_table_and_as_json(
    active: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    answering(active, monkeypatch, EngineReply(), EngineReply())
    engines.list_(active)
    table = capsys.readouterr().out.splitlines()
    assert [line.split() for line in table] == [
        ["engine", "state", "weights", "requests", "machine", "address"],
        ["3", "ready", "12", "5", "here", "http://127.0.0.1:1"],
    ]
    engines.list_(active, as_json=True)
    assert json.loads(capsys.readouterr().out) == {
        "engine": 3, "url": "http://127.0.0.1:1", "machine": "here", "state": "ready", "weight_version": "12",
        "requests": 5,
    }  # fmt: skip


def test_a_run_that_ends_before_it_replies_is_an_error_and_its_request_is_removed(
    active: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(engines, "SILENCE_S", 0.0)
    monkeypatch.setattr(engines.time, "sleep", lambda _: (active / LOCK).unlink(missing_ok=True))
    with pytest.raises(BackendError, match="the run ended before that was done"):
        engines.remove(active, ["0"], drain=5)
    assert "waiting until the run reads the request" in capsys.readouterr().err
    assert not list((active / "engines").iterdir())


def test_without_waiting_the_request_stays_for_the_run(active: Path):
    engines.remove(active, ["0", "2"], drain=5, no_wait=True)
    ((_, request),) = take_requests(active)
    assert (request.action, list(request.engines), request.drain_s) == ("remove", ["0", "2"], 5)
