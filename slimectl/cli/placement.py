"""`slimectl plan --placement`: placement of ranks and engines on GPUs, from the settings of a run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace

import typer

from slimectl.placement import Placement, uneven
from slimectl.settings import Settings


def show_placement(settings: Settings, *, on_gpu: bool, as_json: bool) -> None:
    """Print the ranks and engines of every GPU; problems and notes go to stderr. Exit code 1 if it is infeasible."""
    from slimectl import wiring
    from slimectl.cli.records import say

    placement = replace(wiring.placement(settings), on_gpu=on_gpu and settings.train.device != "cpu")
    problems = [*placement.problems(), *_layout_problems(settings)]
    notes = list(uneven(settings.rollouts_per_round, settings.rollouts_per_step, _copies(settings)))
    if as_json:
        places = [asdict(bundle) | {"share": bundle.share} for bundle in placement.bundles]
        print(json.dumps({"places": places, "problems": problems, "notes": notes}, indent=2))
    else:
        for line in table(placement):
            print(line)
    for line in [*problems, *notes]:
        say(line)
    say(told(placement))
    if problems:
        raise typer.Exit(1)


def table(placement: Placement) -> Iterator[str]:
    """Table with one line per GPU or process."""
    place = "gpu" if placement.on_gpu else "process"
    yield f"machine  {place:<7}  trains    samples"
    for bundle in placement.bundles:
        trains = "-" if bundle.rank is None else f"rank {bundle.rank}"
        samples = "-" if bundle.engine is None else f"engine {bundle.engine}"
        yield f"{bundle.node:<7}  {bundle.gpu:<7}  {trains:<8}  {samples}"


def told(placement: Placement) -> str:
    """Summary of the placement in one line."""
    machines, ranks = _count(placement.nodes, "machine"), _count(placement.ranks, "rank")
    engines = _count(placement.engines, "engine")
    if not placement.on_gpu:
        return f"{machines}: {ranks}; {engines} beside, where there is room"
    node, engine = _count(placement.gpus_per_node, "GPU"), _count(placement.gpus_per_engine, "GPU")
    return f"{machines} of {node}: {ranks} and {engines} of {engine}, {'sharing' if placement.colocate else 'apart'}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _copies(settings: Settings) -> int:
    """The data-parallel size."""
    from slimectl import wiring

    ranks = settings.cluster.ranks
    return wiring.layout(settings).data(ranks) if settings.train.policy == "megatron" else ranks


def _layout_problems(settings: Settings) -> Iterator[str]:
    """Problems of the parallel layout with the model, if one is configured."""
    from slimectl import wiring
    from slimectl.cli.plan import configuration
    from slimectl.layouts import problems
    from slimectl.weights.families import family_of

    model = settings.model
    if settings.train.policy != "megatron" or (model.path is None and model.card is None):
        return
    config = configuration(None if model.path else model.card, model.path)
    yield from problems(
        wiring.layout(settings), family_of(config).architecture(config).transformer, settings.cluster.ranks
    )
