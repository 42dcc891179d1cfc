"""Runs under a limit of memory end like runs without one, and the largest pack is found before the first round."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forkserver
import pytest
import torch
from memory_limit import MemoryLimit
from policies.policy_cases import new_policy
from workshop import Workshop, alike

from slimectl.checkpoints.hf import HFCheckpoint
from slimectl.policies.fsdp.policy import FsdpCritic
from slimectl.policies.options import TrainerOptions
from slimectl.runtime.capacity import estimated_pack
from slimectl.runtime.memory_fit import TARGET, MemoryFit, _losses, largest_fitting, probe_rows
from slimectl.settings import Settings
from slimectl.settings.layers import from_assignments
from slimectl.settings.loading import resolve

BACKEND = '''
"""FSDP's trainer under the limit of memory in limit.json, on its last rank. It writes what it needed."""

import json
from pathlib import Path

import torch.distributed as dist
from memory_limit import MemoryLimit

from slimectl.runtime.builders.trainers import FsdpBackend


class Limited(FsdpBackend):
    def build(self, settings, folder, role, options, checkpoint):
        trainer = super().build(settings, folder, role, options, checkpoint)
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        file = Path(__file__).with_name("limit.json")
        if role == "policy" and trainer.rank == trainer.ranks - 1:
            memory = MemoryLimit(json.loads(file.read_text()))
            forward_backward = trainer.forward_backward

            def limited(rows, loss):
                with memory:
                    metrics = forward_backward(rows, loss)
                file.with_name("needed.json").write_text(json.dumps([memory.live, memory.peak]))
                return metrics

            trainer.forward_backward = limited
        return trainer
