"""Output of `slimectl plan --placement`: which ranks and engines use which GPU."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import typer

from slimectl.architectures import cards
from slimectl.planner.placement import Placement, divisibility_warnings
from slimectl.system import stdio
from slimectl.system.stdio import quantity

if TYPE_CHECKING:
    from slimectl.settings import Settings


def show_placement(settings: Settings, *, on_gpu: bool, as_json: bool) -> None:
    """Print the ranks and engines of every GPU. Problems and notes go to stderr. Exits with 1 if it is infeasible."""
    from slimectl.runtime import builders

    placement = replace(builders.placement(settings), on_gpu=on_gpu and settings.train.device != "cpu")
    problems = [*placement.problems(), *_layout_problems(settings)]
    notes = list(divisibility_warnings(settings.rollouts_per_round, settings.rollouts_per_step, _copies(settings)))
    if as_json:
        places = [asdict(bundle) | {"share": bundle.share} for bundle in placement.bundles]
        print(json.dumps({"places": places, "problems": problems, "notes": notes}, indent=2))
    else:
        for line in table(placement):
            print(line)
    for line in problems:
        stdio.say(line)
    for line in [*notes, placement_lines(placement)]:
        stdio.note(line)
    if problems:
        raise typer.Exit(1)


def table(placement: Placement) -> Iterator[str]:
    """Yield the lines of a table with one line per GPU or process."""
    place = "gpu" if placement.on_gpu else "process"
    yield f"machine  {place:<7}  trains    samples"
    for bundle in placement.bundles:
        trains = "-" if bundle.rank is None else f"rank {bundle.rank}"
        samples = "-" if bundle.engine is None else f"engine {bundle.engine}"
        yield f"{bundle.node:<7}  {bundle.gpu:<7}  {trains:<8}  {samples}"


def placement_lines(placement: Placement) -> str:
    """Return a summary of the placement in one line."""
    machines, ranks = quantity(placement.nodes, "machine"), quantity(placement.ranks, "rank")
    sizes = Counter(placement.engine_gpus)
    engines = quantity(sizes.total(), "engine")
    if not placement.on_gpu:
        return f"{machines}: {ranks}, and {engines} where there is room"
    node = quantity(placement.gpus_per_node, "GPU")
    if sizes:
        engines = ", ".join(f"{quantity(count, 'engine')} of {quantity(gpus, 'GPU')}" for gpus, count in sizes.items())
    return (
        f"{machines} of {node}: {ranks} and {engines}, {'on shared GPUs' if placement.colocate else 'on separate GPUs'}"
    )


def _copies(settings: Settings) -> int:
    """Return the data-parallel size."""
    from slimectl.runtime import builders

    ranks = settings.cluster.ranks
    return builders.layout(settings.megatron).data(ranks) if settings.train.backend == "megatron" else ranks


def _layout_problems(settings: Settings) -> Iterator[str]:
    """Yield the problems of the parallel layout with the model, if one is configured."""
    from slimectl.architectures.parallel import problems
    from slimectl.architectures.registry import family_of
    from slimectl.runtime import builders, capacity

    model = settings.model
    if settings.train.backend != "megatron" or (model.path is None and model.card is None):
        return
    config = cards.language_model(capacity.configuration(settings) or {})
    yield from problems(
        builders.layout(settings.megatron), family_of(config).architecture(config).transformer, settings.cluster.ranks
    )
