"""Searches parallel layouts that are valid and fit in memory, and ranks them by estimated speed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from slimectl.architectures.config import Architecture
from slimectl.architectures.parallel import ParallelLayout, problems
from slimectl.planner import memory
from slimectl.planner.activations import columns
from slimectl.planner.flops import token_flops
from slimectl.planner.parameters import ResidentModel, local_params
from slimectl.planner.workload import GIB, Recompute, Run

USABLE = 0.9
"""Share of a GPU's memory that a plan may use. CUDA's context, NCCL's buffers and fragmentation need the rest."""
NODE = 8
"""GPUs of a node, joined by NVLink. Tensor parallelism stays within a node."""

# Only the order of layouts depends on these: attained rate, NVLink and share of the network of an H100.
FLOPS_PER_SECOND = 4e14
NVLINK_BYTES_PER_SECOND = 4e11
NETWORK_BYTES_PER_SECOND = 5e10


@dataclass(frozen=True)
class Choice:
    """A layout that fits, with its seconds per step and peak bytes."""

    layout: ParallelLayout
    recompute: Recompute
    seconds: float
    peak: float


def powers_of_two(limit: int) -> list[int]:
    return [2**i for i in range(limit.bit_length()) if 2**i <= limit]


def legal(architecture: Architecture, world: int) -> Iterator[ParallelLayout]:
    """Yield layouts that divide everything evenly. Sizes are powers of two, but pipelines divide the layers."""
    tensors = powers_of_two(min(world, NODE))
    pipelines = [size for size in range(1, world + 1) if world % size == 0 and architecture.layers % size == 0]
    experts, expert_tensors = ([1], [1])
    if architecture.experts:
        experts, expert_tensors = powers_of_two(min(world, architecture.experts)), tensors
    sizes = itertools.product(tensors, pipelines, powers_of_two(world), experts, expert_tensors)
    for tensor, pipeline, context, expert, expert_tensor in sizes:
        layout = ParallelLayout(tensor, pipeline, None, context, expert, expert_tensor)
        if not any(problems(layout, architecture.transformer, world)):
            yield layout


def fitting(models: Sequence[ResidentModel], run: Run, *, batch: int, memory_gib: float) -> Iterator[Choice]:
    """Yield layouts and recomputation that fit `run.world` GPUs, fastest first, for `batch` sequences per step.

    The first model is the policy. The time estimate is coarse. Among layouts that differ by less than about 10 %, the
    simplest comes first.
    """
    if memory.least(models, run) > run.world * USABLE * memory_gib * GIB:
        return  # not even without replication
    candidates: list[tuple[float, Run]] = []
    for layout in legal(models[0].architecture, run.world):
        if any(any(problems(layout, model.architecture.transformer, run.world)) for model in models[1:]):
            continue
        recomputes: tuple[Recompute, ...] = ("none", "full")
        for recompute in recomputes:
            candidate = replace(run, layout=layout, recompute=recompute)
            candidates.append((step_seconds(models[0], candidate, batch), candidate))
    for seconds, candidate in sorted(
        candidates, key=lambda item: (round(math.log(item[0], 1.1)), _parts(item[1]), item[0])
    ):
        peak = memory.peak(memory.figures(models, candidate))
        if peak <= USABLE * memory_gib * GIB:
            yield Choice(candidate.layout, candidate.recompute, seconds, peak)


def _parts(run: Run) -> int:
    """Number of parts of the model. A pipeline counts double, for its schedule."""
    layout = run.layout
    return layout.model_ranks * layout.pipeline + layout.expert_ranks * layout.expert_tensor


def step_seconds(policy: ResidentModel, run: Run, batch: int) -> float:
    """Coarse time of a step: FLOPs, sequential messages, and filling and draining the pipeline."""
    layout = run.layout
    packs = -(-batch * run.seq_len // (run.data * run.pack))
    flops = token_flops(policy, run.seq_len).value * (4 / 3 if run.recompute == "full" else 1)
    pack = run.pack * flops / (layout.model_ranks * FLOPS_PER_SECOND) + _messages(policy.architecture, run)
    rank = local_params(policy.parts, policy.architecture, layout, 0).all
    shared = (4 + run.bytes) * rank / _link(run.world) if run.data * layout.context > 1 else 0.0
    return (packs + (layout.pipeline - 1) / (layout.virtual_pipeline or 1)) * pack + shared


def _link(ranks: int) -> float:
    return NVLINK_BYTES_PER_SECOND if ranks <= NODE else NETWORK_BYTES_PER_SECOND


def _messages(architecture: Architecture, run: Run) -> float:
    """Seconds of messages per pack on one rank: gathers of its layers, again in backward, again if recomputed."""
    t, layout, c = architecture.transformer, run.layout, run.bytes
    passes = 3 if run.recompute == "full" else 2
    H, (_, k) = t["hidden_size"], columns(architecture)
    seconds = 0.0
    if (tensor := layout.tensor) > 1:
        seconds += 4 * run.tokens * H * c * (tensor - 1) / tensor / _link(tensor)
    if (context := layout.context) > 1:
        seconds += 2 * k / tensor * c * run.pack * (context - 1) / context / _link(tensor * context)
    if (ranks := layout.expert * layout.expert_tensor) > 1:
        sent = run.tokens / tensor * t["moe_router_topk"] * layout.expert_tensor
        seconds += 2 * sent * H * c * (ranks - 1) / ranks / _link(ranks)
    return float(passes * seconds * architecture.layers / layout.pipeline)
