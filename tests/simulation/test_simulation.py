"""A training step's program on fake tensors: what it reports of a rank, and the faults that it must find.

Every simulation is a process of its own, as it patches torch: forked for FSDP. Megatron-core must not be imported
before, so that its simulations start as for users.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import forkserver
import pytest
from typer.testing import CliRunner

from slimectl.architectures import cards
from slimectl.architectures.config import with_defaults
from slimectl.architectures.parallel import ParallelLayout
from slimectl.cli.app import app
from slimectl.planner.simulation import report
from slimectl.planner.simulation.collectives import Collective, mismatches
from slimectl.planner.simulation.report import representatives, tasks, wrong_devices
from slimectl.planner.workload import Run

PLAIN = "from slimectl.planner.simulation import rank; rank.main()"
FAULTS = """
import torch.distributed as dist

from slimectl.algorithms.losses import PolicyLoss
from slimectl.planner.simulation import rank

plain = PolicyLoss.__call__

def faulty(loss, pack):
    value, metrics = plain(loss, pack)
    dist.all_reduce(value.detach().clone())
    metrics["on_host"] = (pack.advantages_T.cpu() * 2).sum().to(pack.advantages_T.device)
    return value, metrics

PolicyLoss.__call__ = faulty
rank.main()
"""


def run_of(**fields: Any) -> Run:
    return Run(**{"policy": "fsdp", "seq_len": 256, "max_tokens_per_gpu": 256, **fields})


def tasks_of(run: Run) -> dict[int, dict[str, Any]]:
    """The task of each rank of the card `tiny`."""
    return {task["rank"]: task for task in tasks(with_defaults(cards.load("tiny")["config"]), run)}


def forked(task: dict[str, Any], program: str = PLAIN) -> dict[str, Any]:
    """The result of a rank in a forked process."""
    done = forkserver.run_python(program, cwd=Path.cwd(), stdin=json.dumps(task))
    assert done.returncode == 0, done.stderr[-2000:]
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def calls(results: list[dict[str, Any]]) -> dict[int, list[Collective]]:
    return {result["rank"]: [Collective.of_json(call) for call in result["collectives"]] for result in results}


def test_representatives_have_a_neighbour_of_the_first_rank_in_every_kind_of_group():
    layout = ParallelLayout(tensor=2, pipeline=4, context=2)
    assert representatives(Run(64, layout)) == [0, 1, 2, 4, 16, 63]
    assert [representatives(Run(1, policy=policy)) for policy in ("fsdp", "megatron")] == [[0], [0]]


@pytest.mark.slow
def test_a_rank_alone_is_simulated_too():
    run = run_of(world=1, seq_len=64, max_tokens_per_gpu=64)
    adapted = tasks(with_defaults(cards.load("tiny")["config"]), run, lora=(2, ["q_proj"]))
    whole, adapter = map(forked, [*tasks_of(run).values(), *adapted])
    assert whole["resident"] > adapter["resident"] > 0  # frozen weights have no masters and moments
    for result in (whole, adapter):
        assert (result["rank"], result["collectives"]) == (0, [])
        assert result["peak"] > result["resident"]
        assert list(wrong_devices(result, run)) == []


@pytest.mark.slow
def test_a_plan_of_fsdp_is_confirmed_by_its_program_and_faults_of_one_rank_are_found(monkeypatch: pytest.MonkeyPatch):
    clean: list[dict[str, Any]] = []
    monkeypatch.setattr(report, "_simulated", lambda task: clean.append(forked(task)) or clean[-1])
    words = ["--card", "tiny", "--gpus", "2", "--backend", "fsdp", "--seq-len", "256", "--max-tokens-per-gpu", "256"]
    result = CliRunner().invoke(app, ["plan", *words, "--simulate", "--json"])
    sections = json.loads(result.stdout)["sections"]
    planned = next(f["value"] for f in sections["training memory"] if f["name"] == "peak per rank")
    assert [figure["name"] for figure in sections["simulation"]] == ["simulated rank 0", "simulated rank 1"]
    # A model of 0.9 M parameters is all rounding; the figures of real ones are in benchmarks/RESULTS.md.
    assert all(figure["value"] == pytest.approx(planned, rel=0.5) for figure in sections["simulation"])
    assert list(mismatches(calls(clean))) == []
    run = run_of(world=2)
    assert [line for rank in clean for line in wrong_devices(rank, run)] == []

    faulty = forked(tasks_of(run)[1], FAULTS)
    (line,) = mismatches(calls([clean[0], faulty]))
    assert "ranks 0 and 1, group 0-1" in line
    assert "allreduce_(float32 []) on rank 1" in line
    lines = list(wrong_devices(faulty, run))
    assert any("computed on the host, forward_backward: mul" in line for line in lines)
    assert any("moved, forward_backward: cuda to cpu" in line for line in lines)


@pytest.mark.slow
def test_a_step_waits_for_the_gpu_as_often_however_many_rows_and_tokens_it_has():
    one_short, four_long = (
        forked(tasks_of(run_of(world=2, seq_len=seq_len, max_tokens_per_gpu=pack))[0])["reads"]
        for seq_len, pack in ((64, 64), (256, 1024))
    )
    assert one_short == four_long
    assert 0 < sum(one_short.values()) < 10  # of two packs, and of their log-probabilities before the step


@pytest.mark.slow
def test_megatrons_ranks_agree_and_leave_nothing_on_the_host():
    pytest.importorskip("megatron.core")
    run = run_of(world=8, policy="megatron", layout=ParallelLayout(tensor=2, pipeline=2))
    first, next_stage = (report._simulated(tasks_of(run)[rank]) for rank in (0, 4))
    assert list(mismatches(calls([first, next_stage]))) == []
    assert {call.name for call in calls([first])[0]} >= {"send", "recv_", "allreduce_"}
    assert [*wrong_devices(first, run), *wrong_devices(next_stage, run)] == []
