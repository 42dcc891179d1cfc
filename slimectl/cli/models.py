"""slimectl models"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from slimectl.architectures import cards
from slimectl.cli.options import AsJson
from slimectl.errors import SettingsError, StorageError
from slimectl.system import stdio

USAGE = "models: use `slimectl models`, `models show NAME`, `models check NAME DIR` or `models create NAME DIR`"
COLUMNS = ("name", "family", "parameters", "activated", "layers", "hidden")


def models(
    action: Annotated[str | None, typer.Argument(help="list (default), show, check or create")] = None,
    name: Annotated[str | None, typer.Argument(help="Card name")] = None,
    target: Annotated[
        Path | None, typer.Argument(metavar="DIR", help="Checkpoint to check, or directory to create")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the new weights")] = 0,
    as_json: AsJson = False,
) -> None:
    """List or show model cards, check a checkpoint against one, or create a model with random weights.

    Example:

        slimectl models create tiny models/tiny-0 --seed 0
    """
    if action in (None, "list") and as_json:
        for card in cards.names():
            print(json.dumps(facts(card)))
    elif action in (None, "list"):
        print_table([COLUMNS, *(row(card) for card in cards.names())])
    elif action == "show" and name is not None and as_json:
        print(json.dumps(cards.load(name)))
    elif action == "show" and name is not None:
        print(cards.path_of(name).read_text(encoding="utf-8"), end="")
    elif action == "check" and name is not None and target is not None:
        check(name, target, as_json=as_json)
    elif action == "create" and name is not None:
        create(name, target, seed)
    else:
        raise SettingsError(USAGE)


def facts(name: str) -> dict[str, Any]:
    """Return the columns of a card."""
    card = cards.load(name)
    config = cards.language_model(card["config"])
    total = card["parameters"]
    values = (name, card["family"], total, card.get("activated", total), config["num_hidden_layers"])
    return dict(zip(COLUMNS, (*values, config["hidden_size"]), strict=True))


def row(name: str) -> tuple[str, ...]:
    """Format the columns of a card as text."""
    from slimectl.planner.workload import parameters

    return tuple(
        parameters(value) if column in ("parameters", "activated") else str(value)
        for column, value in facts(name).items()
    )


def print_table(rows: list[tuple[str, ...]]) -> None:
    """Print aligned columns: the first two left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for cells in rows:
        left_cells = [cell.ljust(width) for cell, width in zip(cells[:2], widths[:2], strict=True)]
        right_cells = [cell.rjust(width) for cell, width in zip(cells[2:], widths[2:], strict=True)]
        print("  ".join(left_cells + right_cells))


def check(name: str, folder: Path, *, as_json: bool = False) -> None:
    """Print the differences between a checkpoint and a card, with exit code 1 if there are any."""
    from slimectl.architectures.config import read_config
    from slimectl.runtime import builders

    card: dict[str, Any] = cards.load(name)
    differences = cards.differences(
        card, read_config(builders.model_folder(str(folder), setting="models check", weights=False))
    )
    for difference in differences:
        key, in_card, in_checkpoint = difference
        entry = {"key": key, "card": in_card, "checkpoint": in_checkpoint}
        print(json.dumps(entry) if as_json else cards.describe_difference(difference))
    if differences:
        raise typer.Exit(1)
    stdio.note(f"{folder}: matches the card {name}")


def create(name: str, target: Path | None, seed: int) -> None:
    card = cards.load(name)
    if target is None or target.exists():
        raise SettingsError(
            f"models create: {f'{target} already exists' if target else 'no directory given'}. Give a new directory"
        )
    from slimectl.data.run_dir import write_folder
    from slimectl.planner.workload import sized
    from slimectl.runtime import builders
    from slimectl.runtime.capacity import MASTER_BYTES, available_memory, free_space

    size = MASTER_BYTES * card["parameters"]
    for place, free in (("on disk", free_space(target)), ("in memory", available_memory("cpu"))):
        if free is not None and size > free:
            raise StorageError(f"{target}: {name} needs {sized(size)} {place}, but {sized(free)} are free. Free some")
    write_folder(target, lambda staged: builders.create_model(name, staged, seed=seed))
    stdio.note(f"{target}: a new {card['family']} model with random weights, seed {seed}")
