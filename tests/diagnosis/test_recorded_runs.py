"""Findings in recorded runs, with their noise. `python benchmarks/diagnosis.py --records` writes recorded.json."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slimectl.diagnosis import Diagnosis

RUNS = json.loads((Path(__file__).parent / "recorded.json").read_text(encoding="utf-8"))
SETTINGS = {
    "run.rollout_batch_size": 32, "run.num_rollout": 45, "rollout.n_samples_per_prompt": 8, "train.lr": 5e-4,
    "rollout.max_response_len": 16, "eval.success_threshold": 1.0, "engine.backend": "embedded",
    "algorithm.grpo_std_normalization": True, "engine.dtype": "float32", "train.dtype": "float32",
}  # fmt: skip


def lines_of(run: Mapping[str, Mapping[str, list[float | None]]]) -> Iterator[dict[str, Any]]:
    """The lines of a run's records. An evaluation follows the round of its number."""
    ordered = sorted((row.pop("number"), part, row) for part in ("evaluations", "rounds") for row in rows(run[part]))
    for number, part, metrics in sorted(ordered, key=lambda entry: (entry[0], entry[1] == "evaluations")):
        yield {"step": number, "rollout_id": number, "metrics": metrics}
        if part == "rounds":
            yield {"step": number, "metrics": {"perf/total_time": 1.0}}


def rows(columns: Mapping[str, list[float | None]]) -> Iterator[dict[str, float]]:
    for values in zip(*columns.values(), strict=True):
        yield {name: value for name, value in zip(columns, values, strict=True) if value is not None}


def reported(name: str, **settings: Any) -> dict[str, int]:
    """The round after which each kind of finding is first reported."""
    diagnosis = Diagnosis(SETTINGS | {key.replace("__", "."): value for key, value in settings.items()}, Path("runs/a"))
    rounds: dict[str, int] = {}
    for line in lines_of(RUNS[name]):
        for finding in diagnosis.observe(line):
            rounds.setdefault(finding.kind, line.get("rollout_id", line["step"]))
    return rounds


def test_a_healthy_run_has_no_findings():
    assert reported("healthy/055_evaluation_every_5_rounds") == {}


def test_gaming_is_found_when_the_evaluation_falls_and_responses_grow():
    assert reported("faults/reward_is_gamed") == {
        "evaluation-collapse": 5,
        "truncation": 9,
        "length-growth": 10,
        "gaming": 10,
    }


def test_weights_that_never_reach_the_engine_make_samples_stale():
    # They are not pushed after round 20, and the evaluation of round 20 was the last one that pushed them.
    assert reported("faults/weights_never_pushed", sync__update_weights_interval=1000)["staleness"] == 28
