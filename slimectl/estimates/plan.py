"""A model, ranks and a batch to a plan: the layout, and what training and sampling take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from slimectl.errors import SettingsError
from slimectl.estimates import compute, engine, memory, parameters
from slimectl.estimates.figures import GIB, Figure, sized
from slimectl.estimates.parameters import Part, parts_of
from slimectl.estimates.run import Recompute, Run
from slimectl.estimates.search import USABLE, fitting
from slimectl.layouts import SETTINGS, ParallelLayout, problems
from slimectl.weights.architecture import Architecture, Config
from slimectl.weights.families import family_of

Suggestion = tuple[ParallelLayout, Recompute]


@dataclass(frozen=True)
class Model:
    """What a configuration says, as the formulas take it."""

    architecture: Architecture
    parts: Sequence[Part]


@dataclass(frozen=True)
class Plan:
    """What was planned, and its figures by section."""

    run: Run
    sections: dict[str, list[Figure]]
    fits: bool


def model_of(config: Config) -> Model:
    """From a complete configuration. Raises CheckpointError if its family is not known."""
    family = family_of(config)
    return Model(family.architecture(config), parts_of(family.links(config)))


def suggested(card: dict[str, Any], gpus: int) -> Suggestion | None:
    """The layout and recomputation that a card has for that many GPUs."""
    given = dict(card.get("layout", {}).get(f"gpus_{gpus}", {}))
    if not given or "note" in given:
        return None
    recompute: Recompute = given.pop("recompute", "none")
    return ParallelLayout(**given), recompute


def fits(model: Model, run: Run, memory_gib: float) -> bool:
    most = memory.peak(memory.figures(model.parts, model.architecture, run))
    return most <= USABLE * memory_gib * GIB


def check(model: Model, run: Run) -> None:
    """Raises SettingsError, one line, for what the trainer would refuse."""
    architecture = model.architecture
    if run.policy == "fsdp":
        plain = architecture.layer in ("plain", "sandwich") and not architecture.mla and not architecture.experts
        if not plain:
            raise SettingsError("--policy fsdp: trains plain dense decoders only; plan this one with --policy megatron")
        if run.recompute == "selective":
            raise SettingsError("--recompute selective: the fsdp policy recomputes whole layers; use full or none")
        if run.layout != ParallelLayout():
            raise SettingsError("--policy fsdp: takes no parallel sizes; drop them, or plan with --policy megatron")
        return
    for problem in problems(run.layout, architecture.transformer, run.world):
        raise SettingsError(problem)


def with_layout(
    model: Model, run: Run, suggestion: Suggestion | None, *, recompute: Recompute | None, batch: int, memory_gib: float
) -> Run:
    """`run` with the suggested layout where that fits, else the best of those that do. Raises SettingsError."""
    if suggestion is not None:
        candidate = replace(run, layout=suggestion[0], recompute=recompute or suggestion[1])
        if fits(model, candidate, memory_gib):
            return candidate
    for choice in fitting(model.parts, model.architecture, run, batch=batch, memory_gib=memory_gib):
        if recompute in (None, choice.recompute):
            return replace(run, layout=choice.layout, recompute=choice.recompute)
    least = (14 + 4) * parameters.count(model.parts) if run.bytes == 2 else 16 * parameters.count(model.parts)
    raise SettingsError(
        f"--gpus {run.world}: no layout fits {USABLE:.0%} of {memory_gib:g} GiB a GPU; weights, gradients and optimizer"
        f" alone take {sized(least)} in all; give more --gpus, shorter --seq-len, or a layout to see its figures"
    )


def planned(
    model: Model,
    run: Run,
    *,
    batch: int,
    memory_gib: float,
    tflops: float | None,
    mfu: float,
    engine_tensor: int,
    engine_share: float,
    concurrency: int | None,
) -> Plan:
    """All figures of a checked run."""
    parts, architecture = model.parts, model.architecture
    training = memory.figures(parts, architecture, run)
    return Plan(
        run,
        {
            "parameters": parameters.figures(parts, architecture, run.layout),
            "training memory": training,
            "arithmetic": compute.figures(
                parts, architecture, seq_len=run.seq_len, batch=batch, world=run.world,
                recomputes=run.recompute == "full", tflops=tflops, mfu=mfu,
            ),
            "engine": engine.figures(
                parts, architecture, dtype_bytes=run.bytes, tensor=engine_tensor, memory_gib=memory_gib,
                share=engine_share, seq_len=run.seq_len, concurrency=concurrency,
            ),
        },
        memory.peak(training) <= USABLE * memory_gib * GIB,
    )  # fmt: skip


def told(run: Run) -> str:
    """The layout in the words of the settings.

    >>> told(Run(8, ParallelLayout(tensor=2), recompute="full"))
    '8 ranks: tensor 2, data 4; recompute full'
    """
    if run.policy == "fsdp":
        return f"{run.world} ranks: fsdp; recompute {run.recompute}"
    sizes = [f"{name} {size}" for name in SETTINGS if (size := getattr(run.layout, name)) not in (None, 1)]
    return f"{run.world} ranks: {', '.join([*sizes, f'data {run.data}'])}; recompute {run.recompute}"
