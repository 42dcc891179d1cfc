"""The same run wherever it runs: local or Ray, one engine or several, embedded or SGLang, however weights get there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from serving import python_of
from workshop import Workshop, alike, set_up


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def greedy(workshop: Workshop, run: str) -> list[list[int]]:
    """What the trained weights answer when a fresh embedded engine loads them."""
    data = ["--data", "small=prompts.jsonl@[0:3]", "--model", f"runs/{run}/latest", "--out", "afresh.jsonl"]
    workshop.slimectl("eval", "-c", "slimectl.toml", *data, "--temperature", "0")
    return [sample["tokens"] for sample in lines(workshop.folder / "afresh.jsonl")]


def last_evaluation(workshop: Workshop, run: str, rounds: int) -> list[list[int]]:
    """What the run's own engines answered after the last push."""
    return [sample["tokens"] for sample in lines(workshop.folder / "runs" / run / "eval" / f"small-{rounds:06d}.jsonl")]


def nothing_is_left(workshop: Workshop) -> bool:
    commands = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    return not [command for command in commands if str(workshop.folder) in command]


def test_local_equals_ray_to_the_last_digit(workshop: Workshop):
    workshop.slimectl("run", "--name", "local")
    workshop.slimectl("run", "--name", "ray", "--executor", "ray", timeout_s=240)
    metrics = [(workshop.folder / "runs" / name / "metrics.jsonl").read_bytes() for name in ("local", "ray")]
    assert metrics[0] == metrics[1]
    assert metrics[0].count(b"\n") > 6
    weights = [
        next((workshop.folder / "runs" / n / "step_000006/policy").glob("*.safetensors")) for n in ("local", "ray")
    ]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    logs = {path.name for path in (workshop.folder / "runs/ray/logs").iterdir()}
    assert logs == {"rank-0.log", "sampler.log"}


THREE = ["-s", "run.num_rollout=3", "-s", "eval.temperature=0"]


@pytest.fixture(scope="module")
def beside_the_trainer(tmp_path_factory: pytest.TempPathFactory, model_dir: Callable[[str], Path]) -> list[dict]:
    """Metrics of the run whose engine is embedded."""
    workshop = set_up(tmp_path_factory.mktemp("one"), model_dir("llama"))
    workshop.slimectl("run", *THREE)
    return workshop.metrics("a")


@pytest.mark.parametrize("transport", ["tensor", "disk", "distributed", "delta"])
def test_two_servers_answer_as_the_engine_beside_the_trainer(
    workshop: Workshop, beside_the_trainer: list[dict], transport: str
):
    checked = ["-s", f"sync.transport={transport}", "-s", "sync.check_weight_update_equal=true"]
    workshop.slimectl("run", "--name", "two", *THREE, "--engines", "2", *checked, timeout_s=300)
    alike(beside_the_trainer, workshop.metrics("two"))
    assert last_evaluation(workshop, "two", 3) == greedy(workshop, "two")
    assert nothing_is_left(workshop)


def assert_engine_follows_three_rounds(workshop: Workshop) -> None:
    """Every round was sampled with the weights of the one before, and the last weights have arrived."""
    steps = [line for line in workshop.metrics("a") if "train/loss" in line["metrics"]]
    assert [line["weight_version"] for line in steps] == ["1", "2", "3"]
    for line in steps:
        assert line["metrics"]["rollout/staleness/max"] == 0
        assert line["metrics"]["train/train_rollout_logprob_abs_diff"] < 1e-4
    assert last_evaluation(workshop, "a", 3) == greedy(workshop, "a")
    assert nothing_is_left(workshop)


def test_three_rounds_on_ray_with_the_real_sglang(workshop: Workshop):
    """Over the transport that needs most of a place: the process group of a Ray actor and a server."""
    python_of("sglang")
    transport = ["-s", "sync.transport=distributed"]
    workshop.slimectl("run", *THREE, *transport, "--executor", "ray", "--engine", "sglang", timeout_s=600)
    assert_engine_follows_three_rounds(workshop)


def test_three_rounds_with_the_real_vllm(tmp_path: Path, model_dir: Callable[[str], Path]):
    python_of("vllm")
    workshop = set_up(tmp_path, model_dir("llama_wide"))
    workshop.slimectl("run", *THREE, "--engine", "vllm", timeout_s=300)
    assert_engine_follows_three_rounds(workshop)


def test_rollout_and_eval_through_sglang(workshop: Workshop):
    python_of("sglang")
    given = ["--model", str(workshop.model), "--engine", "sglang"]
    shape = ["-n", "2", "--max-response-len", "8"]
    workshop.slimectl("rollout", "--data", "prompts.jsonl", *given, *shape, "--out", "s.jsonl", timeout_s=240)
    samples = lines(workshop.folder / "s.jsonl")
    assert [sample["index"] for sample in samples] == list(range(16))
    assert all(len(sample["rollout_log_probs"]) == sample["response_length"] for sample in samples)
    data = ["--data", "small=prompts.jsonl", "--temperature", "0"]
    both = []
    for engine in (given, given[:2]):
        workshop.slimectl("eval", "-c", "slimectl.toml", *data, *engine, "--out", "e.jsonl", timeout_s=240)
        both.append([sample["tokens"] for sample in lines(workshop.folder / "e.jsonl")])
    assert both[0] == both[1]
    assert nothing_is_left(workshop)
