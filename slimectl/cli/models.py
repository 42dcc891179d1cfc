"""slimectl models"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slimectl import cards
from slimectl.errors import SettingsError


def models(
    action: Annotated[str | None, typer.Argument(help="list, show or create")] = None,
    name: Annotated[str | None, typer.Argument(help="A card's name")] = None,
    target: Annotated[Path | None, typer.Argument(metavar="DIR", help="Directory to create the model in")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the new weights")] = 0,
) -> None:
    """List the model cards, show one, or create a model of random weights from it.

    Example:

        slimectl models create tiny models/tiny-0 --seed 0
    """
    if action in (None, "list"):
        for card in cards.names():
            print(f"{card:<12} {cards.load(card)['family']}")
        return
    if action not in ("show", "create") or name is None:
        raise SettingsError("models: write `slimectl models`, `models show NAME` or `models create NAME DIR`")
    card = cards.load(name)
    if action == "show":
        print((cards.folder() / f"{name}.toml").read_text(), end="")
        return
    if target is None or target.exists():
        raise SettingsError(f"models create: give a directory that does not exist yet, not {target}")
    from slimectl import wiring
    from slimectl.cli.records import say
    from slimectl.data.rundir import write_folder

    write_folder(target, lambda staged: wiring.new_model(name, staged, seed=seed))
    say(f"{target}: a new {card['family']} of random weights, seed {seed}")
