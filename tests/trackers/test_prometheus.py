"""The endpoint for Prometheus, read over HTTP by Prometheus' own parser."""

from __future__ import annotations

import socket
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from slimectl.data.metrics_catalogue import CATALOGUE
from slimectl.errors import BackendError, MissingExtraError
from slimectl.runtime import builders
from slimectl.settings import Settings
from slimectl.settings.layers import from_assignments
from slimectl.settings.loading import resolve
from slimectl.trackers.prometheus import PrometheusTracker, prometheus_name

parser = pytest.importorskip("prometheus_client.parser", reason="needs prometheus_client: slimectl[prometheus]")


def settings(*assignments: str) -> Settings:
    return resolve([from_assignments(["track.with=[]", "track.prometheus_port=0", *assignments])]).settings


def scraped(port: int) -> dict[str, tuple[str, float]]:
    """Name -> run and value."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=300) as answer:
        families = parser.text_string_to_metric_families(answer.read().decode())
        return {each.name: (each.labels["run"], each.value) for family in families for each in family.samples}


def test_the_endpoint_has_the_last_value_of_every_metric_and_closes_with_the_run(tmp_path: Path):
    [tracker] = builders.start_trackers(settings("track.naming=both"), tmp_path / 'a "run"')
    endpoint: PrometheusTracker = tracker.tracker.tracker
    try:
        assert scraped(endpoint.port) == {}
        tracker.log({"rollout/raw_reward": 0.5, "eval/gsm8k-pass@8": float("inf")}, step=1)
        tracker.table("eval/gsm8k/samples", [{"prompt": "p"}], step=1)
        tracker.log({"rollout/raw_reward": -0.25, "perf/step_time": 1e-9}, step=2)
        assert scraped(endpoint.port) == {
            "slimectl_train_step": ('a "run"', 2.0),
            "slimectl_rollout_raw_reward": ('a "run"', -0.25),
            "slimectl_critic_score_mean": ('a "run"', -0.25),
            "slimectl_eval_gsm8k_pass_at_8": ('a "run"', float("inf")),
            "slimectl_perf_step_time": ('a "run"', 1e-9),
        }
    finally:
        tracker.close()
    with pytest.raises(urllib.error.URLError, match="refused"):
        scraped(endpoint.port)


@pytest.mark.slow
def test_the_endpoint_is_not_reached_from_other_machines_unless_asked_for(tmp_path: Path):
    for host, address in (("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "0.0.0.0")):
        [tracker] = builders.start_trackers(settings(f"track.prometheus_host={host}"), tmp_path)
        listening = tracker.tracker._server.socket.getsockname()[0]
        tracker.close()
        assert listening == address


def test_a_port_in_use_and_an_unknown_host_are_one_line_each(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BackendError, match=rf"^track\.prometheus_port: 127\.0\.0\.1:{port} .*in use\. Set another"):
            builders.start_trackers(settings(f"track.prometheus_port={port}"), tmp_path)
    words = r"^track\.prometheus_port: no\.such\.host\.invalid:0 cannot be opened: .*\. Set another"
    with pytest.raises(BackendError, match=words):
        builders.start_trackers(settings("track.prometheus_host=no.such.host.invalid"), tmp_path)


def test_two_metrics_that_prometheus_cannot_tell_apart_are_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    [tracker] = builders.start_trackers(settings(), tmp_path)
    tracker.log({"mine/a-b": 1.0}, step=1)
    tracker.log({"mine/a_b": 2.0, "mine/c": 3.0}, step=1)
    values = scraped(tracker.tracker.port)
    tracker.close()
    assert (values["slimectl_mine_a_b"][1], values["slimectl_mine_c"][1]) == (1.0, 3.0)
    assert (
        "the endpoint failed at step 1: mine/a_b has the same Prometheus name as mine/a-b. The run continues"
        in caplog.text
    )


def test_every_metric_of_the_catalogue_has_a_name_of_its_own():
    names = {metric.name for metric in CATALOGUE}
    assert len({prometheus_name(name) for name in names}) == len(names)


def test_a_run_without_the_library_is_refused_before_it_has_a_folder(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys.modules["slimectl.runtime.builders.trackers"], "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"track\.prometheus_port needs prometheus_client"):
        builders.check_trackers(settings())