'''


def run_limited(workshop: Workshop, name: str, limit: float, *options: str) -> list[int]:
    """Run with the trainer above, and return the bytes that it left and needed at most."""
    package = workshop.folder / "package"
    metadata = package / "limited-0.1.dist-info"
    if not package.exists():
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: limited\nVersion: 0.1\n")
        (metadata / "entry_points.txt").write_text("[slimectl.policies]\nlimited = limited:Limited\n")
        (package / "limited.py").write_text(BACKEND)
    (package / "limit.json").write_text(json.dumps(limit))
    paths = [str(package), str(Path(__file__).parents[1])]
    environment = workshop.environment | {"PYTHONPATH": ":".join(paths)}
    flags = ["--name", name, "-s", "train.backend=limited", *options]
    log = workshop.folder / f"{name}.txt"
    with log.open("wb") as stream:
        process = forkserver.start(
            ["run", "slimectl.toml", *flags], cwd=workshop.folder, env=environment, stdout=stream, stderr=stream
        )
    assert process.wait(timeout=300) == 0, log.read_text()
    workshop.stderr = log.read_text()
    return json.loads((package / "needed.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_runs_out_of_memory_ends_like_one_that_does_not(ranks: int, workshop: Workshop):
    options = ["-s", "run.num_rollout=3", "-s", f"cluster.actor_num_gpus_per_node={ranks}", "-s", "run.save_interval=1"]
    kept, peak = run_limited(workshop, "plain", 1e12, *options)
    run_limited(workshop, "limited", kept + 0.7 * (peak - kept), *options)
    message = "out of memory in a training pack of "
    assert message in workshop.stderr
    alike(workshop.metrics("limited"), workshop.metrics("plain"))
    fit = workshop.folder / "runs" / "limited" / "memory.json"
    perf = (workshop.folder / "runs" / "limited" / "perf.jsonl").read_text()
    if ranks == 1:
        assert perf.count("perf/pack_splits") == 1
    else:
        assert "The run does so, and continues from the last checkpoint" in workshop.stderr
        assert json.loads(fit.read_text())["set"] == {"train.max_tokens_per_gpu": 8192}


def settings(*assignments: str) -> Settings:
    return resolve([from_assignments(assignments)]).settings


def test_what_a_run_found_is_read_again_unless_the_setting_changes(tmp_path: Path):
    given = settings("train.max_tokens_per_gpu=4096")
    fit = MemoryFit(given, tmp_path)
    fit.read()
    assert fit.settings == given
    fit.adopt({"train.max_tokens_per_gpu": 2048})
    fit.adopt({"train.gradient_checkpointing": True})
    assert fit.settings.train.max_tokens_per_gpu == 2048
    assert fit.settings.recompute_granularity == "full"
    resumed, changed = MemoryFit(given, tmp_path), MemoryFit(settings("train.max_tokens_per_gpu=8000"), tmp_path)
    resumed.read()
    changed.read()
    assert resumed.settings == fit.settings
    assert changed.settings.train.max_tokens_per_gpu == 8000
    assert changed.settings.train.gradient_checkpointing
    (tmp_path / "memory.json").write_text("{")
    damaged = MemoryFit(given, tmp_path)
    damaged.read()
    assert damaged.settings == given


def test_an_open_size_of_packs_is_the_estimate_until_it_is_found(tmp_path: Path):
    given = settings("train.max_tokens_per_gpu=auto", "model.card=tiny", "train.device=cpu")
    fit = MemoryFit(given, tmp_path)
    assert fit.is_open
    assert fit.settings.train.max_tokens_per_gpu == estimated_pack(given) == 8192
    fit.adopt({"train.max_tokens_per_gpu": 512})
    assert not fit.is_open
    assert fit.settings.train.pack_tokens == 512
    enormous = settings("train.max_tokens_per_gpu=auto", "model.card=qwen3-32B", "train.device=cpu")
    assert estimated_pack(enormous) == 256


@pytest.mark.parametrize(("base", "slope"), [(0.3, 0.01), (0.1, 1e-5), (0.9, 0.001), (0.5, 0.6), (0.95, 0.1)])
@pytest.mark.parametrize("start", [1, 40, 3000])
def test_the_search_ends_near_the_largest_number_that_fits(base: float, slope: float, start: int):
    tried = list[float]()

    def measure(number: int) -> float | None:
        share = base + slope * number
        tried.append(share)
        return None if share > 1 else share

    found = largest_fitting(measure, start=start, most=3000)
    largest = max([number for number in range(1, 3001) if base + slope * number <= TARGET], default=1)
    assert largest - max(1, largest // 8) <= found <= largest
    if start > 1 and base + slope * start <= 1:  # memory never runs out after an estimate that fits
        assert max(tried) <= 1


@pytest.fixture(scope="module")
def trainers(model_dir: Callable[..., Path]) -> tuple[Any, Any]:
    folder = model_dir("llama")
    return new_policy(folder), FsdpCritic(folder, HFCheckpoint(), TrainerOptions())


@pytest.mark.parametrize("name", ["grpo", "ppo", "dpo", "sft", "gspo", "opd"])
def test_the_loss_of_an_algorithm_reads_the_rows_of_a_measurement(name: str, trainers: tuple[Any, Any]):
    given = settings(f"algorithm.name={name}", "rollout.max_prompt_len=8", "rollout.max_response_len=8")
    rows = probe_rows(2, given, 256)
    assert [row.input_length for row in rows] == [16, 16]
    for model, loss in zip(trainers, _losses(given, rows), strict=False):
        assert model.measure_pack(rows, loss, 32) == 0.0
        model.limit_packs(8192)


def test_a_measurement_leaves_no_trace(trainers: tuple[Any, Any], caplog: pytest.LogCaptureFixture):
    """Measured by failures only, because a CPU tells nothing about its memory."""
    given, policy = settings("rollout.max_prompt_len=8", "rollout.max_response_len=8"), trainers[0]
    before = [(part, tensor.clone()) for part, tensor in policy.weights()]
    noise = torch.get_rng_state()

    def measure(sequences: int) -> float | None:
        rows = probe_rows(sequences, given, 256)
        share: float | None = policy.measure_pack(rows, *_losses(given, rows), 16 * sequences)
        return share

    with MemoryLimit(4e6) as memory:
        found = largest_fitting(measure, start=4, most=64)
    assert memory.faults
    assert 1 < found < 64
    assert caplog.messages == []
    policy.limit_packs(found * 16)
    assert policy.fitter.planning.max_tokens_per_pack == found * 16
    assert policy.fitter.saved() == {}
    assert torch.equal(torch.get_rng_state(), noise)
    assert all(parameter.grad is None for parameter in policy.model.hf.parameters())
    assert policy.weight_version == "0"
    assert not policy.optimizer.state
    for (part, tensor), (_, after) in zip(before, policy.weights(), strict=True):
        assert torch.equal(tensor, after), part
