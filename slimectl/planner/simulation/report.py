"""Simulates representative ranks of a planned run, one process each, and compares them with each other and the plan."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from slimectl.architectures.config import Config
from slimectl.architectures.parallel import ParallelLayout
from slimectl.errors import BackendError, SettingsError
from slimectl.planner.simulation.collectives import Collective, mismatches
from slimectl.planner.workload import Figure, Run, sized
from slimectl.settings.layers import Layer, nested
from slimectl.settings.loading import resolve

TOLERANCE = 0.15
"""Largest difference of a simulated peak from the planned one, as a share of the planned."""
FEW_BYTES = 2**20
"""Host memory that may be in use between steps without anything being offloaded: step counters."""
INPUT_BYTES = 64
"""Bytes of a token's inputs that a pack may bring to a GPU at each place of the program."""


@dataclass(frozen=True)
class Report:
    """Figures of every simulated rank, and one line for each problem."""

    figures: list[Figure]
    problems: list[str]


def simulation(config: Config, run: Run, planned: float, *, lora: tuple[int, Sequence[str]] | None = None) -> Report:
    """Simulate a step of `run` on its representative ranks. `planned` is the plan's peak in bytes.

    Raises SettingsError for a run that has no such simulation, BackendError with the last line of a rank that failed.
    """
    check(run)
    layout = run.layout if run.policy == "megatron" else ParallelLayout()
    results = [_simulated(task) for task in tasks(config, run, lora=lora)]
    problems = [problem for result in results for problem in wrong_devices(result, run)]
    problems += mismatches({result["rank"]: _collectives(result) for result in results})
    worst = max(result["peak"] for result in results)
    if abs(worst / planned - 1) > TOLERANCE:
        problems.append(f"simulated peak {sized(worst)} is {worst / planned:.2f} of the planned {sized(planned)}")
    return Report([_figure(result, layout, planned) for result in results], problems)


def check(run: Run) -> None:
    """Raise SettingsError for a run that cannot be simulated."""
    if run.device != "cuda":
        raise SettingsError("--simulate: needs ranks on GPUs. Drop --device cpu.")
    if run.offload is not None:
        raise SettingsError("--simulate: does not support pinned host memory. Drop --offload.")
    if run.policy == "megatron" and run.layout.virtual_pipeline:
        raise SettingsError("--simulate: supports only plain pipelines. Drop --vpp.")


def tasks(
    config: Config, run: Run, *, lora: tuple[int, Sequence[str]] | None = None, response: int | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the task of every representative rank."""
    layout = run.layout
    settings = resolve([Layer("simulation", nested(_settings(run, lora)))]).settings.model_dump(mode="json")
    for rank in representatives(run):
        yield {
            "rank": rank, "ranks": run.world, "data": run.data, "config": dict(config), "settings": settings,
            "seq_len": run.seq_len, "response_len": response or run.responses * run.seq_len // run.tokens,
            "pack": run.pack, "packs": max(2, layout.pipeline if run.policy == "megatron" else 1),
            "message": [_stage_rows(run), 1, int(config["hidden_size"])],
        }  # fmt: skip


def _stage_rows(run: Run) -> int:
    """Return the rows of hidden states that a rank sends to the next pipeline stage: its tokens of a padded pack."""
    tensor, context = run.layout.tensor, run.layout.context
    unit = 2 * context if context > 1 else 1
    padded = max(1, run.pack // run.seq_len) * (-(-run.seq_len // unit) * unit)
    padded += -padded % (unit * tensor)
    return padded // context // tensor


def representatives(run: Run) -> list[int]:
    """First and last rank, and the neighbours of the first in every kind of group.

    >>> representatives(Run(64, policy="fsdp")), representatives(Run(64, ParallelLayout(tensor=2, pipeline=4)))
    ([0, 1, 63], [0, 1, 2, 16, 63])
    """
    last = run.world - 1
    if run.policy == "fsdp":
        return sorted({0, min(1, last), last})
    tensor, context, pipeline = run.layout.tensor, run.layout.context, run.layout.pipeline
    steps = {0, last, run.world // pipeline if pipeline > 1 else 0, tensor * context % run.world}
    steps |= {1} if tensor > 1 else set()
    steps |= {tensor} if context > 1 else set()
    steps |= {run.layout.expert_tensor % run.world} if run.layout.expert > 1 else set()
    return sorted(steps)


def _settings(run: Run, lora: tuple[int, Sequence[str]] | None) -> dict[str, Any]:
    """Return the settings of the planned run by key. The task determines the ranks."""
    values: dict[str, Any] = {
        "train.backend": run.policy, "train.device": "auto", "train.dtype": run.dtype,
        "train.max_tokens_per_gpu": run.max_tokens_per_gpu, "train.optimizer_state_dtype": run.state_dtype,
        "train.optimizer": run.optimizer,
        "cluster.actor_num_gpus_per_node": run.world, "cluster.num_gpus_per_node": run.world,
    }  # fmt: skip
    if run.recompute != "none":
        values["train.recompute_granularity"] = run.recompute
    if run.recompute == "selective":
        values["train.recompute_modules"] = list(run.recompute_modules)
    if lora is not None:
        values |= {"train.lora_rank": lora[0], "train.lora_targets": list(lora[1])}
    if run.policy == "megatron":
        layout = run.layout
        values |= {
            "megatron.tensor_model_parallel_size": layout.tensor,
            "megatron.pipeline_model_parallel_size": layout.pipeline,
            "megatron.context_parallel_size": layout.context,
            "megatron.expert_model_parallel_size": layout.expert,
            "megatron.expert_tensor_parallel_size": layout.expert_tensor,
        }
    return values


def _simulated(task: dict[str, Any]) -> dict[str, Any]:
    """Run one rank in a process of its own, which it patches."""
    command = [sys.executable, "-m", "slimectl.planner.simulation.rank"]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    done = subprocess.run(command, input=json.dumps(task), capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        line = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise BackendError(f"simulation of rank {task['rank']}: {line:.400}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _collectives(result: dict[str, Any]) -> list[Collective]:
    return [Collective.of_json(fields) for fields in result["collectives"]]


def wrong_devices(result: dict[str, Any], run: Run) -> Iterator[str]:
    """Yield a line for all data that a rank keeps on the host, computes there, or moves unnecessarily."""
    rank = result["rank"]
    if result["host_resident"] > FEW_BYTES:
        yield f"rank {rank}: {sized(result['host_resident'])} stay in host memory between steps"
    for where, size in result["host_work"].items():
        yield f"rank {rank}: {sized(size)} computed on the host, {where}"
    for where, size in result["moved"].items():
        if size > INPUT_BYTES * run.pack * result["packs"] or "cuda to cpu" in where:
            yield f"rank {rank}: {sized(size)} moved, {where}"


def _figure(result: dict[str, Any], layout: ParallelLayout, planned: float) -> Figure:
    calls, waits = len(result["collectives"]), sum(result["reads"].values())
    formula = (
        f"{result['peak'] / planned:.2f} of the plan, {sized(result['resident'])} between steps, {calls:,} collectives,"
        f" {waits} waits for the GPU"
    )
    return Figure(f"simulated rank {result['rank']}", result["peak"], "bytes", formula)
