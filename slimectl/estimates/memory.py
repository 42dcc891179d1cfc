"""The memory of one rank at the peak of a training step: the second step on, when the optimizer has its state.

P parameters of the rank, L of them learn · c bytes of a number in forward and backward. The peak is reached as backward
begins, with the gradients of earlier packs in place; everything is counted at its largest, on the stage that holds
most. Models beside the policy hold what they hold at any time, and take turns with it for the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from slimectl.estimates.figures import Figure, parameters, total
from slimectl.estimates.others import Standing, policy_of
from slimectl.estimates.parameters import Part, count, held
from slimectl.estimates.passing import asked, passing
from slimectl.estimates.run import Run
from slimectl.weights.architecture import Architecture

PEAK = "peak per rank"


def figures(
    parts: Sequence[Part],
    architecture: Architecture,
    run: Run,
    *,
    adapters: Sequence[Part] = (),
    others: Sequence[Standing] = (),
) -> list[Figure]:
    """Weights, gradients, optimizer, activations, head and their sum, on the rank that needs most."""
    policy = policy_of(architecture, parts, adapters)
    stages = range(run.layout.pipeline if run.policy == "megatron" else 1)
    found = [_stage(policy, others, run, stage) for stage in stages]
    worst = max(found, key=lambda lines: sum(line.value for line in lines))
    where = f" on pipeline stage {found.index(worst)}" if len(found) > 1 else ""
    return [*worst, total(PEAK, worst, where)]


def peak(figures: Sequence[Figure]) -> float:
    return next(figure.value for figure in figures if figure.name == PEAK)


def least(models: Sequence[Standing], run: Run) -> float:
    """Bytes of weights, gradients and optimizer on all ranks together, nothing held twice."""
    each = 16 if run.bytes == 2 else 12
    return sum(run.bytes * count(model.parts) + each * count(model.trained) for model in models)


def _stage(policy: Standing, others: Sequence[Standing], run: Run, stage: int) -> list[Figure]:
    weights, gradients, optimizer = _held(policy, run, stage)
    if gathered := _gathered(policy, run):
        words = f"{weights.formula} + {gathered.formula}"
        weights = replace(weights, value=weights.value + gathered.value, formula=words)
    own = passing(policy, run, stage, _shared_out(policy, run))
    lines = [weights, gradients, optimizer, *own]
    turn = sum(figure.value for figure in own) + (gathered.value if gathered else 0.0)
    turns = [(turn if _keeps_gradients(run) else turn + gradients.value, policy.name)]
    for other in others:
        stays, goes = _beside(other, run, stage)
        lines += stays
        turns.append((goes, other.name))
    longest, name = max(turns)
    if name != policy.name:
        words = f"its activations and head, as far as above the policy's {parameters(turns[0][0])} bytes"
        lines.append(Figure(f"{name}'s turn", longest - turns[0][0], "bytes", words))
    return lines


def _beside(other: Standing, run: Run, stage: int) -> tuple[list[Figure], float]:
    """What a model beside the policy always holds, and the bytes of its turn."""
    weights, gradients, optimizer = _held(other, run, stage)
    gathered = _gathered(other, run)
    stays, turn = [weights], gathered.value if gathered else 0.0
    if not other.trained:
        turn += asked(other, run, stage)
    else:
        turn += sum(figure.value for figure in passing(other, run, stage, _shared_out(other, run)))
        stays.append(optimizer)
        if _keeps_gradients(run):
            stays.append(gradients)
        else:
            turn += gradients.value
    return [replace(figure, name=f"{other.name} {figure.name}") for figure in stays], turn


def _keeps_gradients(run: Run) -> bool:
    """Whether the memory of gradients is held from step to step."""
    return run.policy == "megatron" or (run.world == 1 and run.bytes == 2)


def _held(model: Standing, run: Run, stage: int) -> tuple[Figure, Figure, Figure]:
    return _fsdp(model, run) if run.policy == "fsdp" else _megatron(model, run, stage)


def _fsdp(model: Standing, run: Run) -> tuple[Figure, Figure, Figure]:
    P, L, n = count(model.parts), count(model.trained), run.world
    shared = f" / {n} ranks" if n > 1 else ""
    weights = Figure("weights", 4 * P / n, "bytes", f"float32 masters 4 x {P:,}{shared}")
    if n == 1 and run.bytes == 2:
        words = f"float32 masters 4 x {L:,} + " if L else ""
        weights = Figure("weights", 4 * L + 2 * P, "bytes", f"{words}bfloat16 2 x {P:,}")
    return (
        weights,
        Figure("gradients", 4 * L / n, "bytes", f"float32 4 x {L:,}{shared}"),
        Figure("optimizer", 8 * L / n, "bytes", f"two moments, float32: 8 x {L:,}{shared}"),
    )


def _gathered(model: Standing, run: Run) -> Figure | None:
    """What is whole on every rank for a while, of a model that is sharded."""
    if run.policy != "fsdp" or run.world == 1:
        return None
    layer, root = _layer_and_rest(model.parts, model.architecture)
    words = f"gathered {run.bytes} x (2 layers of {parameters(layer)} + the rest {parameters(root)})"
    return Figure("gathered", run.bytes * (2 * layer + root), "bytes", words)


def _shared_out(model: Standing, run: Run) -> float:
    """Parameters whose gradients are whole before they are shared out."""
    if run.policy != "fsdp" or run.world == 1:
        return 0.0
    return float(max(_layer_and_rest(model.trained, model.architecture)))


def _layer_and_rest(parts: Sequence[Part], architecture: Architecture) -> tuple[int, int]:
    layers = [sum(part.count for part in parts if part.layer == i) for i in range(architecture.layers)]
    return max(layers), count(parts) - sum(layers)


def _megatron(model: Standing, run: Run, stage: int) -> tuple[Figure, Figure, Figure]:
    layout, c = run.layout, run.bytes
    mine = held(model.parts, model.architecture, layout, stage)
    learns = held(model.trained, model.architecture, layout, stage)
    L = parameters(learns.all)
    each, what = (12, "float32 master and two moments") if c == 2 else (8, "two moments, float32")
    optimizer = Figure("optimizer", each * learns.all, "bytes", f"{what}: {each} x {L}")
    if run.distributed_optimizer:
        shares, expert_shares = run.data * layout.context, layout.expert_data(run.world)
        words = f"{what}: {each} x {parameters(learns.dense)} / {shares} ranks"
        if learns.experts:
            words += f" + {each} x experts {parameters(learns.experts)} / {expert_shares} ranks"
        optimizer = Figure(
            "optimizer", each * (learns.dense / shares + learns.experts / expert_shares), "bytes", words
        )  # fmt: skip
    return (
        Figure("weights", c * mine.all, "bytes", f"{run.dtype} {c} x {parameters(mine.all)}"),
        Figure("gradients", 4 * learns.all, "bytes", f"float32 4 x {L}"),
        optimizer,
    )
