"""The same run wherever it runs: local or Ray, one engine or several, embedded or SGLang, however weights get there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pytest
import serving
from machines import is_gone
from workshop import Workshop, alike, set_up

from slimectl.engines.supervisor.server_pool import ServerPool, WatchOptions

pytestmark = pytest.mark.slow


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


THREE = ["-s", "run.num_rollout=3", "-s", "eval.temperature=0"]


@pytest.fixture(scope="module")
def beside_the_trainer(tmp_path_factory: pytest.TempPathFactory, model_dir: Callable[[str], Path]) -> Workshop:
    """The workshop of the run `a`, local and with an embedded engine."""
    workshop = set_up(tmp_path_factory.mktemp("one"), model_dir("llama"))
    workshop.slimectl("run", *THREE)
    return workshop


@pytest.mark.ray
def test_local_equals_ray_to_the_last_digit(
    workshop: Workshop, beside_the_trainer: Workshop, monkeypatch: pytest.MonkeyPatch
):
    with TemporaryDirectory() as sessions:  # sockets are below it, and a long path is refused for them
        monkeypatch.setenv("RAY_TMPDIR", sessions)
        workshop.slimectl("run", *THREE, "--executor", "ray", timeout_s=240)
        assert [path.name for path in Path(sessions).iterdir()] == ["ray"]
        assert not list(Path(sessions).glob("ray/session_*/*"))
        assert is_gone(sessions)
    runs = [made.folder / "runs/a" for made in (beside_the_trainer, workshop)]
    metrics = [(run / "metrics.jsonl").read_bytes() for run in runs]
    assert metrics[0] == metrics[1]
    assert metrics[0].count(b"\n") > 3
    weights = [next((run / "step_000003/policy").glob("*.safetensors")) for run in runs]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    logs = {path.name for path in (runs[1] / "logs").iterdir()}
    assert logs == {"rank-0.log", "sampler.log"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, model_dir: Callable[[str], Path]) -> Iterator[list[str]]:
    """Two running servers, which take the weights of one run after the other."""
    logs = tmp_path_factory.mktemp("pair")
    servers = [serving.serve(model_dir("llama"), logs / str(i)) for i in range(2)]
    fleet = ServerPool(servers.__getitem__, 2, watch=WatchOptions(watches=False))
    fleet.start()
    yield fleet.urls
    fleet.close()


@pytest.mark.parametrize("transport", ["tensor", "disk", "distributed", "delta"])
def test_two_servers_answer_as_the_engine_beside_the_trainer(
    workshop: Workshop,
    beside_the_trainer: Workshop,
    pair: list[str],
    transport: str,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("SLIMECTL_ENGINE_ADMIN_API_KEY", serving.KEYS.admin_api_key)
    urls = [word for url in pair for word in ("--engine-url", url)]
    checked = ["-s", f"sync.transport={transport}", "-s", "sync.check_weight_update_equal=true"]
    workshop.slimectl("run", "--name", "two", *THREE, *urls, *checked, timeout_s=300)
    alike(beside_the_trainer.metrics("a"), workshop.metrics("two"))
    monkeypatch.delenv("SLIMECTL_ENGINE_ADMIN_API_KEY")
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


@pytest.mark.sglang
@pytest.mark.ray
def test_three_rounds_on_ray_with_the_real_sglang(workshop: Workshop, shared_cluster: Any):
    """Over the transport that needs most of a place: the process group of a Ray actor and a server."""
    serving.python_of("sglang")
    transport = ["-s", "sync.transport=distributed"]
    there = ["--executor", "ray", "--ray-address", shared_cluster.address]
    workshop.slimectl("run", *THREE, *transport, *there, "--engine", "sglang", timeout_s=600)
    assert_engine_follows_three_rounds(workshop)


@pytest.mark.ray
def test_a_rollout_with_one_engine_on_ray_has_the_samples_of_a_local_one(workshop: Workshop, shared_cluster: Any):
    options = ["--data", "prompts.jsonl", "--model", str(workshop.model), "-n", "2"]
    local = workshop.slimectl("rollout", *options)
    there = workshop.slimectl("rollout", *options, "--ray-address", shared_cluster.address)
    assert "1 engine ready" in workshop.stderr  # on the cluster, not in the command's own process
    for one, other in zip(map(json.loads, local.splitlines()), map(json.loads, there.splitlines()), strict=True):
        one.pop("prefix_cache_info"), other.pop("prefix_cache_info")  # depends on which request came first
        assert one.pop("rollout_log_probs") == pytest.approx(other.pop("rollout_log_probs"), abs=1e-5)
        assert one == other
    assert nothing_is_left(workshop)


@pytest.mark.vllm
def test_three_rounds_with_the_real_vllm(tmp_path: Path, model_dir: Callable[[str], Path]):
    serving.python_of("vllm")
    workshop = set_up(tmp_path, model_dir("llama_wide"))
    workshop.slimectl("run", "--name", "start", "-s", "run.num_rollout=1")
    workshop.slimectl("run", *THREE, "--engine", "vllm", "--model", "runs/start", timeout_s=300)  # loads its checkpoint
    assert_engine_follows_three_rounds(workshop)
