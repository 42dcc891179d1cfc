"""A timeline for the page and for Perfetto: read while it grows, with foreign lines left out, and nested by hand."""

from __future__ import annotations

import json
import os
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

import forkserver
import pytest
from views import page_answers

from slimectl.cli.perfetto import trace_events, write_trace
from slimectl.cli.viewer.api import ViewApi
from slimectl.cli.viewer.export import write_page
from slimectl.cli.viewer.library import Library
from slimectl.errors import SettingsError

SPANS = [
    {"round": 1, "lane": "trainer", "name": "wait", "start": 100.0, "end": 104.0},
    {"round": 1, "lane": "trainer", "name": "actor_train", "start": 104.0, "end": 105.5, "busy": 1.4},
    {"round": 1, "lane": "engine/0", "name": "request", "start": 100.0, "end": 103.0, "group": 0, "index": 1, "turn": 0,
     "prompt_tokens": 5, "tokens": 10, "queue": 0.5, "prefill": 0.5, "decode": 2.0},
    {"round": 1, "lane": "engine/0", "name": "request", "start": 101.0, "end": 102.0, "group": 0, "index": 2, "turn": 0,
     "prompt_tokens": 5, "tokens": 3},
    {"round": 1, "lane": "engine/0", "name": "request", "start": 103.000001, "end": 104.0, "group": 1, "index": 3},
]  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "run.toml").write_text("")
    (folder / "metrics.jsonl").write_text('{"step": 1, "rollout_id": 1, "metrics": {"rollout/raw_reward": 0.5}}\n')
    (folder / "timeline.jsonl").write_text("".join(json.dumps(span) + "\n" for span in SPANS))
    return folder


def ask(run: Path, **parameters: str) -> dict[str, Any]:
    answer: dict[str, Any] = ViewApi(Library([run]), lambda folder: None).answer(
        "timeline", {"run": "n0", **parameters}
    )
    return answer


def test_a_growing_timeline_is_read_from_where_it_was_left(run: Path):
    first = ask(run)
    assert first["spans"] == SPANS
    assert not first["more"]
    file = run / "timeline.jsonl"
    with file.open("a") as growing:
        growing.write(json.dumps(SPANS[0] | {"round": 2}) + '\n{"lane": "trainer", "na')
    later = ask(run, offset=str(first["offset"]))
    assert [span["round"] for span in later["spans"]] == [2]
    file.write_text(file.read_text()[:100])  # cut back by a resume
    assert ask(run, offset=str(later["offset"])) == {"spans": [], "offset": 0, "more": True}


def test_lines_that_are_no_spans_are_left_out(run: Path):
    span = {"lane": "x", "name": "y", "start": 1.0, "end": 2.0}
    changes = [{"lane": 3}, {"name": None}, {"start": float("nan")}, {"start": "1"}, {"end": [2]}]
    foreign = ['["lane"]', "7", "half {", '{"lane": "x"}', *(json.dumps(span | change) for change in changes)]
    (run / "timeline.jsonl").write_text("\n".join([*foreign, json.dumps(SPANS[0])]) + "\n")
    assert ask(run)["spans"] == SPANS[:1]


def test_a_saved_page_has_the_timeline(run: Path):
    write_page(ViewApi(Library([run]), lambda folder: None), run.parent / "a.html")
    answers = page_answers(run.parent / "a.html")
    assert answers["timeline?run=n0"]["spans"] == SPANS
    assert answers["catalogue"]["runs"][0]["timeline_bytes"] == (run / "timeline.jsonl").stat().st_size


def test_a_trace_has_a_process_for_every_lane_and_rows_without_overlap(run: Path):
    write_trace(run, run.parent / "trace.json")
    events = json.loads((run.parent / "trace.json").read_text())["traceEvents"]
    labels = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert labels == {1: "a: rounds", 2: "trainer", 3: "engine/0"}
    slices = [event for event in events if event["ph"] == "X"]
    found = {(event["pid"], event["tid"], event["name"], event["ts"], event["dur"]) for event in slices}
    assert found == {
        (1, 1, "round 1", 0, 5_500_000), (2, 1, "wait", 0, 4_000_000), (2, 1, "actor_train", 4_000_000, 1_500_000),
        (3, 1, "request", 0, 3_000_000), (3, 1, "queue", 0, 500_000), (3, 1, "prefill", 500_000, 500_000),
        (3, 1, "decode", 1_000_000, 2_000_000), (3, 2, "request", 1_000_000, 1_000_000),
        (3, 2, "request", 3_000_001, 999_999),
    }  # fmt: skip
    trained = next(event for event in slices if event["name"] == "actor_train")
    assert trained["args"] == {"round": 1, "busy": 1.4}
    assert trained["cat"] == "trainer"


def test_slices_of_a_thread_are_nested_or_apart():
    # Rounded times overlap by a microsecond, and parts that are too long end with their request.
    spans = [{"lane": "engine/0", "name": "request", "start": 1.0 + 0.001 * n - 1e-6, "end": 1.001 + 0.001 * n,
              "queue": 0.0004, "prefill": 0.0003, "decode": 0.0009} for n in range(50)]  # fmt: skip
    threads = defaultdict(list)
    for event in trace_events(spans, "a"):
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert len(threads) == 1
    for slices in threads.values():
        for one in slices:
            for other in slices:
                apart = one[1] <= other[0] or other[1] <= one[0]
                assert apart or one[0] <= other[0] <= other[1] <= one[1] or other[0] <= one[0] <= one[1] <= other[1]


def test_a_trace_is_refused_where_there_is_no_timeline(run: Path, tmp_path: Path):
    (run / "timeline.jsonl").write_text("")
    with pytest.raises(SettingsError, match=r"has no timeline\.jsonl with spans"):
        write_trace(run, tmp_path / "trace.json")
    with pytest.raises(SettingsError, match="--perfetto needs the folder of one run"):
        write_trace(run / "metrics.jsonl", tmp_path / "trace.json")


def test_the_command_says_where_to_open_the_trace_and_keeps_an_existing_file(run: Path):
    def inspect(*options: str) -> str:
        command = ["inspect", str(run), "--perfetto", "trace.json", *options]
        pipe, place = subprocess.PIPE, run.parent
        process = forkserver.start(command, cwd=place, env=dict(os.environ), stdout=pipe, stderr=pipe)
        return process.communicate(timeout=300)[1].decode()

    assert inspect() == "trace.json: 5 spans. Open it at https://ui.perfetto.dev\n"
    assert inspect() == "slimectl: trace.json: already exists. Add --force to replace it\n"
    assert inspect("--force") == "trace.json: 5 spans. Open it at https://ui.perfetto.dev\n"
