"""The memory of one rank at the peak of a training step: the second step on, when the optimizer has its state.

P parameters of the rank · c bytes of a number in forward and backward. The peak is reached as backward begins, with
the gradients of earlier packs in place; everything is counted at its largest, on the stage that holds most.
"""

from __future__ import annotations

from collections.abc import Sequence

from slimectl.estimates.figures import Figure, parameters, total
from slimectl.estimates.parameters import Part, count, held
from slimectl.estimates.passing import passing
from slimectl.estimates.run import Run
from slimectl.weights.architecture import Architecture

PEAK = "peak per rank"


def figures(parts: Sequence[Part], architecture: Architecture, run: Run) -> list[Figure]:
    """Weights, gradients, optimizer, activations, head and their sum, on the rank that needs most."""
    of_stage = _fsdp if run.policy == "fsdp" else _megatron
    stages = range(run.layout.pipeline if run.policy == "megatron" else 1)
    found = [of_stage(parts, architecture, run, stage) for stage in stages]
    worst = max(found, key=lambda lines: sum(line.value for line in lines))
    where = f" on pipeline stage {found.index(worst)}" if len(found) > 1 else ""
    return [*worst, total(PEAK, worst, where)]


def peak(figures: Sequence[Figure]) -> float:
    return next(figure.value for figure in figures if figure.name == PEAK)


def _fsdp(parts: Sequence[Part], architecture: Architecture, run: Run, stage: int) -> list[Figure]:
    P, n, c = count(parts), run.world, run.bytes
    layer = max(_layer_sizes(parts, architecture))
    root = P - sum(_layer_sizes(parts, architecture))
    shared = f" / {n} ranks" if n > 1 else ""
    weights = Figure("weights", 4 * P / n, "bytes", f"float32 masters 4 x {P:,}{shared}")
    gradients = Figure("gradients", 4 * P / n, "bytes", f"float32 4 x {P:,}{shared}")
    if n > 1:
        words = f"{weights.formula} + gathered {c} x (2 layers of {parameters(layer)} + the rest {parameters(root)})"
        weights = Figure("weights", weights.value + c * (2 * layer + root), "bytes", words)
    elif c == 2:
        weights = Figure("weights", 6 * P, "bytes", f"{weights.formula} + bfloat16 copies 2 x {P:,}")
    return [
        weights,
        gradients,
        Figure("optimizer", 8 * P / n, "bytes", f"two moments, float32: 8 x {P:,}{shared}"),
        *passing(parts, architecture, run, 0, float(max(layer, root) if n > 1 else 0)),
    ]


def _layer_sizes(parts: Sequence[Part], architecture: Architecture) -> list[int]:
    return [sum(part.count for part in parts if part.layer == i) for i in range(architecture.layers)]


def _megatron(parts: Sequence[Part], architecture: Architecture, run: Run, stage: int) -> list[Figure]:
    mine, layout, c = held(parts, architecture, run.layout, stage), run.layout, run.bytes
    P = parameters(mine.all)
    each, what = (12, "float32 master and two moments") if c == 2 else (8, "two moments, float32")
    optimizer = Figure("optimizer", each * mine.all, "bytes", f"{what}: {each} x {P}")
    if run.distributed_optimizer:
        shares, expert_shares = run.data * layout.context, layout.expert_data(run.world)
        words = f"{what}: {each} x {parameters(mine.dense)} / {shares} ranks"
        if mine.experts:
            words += f" + {each} x experts {parameters(mine.experts)} / {expert_shares} ranks"
        optimizer = Figure(
            "optimizer", each * (mine.dense / shares + mine.experts / expert_shares), "bytes", words
        )  # fmt: skip
    return [
        Figure("weights", c * mine.all, "bytes", f"{run.dtype} {c} x {P}"),
        Figure("gradients", 4 * mine.all, "bytes", f"float32 4 x {P}"),
        optimizer,
        *passing(parts, architecture, run, stage, 0.0),
    ]
