"""Peak memory of one rank in a training step, from the second step on, when the optimizer state exists.

P parameters of the rank, L of them trained · c bytes of an element in forward and backward. The peak is at the start of
backward, with the gradients of earlier packs in memory; everything is counted at its largest, on the stage with the
largest sum. Other models keep their resident memory, and share the transient memory with the policy in turns.
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
    other_models: Sequence[Standing] = (),
) -> list[Figure]:
    """Weights, gradients, optimizer, activations, head and their sum, on the rank with the largest sum."""
    policy = policy_of(architecture, parts, adapters)
    stages = range(run.layout.pipeline if run.policy == "megatron" else 1)
    lines_by_stage = [_stage(policy, other_models, run, stage) for stage in stages]
    worst = max(lines_by_stage, key=lambda lines: sum(line.value for line in lines))
    location = f" on pipeline stage {lines_by_stage.index(worst)}" if len(lines_by_stage) > 1 else ""
    return [*worst, total(PEAK, worst, location)]


def peak(figures: Sequence[Figure]) -> float:
    return next(figure.value for figure in figures if figure.name == PEAK)


def least(models: Sequence[Standing], run: Run) -> float:
    """Bytes of weights, gradients and optimizer over all ranks, without replication."""
    bytes_per_parameter = 16 if run.bytes == 2 else 12
    return sum(run.bytes * count(model.parts) + bytes_per_parameter * count(model.trained) for model in models)


def _stage(policy: Standing, other_models: Sequence[Standing], run: Run, stage: int) -> list[Figure]:
    weights, gradients, optimizer = _resident_figures(policy, run, stage)
    if gathered := _gathered(policy, run):
        formula = f"{weights.formula} + {gathered.formula}"
        weights = replace(weights, value=weights.value + gathered.value, formula=formula)
    transient = passing(policy, run, stage, _unreduced_gradients(policy, run))
    lines = [weights, gradients, optimizer, *transient]
    turn = sum(figure.value for figure in transient) + (gathered.value if gathered else 0.0)
    turns = [(turn if _keeps_gradients(run) else turn + gradients.value, policy.name)]
    for model in other_models:
        resident, turn_bytes = _other_model(model, run, stage)
        lines += resident
        turns.append((turn_bytes, model.name))
    longest, name = max(turns)
    if name != policy.name:
        formula = f"its activations and head, as far as above the policy's {parameters(turns[0][0])} bytes"
        lines.append(Figure(f"{name}'s turn", longest - turns[0][0], "bytes", formula))
    return lines


def _other_model(model: Standing, run: Run, stage: int) -> tuple[list[Figure], float]:
    """Resident memory of a model other than the policy, and the bytes of its turn."""
    weights, gradients, optimizer = _resident_figures(model, run, stage)
    gathered = _gathered(model, run)
    resident, turn = [weights], gathered.value if gathered else 0.0
    if not model.trained:
        turn += asked(model, run, stage)
    else:
        turn += sum(figure.value for figure in passing(model, run, stage, _unreduced_gradients(model, run)))
        resident.append(optimizer)
        if _keeps_gradients(run):
            resident.append(gradients)
        else:
            turn += gradients.value
    return [replace(figure, name=f"{model.name} {figure.name}") for figure in resident], turn


def _keeps_gradients(run: Run) -> bool:
    """Whether gradient memory is kept from step to step."""
    return run.policy == "megatron" or (run.world == 1 and run.bytes == 2)


def _resident_figures(model: Standing, run: Run, stage: int) -> tuple[Figure, Figure, Figure]:
    return _fsdp(model, run) if run.policy == "fsdp" else _megatron(model, run, stage)


def _fsdp(model: Standing, run: Run) -> tuple[Figure, Figure, Figure]:
    P, L, n = count(model.parts), count(model.trained), run.world
    shared = f" / {n} ranks" if n > 1 else ""
    weights = Figure("weights", 4 * P / n, "bytes", f"float32 masters 4 x {P:,}{shared}")
    if n == 1 and run.bytes == 2:
        formula = f"float32 masters 4 x {L:,} + " if L else ""
        weights = Figure("weights", 4 * L + 2 * P, "bytes", f"{formula}bfloat16 2 x {P:,}")
    return (
        weights,
        Figure("gradients", 4 * L / n, "bytes", f"float32 4 x {L:,}{shared}"),
        Figure("optimizer", 8 * L / n, "bytes", f"two moments, float32: 8 x {L:,}{shared}"),
    )


def _gathered(model: Standing, run: Run) -> Figure | None:
    """Parameters that FSDP gathers temporarily on every rank; None if the model is not sharded."""
    if run.policy != "fsdp" or run.world == 1:
        return None
    layer, root = _layer_and_rest(model.parts, model.architecture)
    formula = f"gathered {run.bytes} x (2 layers of {parameters(layer)} + the rest {parameters(root)})"
    return Figure("gathered", run.bytes * (2 * layer + root), "bytes", formula)


def _unreduced_gradients(model: Standing, run: Run) -> float:
    """Number of parameters with full gradients before the reduce-scatter."""
    if run.policy != "fsdp" or run.world == 1:
        return 0.0
    return float(max(_layer_and_rest(model.trained, model.architecture)))


def _layer_and_rest(parts: Sequence[Part], architecture: Architecture) -> tuple[int, int]:
    layers = [sum(part.count for part in parts if part.layer == i) for i in range(architecture.layers)]
    return max(layers), count(parts) - sum(layers)


def _megatron(model: Standing, run: Run, stage: int) -> tuple[Figure, Figure, Figure]:
    layout, c = run.layout, run.bytes
    local = held(model.parts, model.architecture, layout, stage)
    trained = held(model.trained, model.architecture, layout, stage)
    L = parameters(trained.all)
    state_bytes, state_name = (12, "float32 master and two moments") if c == 2 else (8, "two moments, float32")
    optimizer = Figure("optimizer", state_bytes * trained.all, "bytes", f"{state_name}: {state_bytes} x {L}")
    if run.distributed_optimizer:
        shares, expert_shares = run.data * layout.context, layout.expert_data(run.world)
        formula = f"{state_name}: {state_bytes} x {parameters(trained.dense)} / {shares} ranks"
        if trained.experts:
            formula += f" + {state_bytes} x experts {parameters(trained.experts)} / {expert_shares} ranks"
        optimizer = Figure(
            "optimizer", state_bytes * (trained.dense / shares + trained.experts / expert_shares), "bytes", formula
        )  # fmt: skip
    return (
        Figure("weights", c * local.all, "bytes", f"{run.dtype} {c} x {parameters(local.all)}"),
        Figure("gradients", 4 * trained.all, "bytes", f"float32 4 x {L}"),
        optimizer,
    )
