"""The timeline of a run: spans by hand, and of a run with two ranks that samples while it trains."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from workshop import Workshop, set_up

from slimectl.data.metrics_catalogue import known
from slimectl.stages.request_times import EngineRequest, kept_requests, request_metrics, request_spans, take_requests
from slimectl.stages.round_timer import RoundTimer
from slimectl.system.timeline import TO_WALL_CLOCK, Span, timeline
from slimectl.types import EngineTimes


@pytest.fixture
def recording() -> Iterator[None]:
    timeline.start()
    yield
    timeline.start(enabled=False)


def request(start: float, admitted: float, first: float, end: float, **changes: Any) -> EngineRequest:
    """Return a request of 3 prompt tokens and 10 response tokens of sample 5."""
    made = EngineRequest(1, 2, 5, 3, 10, start, end, EngineTimes(admitted, first, changes.pop("engine", 0)))
    return made._replace(**changes)


def test_spans_have_the_times_of_the_innermost_block_and_add_up_to_the_metrics(recording: None):
    moments = iter([10.0, 12.0, 12.5, 14.0, 20.0, 21.0])
    timer = RoundTimer(lambda: next(moments))
    with timer.time("perf/data_preprocess_time"), timer.time("perf/log_probs_time"):  # 10, 12 to 12.5, 14
        pass
    with timer.time("perf/actor_train_time"):
        pass
    metrics = timer.take(7)
    spans = [(s["name"], s["start"] - TO_WALL_CLOCK, s["end"] - TO_WALL_CLOCK, s["round"]) for s in timeline.take()]
    assert [(name, round(start, 3), round(end, 3), number) for name, start, end, number in spans] == [
        ("data_preprocess", 10.0, 12.0, 7), ("log_probs", 12.0, 12.5, 7), ("data_preprocess", 12.5, 14.0, 7),
        ("actor_train", 20.0, 21.0, 7),
    ]  # fmt: skip
    assert metrics == {"perf/data_preprocess_time": 3.5, "perf/log_probs_time": 0.5, "perf/actor_train_time": 1.0}


def test_a_gap_that_is_too_short_to_be_seen_joins_two_spans_and_their_seconds_stay(recording: None):
    # The round lasts 4 s, so gaps below 4 / 200 = 0.02 s are joined. The gap of 0.5 s is not.
    moments = iter([0.0, 1.0, 1.0004, 1.5, 1.51, 2.0, 2.5, 4.0])
    timer = RoundTimer(lambda: next(moments))
    with timer.time("perf/generate_time"), timer.time("perf/reward_time"):  # 0 to 1, 1.0004 to 1.5
        pass
    for _ in range(2):
        with timer.time("perf/generate_time"):  # 1.51 to 2, 2.5 to 4
            pass
    metrics = timer.take(1)
    spans = timeline.take()
    assert [(s["lane"], round(s["start"] - TO_WALL_CLOCK, 3), round(s["end"] - TO_WALL_CLOCK, 3)) for s in spans] == [
        ("generation", 0.0, 2.0), ("generation", 2.5, 4.0), ("grading", 1.0, 1.0),
    ]  # fmt: skip
    assert spans[0]["busy"] == pytest.approx(1.9896)  # 1 + 0.4996 + 0.49
    assert "busy" not in spans[1]
    assert metrics["perf/generate_time"] == pytest.approx(3.4896)


def test_the_parts_of_a_request_add_up_to_its_time_and_a_tool_fills_the_time_between_turns():
    first, second = request(0.0, 1.0, 3.0, 7.0), request(9.0, 9.0, 9.5, 10.0, tokens=4)
    tool, turn, later = request_spans([[first, second]])
    assert (turn["queue"], turn["prefill"], turn["decode"], turn["turn"]) == (1.0, 2.0, 4.0, 0)
    assert turn["end"] - turn["start"] == pytest.approx(7.0)
    assert (turn["lane"], turn["round"], turn["group"], turn["index"]) == ("engine/0", 1, 2, 5)
    assert (turn["prompt_tokens"], turn["tokens"], later["turn"]) == (3, 10, 1)
    assert (tool["lane"], tool["end"] - tool["start"], tool["index"]) == ("tools", pytest.approx(2.0), 5)


def test_metrics_of_requests_by_hand():
    # Twenty requests with queue times 1 … 20 s: ten are at most 10 s, and nineteen, 95 %, at most 19 s.
    requests = [request(0.0, queue, queue + 1.0, queue + 5.0) for queue in range(20, 0, -1)]
    metrics = request_metrics(requests)
    assert all(map(known, metrics))
    queue = {key: metrics[f"perf/request/queue_time/{key}"] for key in ("mean", "p50", "p95", "max")}
    assert queue == {"mean": 10.5, "p50": 10.0, "p95": 19.0, "max": 20.0}
    assert metrics["perf/request/e2e_time/mean"] == 15.5
    assert metrics["perf/request/prefill_time/max"] == 1.0
    assert metrics["perf/request/decode_time/mean"] == 4.0
    assert metrics["perf/request/tokens_per_sec/max"] == 10 / 6
    assert metrics["perf/request/count"] == 20
    assert "perf/slowest_engine" not in metrics
    assert request_metrics([]) == {}


def test_the_slowest_engine_is_that_with_the_longest_decode_time_per_token():
    # Engine 0: 2 s for 10 tokens, engine 1: 6 s for 20, engine 2: 4 s for 10. 0.4 / 0.3 of the median.
    parts = ((0, 2.0, 10), (1, 6.0, 20), (2, 4.0, 10))
    metrics = request_metrics([request(0.0, 0.0, 0.0, end, tokens=tokens, engine=n) for n, end, tokens in parts])
    assert metrics["perf/slowest_engine"] == 2.0
    assert metrics["perf/slowest_engine_ratio"] == pytest.approx(0.4 / 0.3)
    # Of two, the median is the faster one.
    metrics = request_metrics([request(0.0, 0.0, 0.0, float(n + 1), engine=n) for n in range(2)])
    assert metrics["perf/slowest_engine_ratio"] == 2.0


def test_an_engine_without_times_has_only_the_whole_time():
    bare = request(1.0, 0.0, 0.0, 3.0, times=None)
    metrics = request_metrics([bare])
    assert metrics["perf/request/e2e_time/max"] == 2.0
    assert not any("queue" in name or "slowest" in name for name in metrics)
    (span,) = request_spans([[bare]])
    assert "queue" not in span


def test_a_round_keeps_so_many_requests_evenly_spaced_with_the_slowest_one(recording: None):
    requests = [request(0.0, 0.0, 0.0, 1.0, sample=number) for number in range(100)]
    requests[57] = requests[57]._replace(end=9.0)
    kept = kept_requests(requests, 10)
    numbers = sorted(one.sample for sample in kept for one in sample)
    assert len(numbers) == 10
    assert set(numbers) - {57} < set(range(0, 100, 10))
    assert 57 in numbers
    assert kept_requests(requests, 0) == [[]]
    # Turns of a sample stay together, also with more turns than a round may keep.
    turns = [request(float(n), float(n), float(n), n + 0.5) for n in range(8)]
    assert [one.start for one in kept_requests(turns, 3)[0]] == [0.0, 1.0, 2.0]
    assert take_requests(requests, 10, dataset="small")["perf/request/count"] == 100
    assert requests == []
    assert {span["dataset"] for span in timeline.take()} == {"small"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, model_dir: Callable[..., Path]) -> Workshop:
    """A run on two ranks that samples a round ahead."""
    workshop = set_up(tmp_path_factory.mktemp("timeline"), model_dir("llama"))
    ahead = ("-s", "cluster.actor_num_gpus_per_node=2", "-s", "run.async_level=1", "-s", "run.num_rollout=3")
    workshop.slimectl("run", *ahead, "-s", "track.timeline_requests=8", "-s", "run.save_interval=2")
    return workshop


def lines(workshop: Workshop, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (workshop.folder / "runs" / "a" / name).read_text().splitlines()]


def by_lane(spans: list[Span]) -> dict[str, list[Span]]:
    lanes = defaultdict(list)
    for span in sorted(spans, key=lambda span: span["start"]):
        assert span["end"] >= span["start"]
        lanes[span["lane"]].append(span)
    return lanes


def test_every_lane_is_there_and_only_requests_overlap(finished: Workshop):
    lanes = by_lane(lines(finished, "timeline.jsonl"))
    assert lanes.keys() == {"trainer", "generation", "grading", "weights", "evaluation", "checkpoints", "engine/0",
                            "rank/0", "rank/1"}  # fmt: skip
    for lane, spans in lanes.items():
        for before, after in pairwise(spans):
            assert lane == "engine/0" or after["start"] >= before["end"] - 2e-6, (before, after)


def test_the_spans_of_a_round_add_up_to_its_metrics(finished: Workshop):
    seconds: defaultdict[tuple[int, str], float] = defaultdict(float)
    for span in lines(finished, "timeline.jsonl"):
        if span["lane"] in ("trainer", "generation", "grading"):
            seconds[span["round"], span["name"]] += span.get("busy", span["end"] - span["start"])
    rounds = [line["metrics"] for line in lines(finished, "perf.jsonl") if "perf/total_time" in line["metrics"]]
    names = ("wait", "generate", "reward", "data_preprocess", "advantages", "actor_train", "update_weights")
    assert len(rounds) == 3
    for number, metrics in enumerate(rounds, 1):
        for name in names:
            assert seconds[number, name] == pytest.approx(metrics[f"perf/{name}_time"], abs=2e-5), (number, name)
    trained = ("wait", "data_preprocess", "advantages", "actor_train", "update_weights")
    for number, metrics in enumerate(rounds, 1):
        assert sum(seconds[number, name] for name in trained) <= metrics["perf/total_time"] + 1e-4


def test_the_requests_of_a_run_are_kept_by_rule_and_measured_as_a_whole(finished: Workshop):
    requests = [span for span in lines(finished, "timeline.jsonl") if span["name"] == "request"]
    rounds = [span for span in requests if "dataset" not in span]
    assert [sum(span["round"] == number for span in rounds) for number in (1, 2, 3)] == [8, 8, 8]
    assert {span["round"] for span in requests if span.get("dataset") == "small"} == {0, 2, 3}
    for span in requests:
        parts = [span["queue"], span["prefill"], span["decode"]]
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(span["end"] - span["start"], abs=3e-6)
    measured = [line["metrics"] for line in lines(finished, "perf.jsonl") if "perf/request/count" in line["metrics"]]
    assert [metrics["perf/request/count"] for metrics in measured] == [16, 16, 16]  # 4 prompts, 4 samples of each


def test_ranks_have_their_own_passes_and_the_slowest_is_named(finished: Workshop):
    lanes = by_lane(lines(finished, "timeline.jsonl"))
    for lane in ("rank/0", "rank/1"):
        passes = [span for span in lanes[lane] if span["name"] == "forward_backward"]
        assert [span["round"] for span in passes] == [1, 2, 3]
        # The clocks of the processes agree: a pass of a rank lies within the trainer's.
        trainer = [span for span in lanes["trainer"] if span["name"] == "actor_train"]
        for span, whole in zip(passes, trainer, strict=True):
            assert whole["start"] <= span["start"] <= span["end"] <= whole["end"]
    slowest = [line["metrics"] for line in lines(finished, "perf.jsonl") if "perf/slowest_rank" in line["metrics"]]
    assert len(slowest) == 3
    assert all(metrics["perf/slowest_rank"] in (0, 1) for metrics in slowest)
    assert all(metrics["perf/slowest_rank_ratio"] >= 1 for metrics in slowest)


def test_a_resume_cuts_the_timeline_back_to_its_checkpoint_and_goes_on(finished: Workshop):
    finished.slimectl("run", "--resume", "runs/a", "-s", "run.num_rollout=4")
    waits = [span["round"] for span in lines(finished, "timeline.jsonl") if span["name"] == "wait"]
    assert waits == [1, 2, 3, 4]


def test_a_run_without_a_timeline_writes_none_and_has_no_times_of_requests(finished: Workshop):
    finished.slimectl("run", "--name", "off", "-s", "run.num_rollout=1", "-s", "track.timeline=false")
    folder = finished.folder / "runs" / "off"
    assert not (folder / "timeline.jsonl").exists()
    assert "perf/request/" not in (folder / "perf.jsonl").read_text()
